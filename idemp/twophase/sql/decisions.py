"""Decisions in the inbox's own database: with the claim's own transaction, or in short ones of their own."""

from __future__ import annotations

import json
import secrets
import threading
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Table, bindparam, delete, insert, select

from idemp.forking import renewed_in_child
from idemp.inbox.sql.engine import place_of
from idemp.inbox.sql.inserting import insert_if_absent
from idemp.inbox.sql.locating import made_once
from idemp.inbox.sql.short import Short
from idemp.inbox.sql.translating import Translated
from idemp.inbox.sql.unit import went_on
from idemp.twophase.port import INBOX_BYTES, Decision, Prepared

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from sqlalchemy import Connection, Row

    from idemp.inbox.port import UnitOfWork
    from idemp.inbox.sql import SqlStore

_ONLY: Final = 1
_MOST_UNFINISHED: Final = 1_000  # in one round


class _Statements:
    def __init__(self, table: Table) -> None:
        this = (table.c.consumer_id == bindparam("consumer_id"), table.c.message_key == bindparam("message_key"))
        self.insert = insert(table)
        self.read = select(table).where(*this)
        self.unfinished = select(table).order_by(table.c.decided_at).limit(_MOST_UNFINISHED)
        self.delete = delete(table).where(*this, table.c.token == bindparam("token"))


class SqlDecisions:
    """The port `Decisions` beside a SQL inbox. Safe to share between threads.

    Args:
        store: the inbox.

    Example:
        >>> from idemp.inbox.sql import SqlStore, create_engine_safely
        >>> from idemp.inbox.sql.schema import upgrade
        >>> store = SqlStore(create_engine_safely("sqlite://"))
        >>> upgrade(store.engine, store.tables)
        >>> decisions = SqlDecisions(store)
        >>> len(decisions.inbox()), decisions.unfinished()
        (8, [])
    """

    def __init__(self, store: SqlStore) -> None:
        self._store = store
        self._short = Short(store.engine, single=True)
        self._making = Short(store.engine)
        self._inbox: bytes | None = None
        self._lock = renewed_in_child(threading.Lock())

    @made_once
    def _sql(self) -> _Statements:
        return _Statements(self._store.tables.decision)

    @property
    def place(self) -> str:
        """The inbox's database, without user and password."""
        return place_of(self._store.engine)

    def inbox(self) -> bytes:
        """Which inbox this is; made at the first call of all.

        Raises:
            StoreError: the database can't be reached, or refuses.
        """
        with self._lock:
            if self._inbox is None:
                self._inbox = bytes.fromhex(self._making.run(self._named))
            return self._inbox

    def _named(self, connection: Connection) -> str:
        table = self._store.tables.coordinator
        wanted = select(table.c.inbox).where(table.c.number == _ONLY)
        found: str | None = connection.scalar(wanted)
        if found is None:
            values = {"number": _ONLY, "inbox": secrets.token_hex(INBOX_BYTES), "since": self._store.clock.now()}
            insert_if_absent(connection, table, values)
            found = str(connection.scalar(wanted))
        return found

    def number(self, consumer: str) -> int:
        """A consumer's number, as in the inbox."""
        return self._store.names.id("consumer", consumer)

    def consumer(self, number: int) -> str:
        """The consumer of a number.

        Raises:
            KeyError: there is none.
        """
        return self._store.names.name("consumer", number)

    def note(self, unit: UnitOfWork, consumer: int, key: UUID, token: bytes, branches: Sequence[Prepared]) -> Decision:
        """One INSERT in the claim's own transaction."""
        decision = Decision(consumer, key, token, tuple(branches), self._store.clock.now())
        row = {
            "consumer_id": consumer,
            "message_key": key,
            "token": token.hex(),
            "branches": json.dumps([asdict(each) for each in branches]),
            "decided_at": decision.decided_at,
        }
        if self._store.dialect.is_aborted(unit.connection):
            raise went_on()
        with Translated(self._store.places):
            unit.connection.execute(self._sql.insert, row)
        return decision

    def noted(self, consumer: int, key: UUID, unit: UnitOfWork | None = None) -> Decision | None:
        """The decision about a key.

        Raises:
            StoreError: the database can't be reached, or refuses.
        """

        def read(connection: Connection) -> Decision | None:
            found = connection.execute(self._sql.read, {"consumer_id": consumer, "message_key": key}).first()
            return None if found is None else _decision(found)

        if unit is None:
            return self._short.run(read)
        with Translated(self._store.places):
            return read(unit.connection)

    def unfinished(self) -> Sequence[Decision]:
        """All that are kept, the oldest first, and at most a thousand.

        Raises:
            StoreError: the database can't be reached, or refuses.
        """
        return self._short.run(lambda connection: [_decision(row) for row in connection.execute(self._sql.unfinished)])

    def finished(self, decision: Decision) -> None:
        """One DELETE.

        Raises:
            StoreError: the database can't be reached, or refuses.
        """
        row = {"consumer_id": decision.consumer, "message_key": decision.key, "token": decision.token.hex()}
        self._short.run(lambda connection: connection.execute(self._sql.delete, row))


def _decision(row: Row[Any]) -> Decision:
    branches = tuple(Prepared(**each) for each in json.loads(row.branches))
    return Decision(row.consumer_id, row.message_key, bytes.fromhex(row.token), branches, row.decided_at)
