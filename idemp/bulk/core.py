"""Chunks of rows, handled by the same protocol as deliveries.

    chunk ─ accept ─ by type, sorted by key, in pieces ─ execute: BEGIN, claim, handler, store outputs, COMMIT ─ report

A piece is one transaction. If a piece fails, the failing rows are taken out and the others run again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from pydantic import BaseModel

from idemp.app import App
from idemp.bulk.rows import Answer, Report, Row, deliveries
from idemp.bulk.sets import HELD, LATE, WAITS, SetHandler, Sets
from idemp.envelopes import read_delivery
from idemp.errors import (
    ConfigurationError,
    Conflict,
    HandlerError,
    InFlight,
    Late,
    Unavailable,
    UnknownType,
    Unreadable,
    describe_error,
)
from idemp.executor import Executor
from idemp.failures import Phase
from idemp.handlers import AnyMessage, Handler
from idemp.handling import Handling
from idemp.messages import Delivery, type_name
from idemp.policy import Idempotent, Policy
from idemp.ports import Claim, Handled, Verdict
from idemp.process import raise_red
from idemp.sql.checks import check_database
from idemp.sql.engine import Database, engines, worker_name
from idemp.sql.guard import Unit
from idemp.sql.store import HEAD_START, SqlStore

if TYPE_CHECKING:
    from pyarrow import Table
    from sqlalchemy.ext.asyncio import AsyncEngine

__all__ = ["Bulk"]

PIECE: Final = 1_000  # rows of a transaction


class Bulk:
    """Handles chunks of rows with the handlers of an app, against its inbox. Belongs to one thread.

    Args:
        app: Consumer, policies and handlers. Types that are not opted in are parked.
        run: Name of the run, up to 80 characters, which the inbox stores as the worker of its claims: a row that the same run had
            claimed is a replay. By default a name that is not used again.
        sets: Handlers of all new rows of a type at once, by message class or type name: SQL, or a function of an Arrow table. Needs
            PostgreSQL and psycopg, and a handler of the type in the app, whose policy identifies its messages.
        dispatch: `relay` leaves outputs to a relay; `never` stores them as if they had been sent.
        adopt: Whether to claim only: no handler runs, and each row, of any age, counts as handled from now on.
        dry_run: Whether to report only what would happen to each row: nothing is claimed, and no handler runs.

    Raises:
        ConfigurationError: A start-up check has a red finding, or an argument is invalid.

    Example:
        >>> import tempfile
        >>> from idemp import Settings
        >>> from idemp.sql.schema import upgrade
        >>> class Reserve(BaseModel):
        ...     __message_type__ = "stock.Reserve"
        ...     order_id: int
        >>> folder = tempfile.TemporaryDirectory()
        >>> app = App("stock", settings=Settings(database_url=f"sqlite:///{folder.name}/stock.db"))
        >>> upgrade(Database(app.settings.database_url))
        >>> @app.handler(Reserve, policy=Idempotent(key="order_id"))
        ... def reserve(message: Reserve) -> None: ...
        >>> with Bulk(app) as bulk:
        ...     report = bulk.run([Row(b'{"order_id": 7}', type="stock.Reserve"), Row(b"{", type="stock.Reserve")])
        >>> report.counts[Answer.NEW], report.parked[0].rule
        (1, 'unreadable')
        >>> folder.cleanup()
    """

    def __init__(
        self,
        app: App,
        *,
        run: str | None = None,
        sets: Mapping[type[BaseModel] | str, SetHandler] | None = None,
        dispatch: Literal["relay", "never"] = "relay",
        adopt: bool = False,
        dry_run: bool = False,
    ) -> None:
        if dispatch not in ("relay", "never"):
            raise ConfigurationError(f"dispatch={dispatch!r} has to be 'relay' or 'never'")
        if run is not None and not 0 < len(run) <= 80:
            raise ConfigurationError(f"run={run!r} has to have 1 to 80 characters")
        self._app, self._adopt, self._run = app, adopt, run or worker_name()
        settings = app.settings
        engine, asynchronous = engines(settings, app.engine)
        self._database = Database(engine, settings.table_prefix, fast=settings.fast_path)
        app.configure()
        set_handlers = self._set_handlers(sets or {}, dry_run=dry_run)
        raise_red(check_database(self._database))
        store = (_DryStore if dry_run else SqlStore)(self._database, self._run, HEAD_START if dispatch == "relay" else None)
        app.register(store)
        self._store = store
        handlers = app.handlers.map(_claiming) if adopt else app.handlers
        if dry_run:  # with model and policy, so that unreadable and late rows are reported as in a real run
            handlers = handlers.map(lambda each: _claiming(each, each.model, each.policy))
        self._executor = Executor(handlers, store)
        self._judge = Executor(handlers.map(_claiming), _DryStore.like(store))
        self._loop: asyncio.Runner | None = None
        if any(handler.is_async for handler in handlers.values()):
            self._run_on_loop(store, asynchronous)
        self._sets = {type: Sets(handlers[type], store, function) for type, function in set_handlers.items()}

    def _run_on_loop(self, store: SqlStore, asynchronous: Callable[[], AsyncEngine]) -> None:
        """Run `async def` handlers on an event loop, which keeps its connections from chunk to chunk."""
        from idemp.sql.aio import AsyncSqlStore

        self._loop = asyncio.Runner()
        self._async_store = AsyncSqlStore.beside(store, asynchronous())
        self._executor = self._executor.for_task(self._async_store)

    def _execute(self, handlings: Sequence[Handling]) -> None:
        if self._loop is None:
            self._executor.execute([handlings])
        else:
            self._loop.run(self._async_store.run(self._executor.execute, [handlings]))

    def _set_handlers(self, sets: Mapping[type[BaseModel] | str, SetHandler], *, dry_run: bool) -> dict[str, SetHandler | None]:
        """Return the set handler of each type; None for a type whose rows are only claimed."""
        named = {each if isinstance(each, str) else type_name(each): function for each, function in sets.items()}
        handlers, supported = self._app.handlers, Sets.supported(self._database)
        if named and not supported:
            raise ConfigurationError("sets need PostgreSQL and psycopg: leave them out, and rows go through the handlers")
        plain = {type for type, each in handlers.items() if each.identity and not each.identity.former}
        if unknown := sorted(set(named) - plain):
            types = ", ".join(unknown)
            raise ConfigurationError(f"a set for {types} needs a handler of the type that is opted in, without a former identity")
        if dry_run or not supported:
            return {}
        return dict.fromkeys(plain, None) if self._adopt else dict(named)

    def run(self, chunk: Sequence[Row] | Table) -> Report:
        """Handle a chunk. If this raises, run the whole chunk again: rows that were handled are replays then.

        Args:
            chunk: Some 10,000 rows, or an Arrow table with columns `body`, `id`, `type`, `time` (seconds) and `headers`.

        Raises:
            Unavailable: The database takes no work.
            InFlight: Another transaction has held an id for too long.
        """
        report = Report()
        handlings: dict[int, Handling] = {}
        in_sets: dict[str, list[tuple[int, Any]]] = {}
        for place, delivery in enumerate(deliveries(self._app.name, chunk, adopt=self._adopt)):
            if self._sets and (found := self._in_set(delivery)) is not None:
                type, message = found
                in_sets.setdefault(type, []).append((place, message))
                continue
            handlings[place] = handling = self._executor.accept(delivery)
            handler = handling.handler
            if handler is not None and handling.error is None and handling.claim is None:
                text = f"messages of type {handler.type!r} are not opted in, so a second run would handle them again"
                error = HandlerError(f"{text}: set policy=Idempotent(…)")
                handling.phase = Phase.HANDLER
                handling.fail(error, handling.decide(error, self._store))
        for type, rows in in_sets.items():
            self._sets[type].run(rows, report)
        for piece in _pieces([handling for handling in handlings.values() if handling.error is None]):
            self._handle(self._without_late(piece))
        if Executor(self._executor.handlers, self._store).read_back(list(handlings.values())):
            held = next(handling for handling in handlings.values() if handling.held)
            raise Unavailable(f"the database takes no work ({held.obstacle}): run the chunk again")
        _count(handlings, self._run, report)
        return report

    def _in_set(self, delivery: Delivery) -> tuple[str, Delivery] | None:
        """Return type and message of a delivery that is of a set; one that cannot be read is parked by the executor."""
        try:
            message = read_delivery(delivery)
            type = self._executor.handlers.find(message).type
        except (Unreadable, UnknownType):
            return None
        return (type, message) if type in self._sets else None

    def _without_late(self, handlings: Sequence[Handling]) -> Sequence[Handling]:
        """Judge rows that may be late without running handlers, and return the others: all rows of an archive may be late."""
        handler = handlings[0].handler
        assert handler is not None
        if not handler.parks_late:
            return handlings
        with self._database.engine.connect() as connection:
            purged = self._store.purged_before(connection, handler.consumer, handler.type)
        late: list[Handling] = []
        others: list[Handling] = []
        for handling in handlings:
            assert handling.claim is not None
            (late if handling.claim.made_at is not None and handling.claim.made_at <= purged else others).append(handling)
        judged = [self._judge.accept(handling.delivery) for handling in late]
        self._judge.execute([judged])
        for handling, judgement in zip(late, judged, strict=True):
            handling.claim, handling.verdict, handling.claimer = judgement.claim, judgement.verdict, judgement.claimer
            handling.phase = judgement.phase
            handling.error, handling.decision = judgement.error, judgement.decision
            if judgement.verdict is Verdict.CLAIMED:
                handling.fail(Late(LATE))
        return [*others, *(handling for handling in late if handling.held or isinstance(handling.error, InFlight))]

    def _handle(self, handlings: Sequence[Handling]) -> None:
        """Execute a piece; wait for ids that another transaction holds."""
        self._execute(handlings)
        for waited in range(WAITS + 1):
            if held := [handling for handling in handlings if handling.held]:
                raise Unavailable(f"the database takes no work ({held[0].obstacle}): run the chunk again")
            handlings = [handling for handling in handlings if isinstance(handling.error, InFlight)]
            if handlings and waited == WAITS:
                raise InFlight(HELD)
            for handling in handlings:
                self._executor.renew(handling)
                self._execute([handling])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def pause(self) -> None:
        """Close pooled connections; the next chunk opens new ones."""
        if self._loop is not None:
            self._loop.run(self._async_store.close())
        self._database.close()

    def close(self) -> None:
        """Close pooled connections, and the event loop."""
        self.pause()
        if self._loop is not None:
            self._loop.close()


def _claiming(handler: Handler, model: type[BaseModel] = AnyMessage, policy: Policy | None = None) -> Handler:
    """Return a handler that does nothing and takes late messages, for rows that are only claimed."""
    if not isinstance(handler.policy, Idempotent):
        return handler
    policy = policy or replace(handler.policy, late="handle")
    return Handler(handler.consumer, model, lambda _: None, policy, type=handler.type)


class _DryStore(SqlStore):
    """A store that claims, and always rolls back."""

    @classmethod
    def like(cls, store: SqlStore) -> Self:
        """Return a dry store for the database and worker name of another store."""
        return cls(store.database, store.worker)

    def finish(self, tx: Unit, handled: Sequence[Handled], *, lazy: bool = False) -> None:
        """Store and commit nothing."""

    def read_back(self, claims: Sequence[Claim]) -> list[bool]:
        """Wait for nothing."""
        return [True] * len(claims)


def _pieces(handlings: Sequence[Handling]) -> Iterator[Sequence[Handling]]:
    """Split accepted rows into transactions: each has rows of one type, in the order of keys, with all rows of a key."""
    by_type: dict[str, list[Handling]] = {}
    for handling in handlings:
        assert handling.handler is not None
        assert handling.claim is not None
        if handling.claim.former is not None:  # claims two keys, which would break the order of keys
            yield [handling]
        else:
            by_type.setdefault(handling.handler.type, []).append(handling)
    for some in by_type.values():
        some.sort(key=_key)
        handler = some[0].handler
        assert handler is not None
        most = handler.batch if handler.takes_list else PIECE
        start = 0
        for end in range(1, len(some) + 1):
            if end == len(some) or (end - start >= most and (handler.takes_list or _key(some[end]) != _key(some[end - 1]))):
                yield some[start:end]
                start = end


def _key(handling: Handling) -> int:
    assert handling.claim is not None
    return handling.claim.key.int


def _count(handlings: Mapping[int, Handling], run: str, report: Report) -> None:
    """Add the answer to each row to the report. A second row of an id is judged against the first."""
    seen = set()
    for place, handling in sorted(handlings.items(), key=lambda item: (item[1].claim is not None and _key(item[1]), item[0])):
        if handling.error is not None:
            answer = Answer.CONFLICT if isinstance(handling.error, Conflict) else Answer.PARKED
            assert handling.decision is not None
            report.park(place, answer, handling.decision.rule.name, describe_error(handling.error))
            continue
        assert handling.claim is not None
        again = handling.claim.place in seen
        seen.add(handling.claim.place)
        if handling.verdict is Verdict.CLAIMED:
            report.counts[Answer.NEW] += 1
            report.outputs += len(handling.outputs)
        else:
            report.counts[Answer.REPLAY if handling.claimer == run and not again else Answer.DUPLICATE] += 1
