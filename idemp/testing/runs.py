"""Runs of one handler, each in a transaction that is rolled back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from sqlalchemy import Connection, text
from sqlalchemy.orm import Session

from idemp.context import CONTROL
from idemp.envelopes import read_delivery
from idemp.errors import TransactionEnded
from idemp.handlers import Handler
from idemp.messages import FORWARD, RESULT, Delivery, Output, parse
from idemp.ports import Verdict
from idemp.sql.engine import Database, worker_name
from idemp.sql.store import SqlStore
from idemp.testing.conditions import Conditions, conditions
from idemp.testing.observing import Seen, Watch, watching
from idemp.testing.remembering import Memory, memory

__all__ = ["Run", "Runner"]

T = TypeVar("T")
SEQUENCES = "SELECT format('%I.%I', schemaname, sequencename), start_value, last_value FROM pg_sequences"
SET_BACK = "SELECT setval(CAST(:name AS regclass), :value, :called)"


@dataclass
class Run:
    """Result of one run.

    Attributes:
        outputs: Kind, place, type, delay, document and headers of each.
        error: What it raised.
        ended: How it ended the transaction, or would have.
        before: What the function remembered before the run.
        after: What it remembers afterwards.
        state: What `state` returned.

    Example:
        >>> Run([], None, None, Seen(), Memory(), Memory(), None).outputs
        []
    """

    outputs: list[list[Any]]
    error: Exception | None
    ended: Exception | None
    seen: Seen
    before: Memory
    after: Memory
    state: Any


class Runner:
    """Runs a handler.

    Args:
        handler: Opted in or not.
        url: URL of the database.
        prefix: Begins the names of idemp's tables.
        state: Returns what is to be compared.
        loop: Event loop of an `async def` handler.

    Example:
        >>> Runner.__name__
        'Runner'
    """

    def __init__(
        self,
        handler: Handler,
        url: str,
        prefix: str,
        *,
        state: Callable[[Session], Any] | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        if url.startswith("sqlite") and "?" not in url:
            url += "?timeout=0.2"  # of a connection that waits for the run's own transaction
        self.handler, self._state, self.runs = handler, state, 0
        self._database = Database(url, prefix)
        store: Any = SqlStore(self._database, worker_name())
        store.register(handler.consumer, handler.types, [handler.identity] if handler.identity else [])
        if handler.is_async:
            from idemp.sql.aio import AsyncSqlStore
            from idemp.sql.engine import open_engine
            from idemp.testing.app import event_loop

            self._loop = loop or event_loop()
            store = AsyncSqlStore.beside(store, open_engine(url, 1))
        self._store = store
        self._sequences = self._counted()

    def run(self, delivery: Delivery, given: Conditions, *, fail_at: int = 0) -> Run:
        """Run the handler, and roll back.

        Args:
            delivery: Its message.
            given: Clock, chance and attempt.
            fail_at: Number of the statement, from 1, that fails.
        """
        return self.run_all([delivery], given, fail_at=fail_at)[0]

    def run_all(
        self,
        deliveries: Sequence[Delivery],
        given: Conditions,
        *,
        fail_at: int = 0,
        then: Callable[[Connection], None] = lambda _: None,
    ) -> list[Run]:
        """Run the handler for several messages in one transaction, then something else; roll back."""

        def all_of_them() -> list[Run]:
            with self._store.connect() as tx:
                runs = [self._one(tx, delivery, given, fail_at) for delivery in deliveries]
                then(tx.connection)
            return runs

        try:
            return self._do(all_of_them)
        finally:
            self._set_back()

    def close(self) -> None:
        """Close the connections."""
        if self.handler.is_async:
            asyncio.run_coroutine_threadsafe(self._store.close(), self._loop).result()
        self._database.close()

    def _do(self, function: Callable[[], T]) -> T:
        if not self.handler.is_async:
            return function()
        found: T = asyncio.run_coroutine_threadsafe(self._store.run(function), self._loop).result()
        return found

    def _one(self, tx: Any, delivery: Delivery, given: Conditions, fail_at: int) -> Run:
        handler, self.runs = self.handler, self.runs + 1
        event = read_delivery(delivery)
        message, claim = handler.accept(event)
        for answer in self._store.claim(tx, [claim] if claim is not None else []):
            assert answer.verdict is Verdict.CLAIMED, answer
        context = handler.context(handler.consumer, event.properties, tx, claim, given.attempt)
        tx.session.expire_all()  # the second of two finds what the first one wrote, not what it holds
        outputs: list[Output] = []
        error: Exception | None = None
        state, before = None, memory(handler.function)
        watch = Watch(tx, fail_at)
        with watching(watch) as seen, conditions(given):
            try:
                if handler.is_async:
                    outputs = self._store.wait(tx, handler.call_async([message], [context]))[0]
                else:
                    outputs = handler.call([message], [context])[0]
                tx.session.flush()
            except Exception as raised:  # noqa: BLE001 - a handler may raise anything
                error = raised
                watch.fail()
        after, ended = memory(handler.function), tx.error
        if ended is None and (error is None or tx.intact()) and not tx.holds():
            ended = TransactionEnded("a commit or a rollback below SQLAlchemy, or a failed statement whose error it caught")
        if self._state is not None and error is None and ended is None:
            state = self._state(tx.session)
        return Run(list(map(_plain, outputs)), error, ended, seen, before, after, state)

    def _counted(self) -> list[tuple[str, int, int | None]]:
        """Return the positions of the database's sequences: no rollback sets them back."""
        if self._database.engine.dialect.name != "postgresql":
            return []
        with self._database.engine.connect() as connection:
            return [(row[0], row[1], row[2]) for row in connection.execute(text(SEQUENCES))]

    def _set_back(self) -> None:
        if self._sequences:
            with self._database.engine.begin() as connection:
                for name, start, last in self._sequences:
                    called = last is not None
                    connection.execute(text(SET_BACK), {"name": name, "value": last if called else start, "called": called})


def _plain(output: Output) -> list[Any]:
    """Return what has to be the same in each run; ids and times of messages are idemp's own."""
    headers = output.properties.get("headers") or {}
    own = {name: value for name, value in headers.items() if not name.startswith(CONTROL)}
    foreign = output.kind in (FORWARD, RESULT)
    body = output.body.decode("utf-8", "backslashreplace") if foreign else parse(output.body)
    return [output.kind, output.routing_key, output.properties.get("type"), output.delay, body, own]
