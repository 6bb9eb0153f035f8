"""Prepared messages in a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Table, bindparam, delete, select, update

from idemp.errors import ConfigurationError, TransientStoreError
from idemp.inbox.sql.engine import place_of
from idemp.inbox.sql.inserting import insert_if_absent
from idemp.inbox.sql.locating import located, made_once
from idemp.inbox.sql.pooling import watch_pool
from idemp.inbox.sql.readable import refuse_date_styles
from idemp.inbox.sql.schema import check
from idemp.inbox.sql.short import Locking, Short
from idemp.inbox.sql.tables import Tables, shared_tables
from idemp.inbox.sql.times import DatabaseTime
from idemp.messages import Output
from idemp.prepared.port import Decision, Prepared, Record, State, Taken
from idemp.prepared.refusing import conflict, opposite, unknown

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from datetime import timedelta
    from uuid import UUID

    from sqlalchemy import Connection, Engine, Row

_STORED: Final = ("kind", "exchange", "routing_key", "envelope", "body")
_UNDECIDED: Final = (State.PREPARED, State.PARKED)
_FINAL: Final = tuple(state for state in State if state.is_final)
_MAX_BATCH: Final = 1000


class _Statements:
    def __init__(self, prepared: Table) -> None:
        self.table = prepared
        one, ids = prepared.c.id == bindparam("one"), prepared.c.id.in_(bindparam("ids", expanding=True))
        ours = prepared.c.producer == bindparam("producer")
        in_state, is_due = prepared.c.state == bindparam("was"), prepared.c.due_at <= DatabaseTime("by")
        first_due = select(prepared).where(ours, in_state, is_due).order_by(prepared.c.due_at).limit(bindparam("limit"))
        self.due = Locking(first_due)
        self.expired = first_due.with_only_columns(prepared.c.id)
        self.lease = update(prepared).where(ids).values(due_at=DatabaseTime("later"))
        self.find = select(prepared).where(one)
        self.undecided = update(prepared).where(one, prepared.c.state.in_([state.value for state in _UNDECIDED]))
        self.in_state = update(prepared).where(one, in_state)
        self.forget = delete(prepared).where(ids, prepared.c.state.in_([state.value for state in _FINAL]))


class SqlHome:
    """A home in a SQL database: its rows are compared and set. Safe to share between threads and processes.

    Args:
        engine: any synchronous SQLAlchemy engine on PostgreSQL (psycopg), MariaDB, MySQL or SQLite.
        tables: where idemp's tables live (`idemp db upgrade` makes them).

    Example:
        >>> from datetime import timedelta
        >>> from idemp.inbox.sql.engine import create_engine_safely
        >>> from idemp.inbox.sql.schema import upgrade
        >>> engine = create_engine_safely("sqlite://")
        >>> upgrade(engine, Tables())
        >>> SqlHome(engine).take(10, lease=timedelta(seconds=30))
        []
    """

    decides = True

    def __init__(self, engine: Engine, *, tables: Tables | None = None) -> None:
        self.engine = engine
        self._configured_tables = tables or shared_tables()
        self._producer = ""
        watch_pool(engine)
        refuse_date_styles(engine)
        self._short = Short(engine)

    @made_once
    def tables(self) -> Tables:
        """The tables, with the schema that they are in."""
        return located(self.engine, self._configured_tables)

    @made_once
    def _sql(self) -> _Statements:
        return _Statements(self.tables.prepared)

    def belongs_to(self, producer: str) -> None:
        """Keep messages of this app, and take no others: another app's checker knows nothing of them.

        `PreparedMessages` says so. Apps may share the table, with a `SqlHome` each.

        Raises:
            ConfigurationError: it belongs to another app.
        """
        if self._producer not in {"", producer}:
            raise ConfigurationError(
                f"This home keeps the prepared messages of app {self._producer!r}, not of {producer!r}.",
                fix="Give each app a SqlHome of its own; they may share engine and table.",
            )
        self._producer = producer

    @property
    def place(self) -> str:
        """The database."""
        return place_of(self.engine)

    def verify(self) -> None:
        """See that tables, keys and isolation are as the promises need them; see `idemp.inbox.sql.schema.check`."""
        check(self.engine, self.tables)

    def prepare(self, prepared: Prepared, check_after: timedelta) -> None:
        """One INSERT; its conflict is the answer."""
        output = prepared.output
        values = {
            "id": prepared.id,
            "producer": self._producer,
            "state": State.PREPARED.value,
            "prepared_at": DatabaseTime(0.0),
            "due_at": DatabaseTime(check_after.total_seconds()),
            "checks": 0,
            "attempts": 0,
            "fingerprint": prepared.fingerprint,
            "kind": output.kind.value,
            "exchange": output.exchange,
            "routing_key": output.routing_key,
            "envelope": output.envelope(),
            "body": output.message.body,
        }

        def work(connection: Connection) -> bytes | None:
            if insert_if_absent(connection, self._sql.table, values):
                return prepared.fingerprint
            found = connection.execute(self._sql.find, {"one": prepared.id}).one_or_none()
            return bytes(found.fingerprint) if found is not None else None

        kept = self._short.run(work)
        if kept is None:
            raise TransientStoreError(f"Message {prepared.id} was there, and was forgotten this very moment.")
        if kept != prepared.fingerprint:
            raise conflict(prepared)

    def decide(self, prepared: Prepared, decision: Decision, lease: timedelta) -> bool:
        """One UPDATE of what is undecided; where it finds nothing, reading tells why."""
        wanted = State.COMMITTED if decision is Decision.COMMIT else State.ROLLED_BACK
        due_in = lease.total_seconds() if wanted is State.COMMITTED else 0.0
        decided = self._sql.undecided.values(state=wanted.value, due_at=DatabaseTime(due_in))

        def work(connection: Connection) -> State | None:
            if connection.execute(decided, {"one": prepared.id}).rowcount == 1:
                return wanted
            found = connection.execute(self._sql.find, {"one": prepared.id}).one_or_none()
            return State(found.state) if found is not None else None

        state = self._short.run(work)
        if state is None:
            raise unknown(prepared.id, decision)
        if (state is State.ROLLED_BACK) is (decision is Decision.COMMIT):
            raise opposite(prepared.id, decision)
        return state is State.COMMITTED

    def published(self, prepared: Prepared) -> None:
        """One UPDATE, from `COMMITTED` only."""
        self._update(prepared.id, State.COMMITTED, state=State.PUBLISHED.value, due_at=DatabaseTime(0.0))

    def take(self, limit: int, lease: timedelta) -> Sequence[Taken]:
        """Those that are due longest first, of either state; what another checker is about to take is passed over."""

        def work(connection: Connection) -> list[Row[Any]]:
            found: list[Row[Any]] = []
            for state in (State.COMMITTED, State.PREPARED):
                room = min(limit, _MAX_BATCH) - len(found)
                wanted = {"producer": self._producer, "was": state.value, "by": 0.0, "limit": room}
                found += connection.execute(self._sql.due.on(connection), wanted)
            if found:
                leased = {"ids": sorted(row.id for row in found), "later": lease.total_seconds()}
                connection.execute(self._sql.lease, leased)
            return found

        return [
            Taken(_output(row), bytes(row.fingerprint), State(row.state), row.checks, row.attempts)
            for row in self._short.run(work)
        ]

    def postpone(self, taken: Taken, reason: str, retry_in: timedelta, *, checked: bool) -> None:
        """One UPDATE, if it still is in the state in which it was taken."""
        column = self._sql.table.c.checks if checked else self._sql.table.c.attempts
        counted = {column.name: column + 1} if checked or taken.state is State.COMMITTED else {}
        self._update(taken.id, taken.state, reason=reason, due_at=DatabaseTime(retry_in.total_seconds()), **counted)

    def park(self, prepared: Prepared, reason: str) -> bool:
        """One UPDATE, from `PREPARED` only."""
        return self._update(prepared.id, State.PREPARED, state=State.PARKED.value, reason=reason)

    def resume(self, id: UUID) -> bool:
        """One UPDATE, from `PARKED` only."""
        return self._update(id, State.PARKED, state=State.PREPARED.value, checks=0, due_at=DatabaseTime(0.0))

    def browse(self, state: State | None, limit: int) -> Sequence[Record]:
        """In the order in which they were prepared."""
        prepared = self._sql.table
        states = [each.value for each in State if (not each.is_final if state is None else each is state)]
        ours = prepared.c.producer == self._producer
        statement = (
            select(prepared).where(ours, prepared.c.state.in_(states)).order_by(prepared.c.prepared_at).limit(limit)
        )
        return [_record(row) for row in self._short.run(lambda connection: connection.execute(statement).all())]

    def find(self, id: UUID) -> Record | None:
        """By its primary key."""
        row = self._short.run(lambda connection: connection.execute(self._sql.find, {"one": id}).one_or_none())
        return _record(row) if row is not None else None

    def expired(self, retention: timedelta, limit: int) -> Sequence[UUID]:
        """Those that are final longest first, of either state."""

        def work(connection: Connection) -> list[UUID]:
            found: list[UUID] = []
            for state in _FINAL:
                before = -retention.total_seconds()
                wanted = {"producer": self._producer, "was": state.value, "by": before, "limit": limit - len(found)}
                found += connection.scalars(self._sql.expired, wanted)
            return found

        return self._short.run(work)

    def forget(self, ids: Collection[UUID]) -> None:
        """One DELETE."""
        if ids:
            self._short.run(lambda connection: connection.execute(self._sql.forget, {"ids": sorted(ids)}))

    def close(self) -> None:
        """Nothing is open; the engine is its owner's."""

    def _update(self, id: UUID, was: State, **values: Any) -> bool:
        statement, wanted = self._sql.in_state.values(values), {"one": id, "was": was.value}
        return self._short.run(lambda connection: connection.execute(statement, wanted).rowcount) == 1


def _output(row: Row[Any]) -> Output:
    return Output.restored(row.id, 0, *(getattr(row, name) for name in _STORED))


def _record(row: Row[Any]) -> Record:
    state = State(row.state)
    waits = state in {State.PREPARED, State.COMMITTED}
    return Record(
        Prepared(_output(row), bytes(row.fingerprint)),
        state,
        row.checks,
        row.attempts,
        row.reason,
        row.prepared_at,
        row.due_at if waits else None,
    )
