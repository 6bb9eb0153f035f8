"""Streams of events in the tables of idemp.

    BEGIN; claim; open: snapshot, events since ─ handler ─ commit row (stream, number); outputs; COMMIT

The events of a stream are outputs that its handlings have published. A handling adds one row that gives it a number in the stream.
So two keys decide: a conflict on (consumer, message) of the inbox is a duplicate, one on (stream, number) a lost race, after which the
handler runs again on the new state of the stream. After the event store of CQRS, see G. Young, CQRS Documents (2010).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final, Generic, TypeVar

from sqlalchemy import Connection, and_, exc, select

from idemp.app import App
from idemp.context import AsyncContext, BaseContext
from idemp.errors import ConfigurationError, HandlerError, IdempError
from idemp.identity import digest, name_number
from idemp.initiation import INITIATION
from idemp.messages import check_text
from idemp.policy import LONGEST
from idemp.ports import Handled, Kind
from idemp.process import Adapters
from idemp.sql.engine import Database
from idemp.sql.guard import Unit

__all__ = ["FOREVER", "Event", "LostRace", "Stream", "StreamStore", "Streams"]

FOREVER: Final = f"{LONGEST / 86_400:.0f}d"
"""Retention of types whose outputs are events, which are never purged."""
EVERY: Final = 100  # events between snapshots
S = TypeVar("S")


class LostRace(IdempError):
    """Another handling has appended to the stream since it was opened: nothing is committed, and the handler runs again.

    Example:
        >>> LostRace.__mro__[1].__name__
        'IdempError'
    """


@dataclass(frozen=True)
class Event:
    """A message that was published by a handling of the stream.

    Attributes:
        number: Number of the handling in the stream, from 1. All events of a handling have the same number.
        data: Decoded JSON of the event; None if it was erased.
        id: Id of the message.

    Example:
        >>> Event(1, "bank.Moved", {"cents": 5}, "x").data["cents"]
        5
    """

    number: int
    type: str
    data: Any
    id: str


@dataclass
class Stream(Generic[S]):
    """State of a stream when it was opened.

    Attributes:
        number: Number of the last handling; 0 if there was none.
        state: Result of the fold over its events.

    Example:
        >>> Stream("account-7", 0, 0).number
        0
    """

    name: str
    number: int
    state: S
    _snapshot: tuple[str, str] | None = field(default=None, repr=False)


class Streams:
    """The streams of an app. Messages that a handler publishes are appended to the stream that it has opened.

    Args:
        app: The app. Its types are opted in with `retention=FOREVER`, without batches. Handlers are plain functions.

    Example:
        >>> from pydantic import BaseModel
        >>> from idemp import Context, Idempotent
        >>> class Withdraw(BaseModel):
        ...     __message_type__ = "bank.Withdraw"
        ...     command_id: str
        ...     account: str
        ...     cents: int
        >>> class Moved(BaseModel):
        ...     __message_type__ = "bank.Moved"
        ...     cents: int
        >>> def balance(cents: int, event: Event) -> int:
        ...     return cents + event.data["cents"]
        >>> app = App("bank", policy=Idempotent(key="command_id", retention=FOREVER))
        >>> streams = Streams(app)
        >>> @app.handler(Withdraw)
        ... def withdraw(command: Withdraw, ctx: Context) -> Moved | None:
        ...     account = streams.open(ctx, f"account-{command.account}", balance, 0)
        ...     return Moved(cents=-command.cents) if account.state >= command.cents else None
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._opened: dict[int, Stream[Any]] = {}  # by unit of work
        app.on_open.append(self._adapt)

    def open(
        self, ctx: BaseContext, name: str, fold: Callable[[S, Event], S], initial: S, *, version: str | None = None
    ) -> Stream[S]:
        """Return the stream to which a handling appends.

        Args:
            ctx: Context of the handler.
            name: Name of the stream, of 1 to 255 bytes.
            fold: Function that returns the next state.
            initial: State without events; states are JSON values.
            version: Version of the fold. With a version, states are stored as snapshots, which only the same version uses.

        Raises:
            HandlerError: The handler has opened another stream, is `async def`, or its type is not opted in.
        """
        unit = ctx._tx  # noqa: SLF001
        if isinstance(ctx, AsyncContext) or not isinstance(unit, Unit) or not unit.claims or unit.claims[0].type == INITIATION:
            raise HandlerError("a stream is opened by plain handlers of types that are opted in")
        check_text(name, "the name of a stream", HandlerError)
        if id(unit) in self._opened:
            raise HandlerError(f"this handling is about the stream {self._opened[id(unit)].name!r}: read() others")
        stream = self._opened[id(unit)] = self._load(unit.connection, name, fold, initial, version)
        return stream

    def read(self, name: str, fold: Callable[[S, Event], S], initial: S, *, version: str | None = None) -> Stream[S]:
        """Return the committed state of a stream.

        Args:
            name: Name of the stream.
            fold: Function that returns the next state.
            initial: State without events.
            version: The same as in `open`.
        """
        with self._app.adapters().database.engine.connect() as connection:
            return self._load(connection, name, fold, initial, version)

    def events(self, name: str, after: int = 0) -> list[Event]:
        """Return committed events in order.

        Args:
            name: Name of the stream.
            after: Number after which events are returned.
        """
        database = self._app.adapters().database
        with database.engine.connect() as connection:
            return list(_events(database, connection, name, after))

    def take(self, unit: Any) -> None:
        """Forget the stream of a unit of work that ends."""
        self._opened.pop(id(unit), None)

    def append(self, unit: Any, store: Any, handled: Sequence[Handled]) -> None:
        """Insert the row that gives a handling's events their number in the stream.

        Raises:
            LostRace: The number is taken.
        """
        stream = self._opened.get(id(unit))
        if stream is None:
            return
        (handling,) = handled
        assert handling.claim is not None
        database: Database = store.database
        tables, connection = database.tables, unit.connection
        if stream._snapshot is not None:  # noqa: SLF001
            fold, state = stream._snapshot  # noqa: SLF001
            values = {"number": stream.number, "state": state.encode()}
            row = {"stream": stream.name, "fold": fold, **values}
            connection.execute(database.dialect.upsert(tables.snapshot, ["stream", "fold"], dict.fromkeys(values)).values(row))
        if any(output.kind == "publish" for output in handling.outputs):
            row = {"stream": stream.name, "number": stream.number + 1, "consumer_id": name_number("consumer", handling.consumer)}
            try:
                connection.execute(tables.commit.insert(), {**row, "message_key": database.dialect.key(handling.claim.key)})
            except exc.IntegrityError as error:
                raise LostRace(f"another handling has appended number {stream.number + 1} to {stream.name!r}") from error

    def _load(
        self, connection: Connection, name: str, fold: Callable[[S, Event], S], initial: S, version: str | None
    ) -> Stream[S]:
        database = self._app.adapters().database
        snapshot, number, kept, mark = database.tables.snapshot, 0, "", ""
        state = _as_json(initial, fold)
        if version is not None:
            # A snapshot is valid for one version and one initial state: the mark before its state identifies them.
            kept, mark = _name_of(fold), digest(version, state).hex()
            at = (snapshot.c.stream == name, snapshot.c.fold == kept)
            row = connection.execute(select(snapshot.c.number, snapshot.c.state).where(*at)).first()
            if row is not None and row.state.startswith(mark.encode()):  # a snapshot of another version is overwritten later
                number, state = row.number, row.state.decode().removeprefix(mark)
        value, begin, count = json.loads(state), number, 0
        for event in _events(database, connection, name, begin):
            value, number, count = fold(value, event), event.number, count + 1
        state = _as_json(value, fold)
        return Stream(name, number, json.loads(state), (kept, mark + state) if kept and count >= EVERY else None)

    def _adapt(self, adapters: Adapters) -> Adapters:
        for handler in self._app.handlers.values():
            if handler.identity is not None and (handler.identity.retention < LONGEST or handler.batch > 1):
                raise ConfigurationError(
                    f"{handler.type}: its outputs are events, which are not purged, and each handling is a commit: "
                    "say Idempotent(retention=FOREVER), without batch"
                )
        return replace(adapters, store=StreamStore(adapters.store, self))


class StreamStore:
    """A store whose handlings may be commits of streams.

    Args:
        store: The store of claims and outputs.
        streams: The streams of the app.

    Example:
        >>> StreamStore.__name__
        'StreamStore'
    """

    def __init__(self, store: Any, streams: Streams) -> None:
        self._store, self._streams = store, streams
        self.lazy = False  # a commit of a stream may be read, and projected elsewhere, right after COMMIT

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    @contextmanager
    def connect(self) -> Iterator[Any]:
        """Begin a unit of work."""
        with self._store.connect() as unit:
            try:
                yield unit
            finally:
                self._streams.take(unit)

    def finish(self, tx: Any, handled: Sequence[Handled], *, lazy: bool = False) -> None:  # noqa: ARG002
        """Append to the stream, store outputs, commit."""
        self._streams.append(tx, self._store, handled)
        self._store.finish(tx, handled)

    def classify(self, error: BaseException) -> Kind | None:
        """Return what an error means; a lost race is a reason to run again."""
        meaning: Kind | None = Kind.TRANSIENT if isinstance(error, LostRace) else self._store.classify(error)
        return meaning


def _events(database: Database, connection: Connection, name: str, after: int) -> Iterator[Event]:
    commit, output = database.tables.commit, database.tables.output
    same = and_(output.c.consumer_id == commit.c.consumer_id, output.c.message_key == commit.c.message_key)
    rows = select(commit.c.number, output.c.output_id, output.c.headers, output.c.body).join(output, same)
    rows = rows.where(commit.c.stream == name, commit.c.number > after, output.c.kind == "publish")
    for row in connection.execute(rows.order_by(commit.c.number, output.c.ordinal)):
        data = json.loads(row.body) if row.body else None
        yield Event(row.number, json.loads(row.headers)["type"], data, str(row.output_id))


def _as_json(state: Any, fold: Any) -> str:
    try:
        return json.dumps(state)
    except TypeError as error:
        raise HandlerError(f"the state of {getattr(fold, '__qualname__', fold)} is not a JSON value: {error}") from error


def _name_of(fold: Any) -> str:
    """Return the name under which the snapshots of a fold are stored."""
    name = f"{getattr(fold, '__module__', '')}.{getattr(fold, '__qualname__', '<')}"
    if "<" in name or hasattr(fold, "__self__"):
        raise HandlerError(f"{fold!r} has a version but no unique name: make it a function at the top level of a module")
    return check_text(name, "the name of a fold", HandlerError)
