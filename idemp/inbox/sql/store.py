"""The SQL store: claims and outputs in the user's own database, through SQLAlchemy Core and prebuilt statements."""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections import Counter, deque
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import bindparam, delete, exc, exists, insert, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session, sessionmaker

from idemp.clock import Clock, SystemClock
from idemp.errors import ConfigurationError, StoreError
from idemp.inbox.sql import failures, guard
from idemp.inbox.sql.dialects import dialect_for
from idemp.inbox.sql.names import Names
from idemp.inbox.sql.schema import check
from idemp.inbox.sql.tables import Tables
from idemp.inbox.sql.unfinished import Unfinished
from idemp.inbox.sql.unit import SqlUnit
from idemp.inbox.sql.upkeep import SqlUpkeep

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from datetime import timedelta
    from uuid import UUID

    from sqlalchemy import Connection, Engine, Insert, Table

    from idemp.inbox.port import Claim, Mark

log = logging.getLogger("idemp.inbox")

_NEVER_LATE: Final = datetime.min.replace(tzinfo=UTC)
_MARKS_PER_STATEMENT: Final = 500


class SqlStore:
    """Claims and outputs in one SQL database. Safe to share between threads.

    Args:
        engine: any synchronous SQLAlchemy engine on PostgreSQL (psycopg), MariaDB, MySQL or SQLite.
        tables: where idemp's tables live.
        session_factory: makes the sessions that handlers see; default a plain `sessionmaker`.
        clock: source of time.
        worker: this process's name in the inbox; default host, process id and a random part.
        without_returning: take MySQL's path on MariaDB, too.

    Raises:
        ConfigurationError: an unknown database, or a session factory of another engine.

    Example:
        >>> from sqlalchemy import create_engine
        >>> SqlStore(create_engine("sqlite://")).relay_alive.__name__
        'relay_alive'
    """

    def __init__(
        self,
        engine: Engine,
        *,
        tables: Tables | None = None,
        session_factory: sessionmaker[Any] | None = None,
        clock: Clock | None = None,
        worker: str | None = None,
        without_returning: bool = False,
    ) -> None:
        self.engine = engine
        self.tables = tables or Tables()
        self.clock = clock or SystemClock()
        self.worker = worker or f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(3)}"
        self.session_factory = _checked_factory(engine, session_factory)
        self.dialect = dialect_for(engine.dialect, self.tables, without_returning=without_returning)
        self.names = Names(engine, self.tables, self.clock)
        self.upkeep = SqlUpkeep(engine, self.tables, self.clock, self.worker, self.names)
        self._unfinished = Unfinished(engine, self.tables, self.clock, self.worker, self.names)
        self._owed: deque[Sequence[Mapping[str, Any]]] = deque()  # claims to be withdrawn
        self._horizons: dict[tuple[str, timedelta], datetime] = {}
        inbox, pending, history = self.tables.inbox, self.tables.pending, self.tables.history
        self._unpend = delete(pending).where(pending.c.output_id.in_(bindparam("ids", expanding=True)))
        self._explain = update(pending).where(pending.c.output_id == bindparam("id")).values(reason=bindparam("why"))
        self._withdraw = delete(inbox).where(
            *(inbox.c[name] == bindparam(name) for name in ("consumer_id", "message_key", "worker_id", "claimed_at"))
        )
        self._withdraw_outputs = [
            delete(table).where(
                table.c.consumer_id == bindparam("consumer_id"),
                table.c.message_key == bindparam("message_key"),
                ~exists().where(inbox.c.consumer_id == table.c.consumer_id, inbox.c.message_key == table.c.message_key),
            )
            for table in (pending, self.tables.output)
        ]
        # Two threads of one worker may mark one handling in the same microsecond: then one line of history is enough.
        self._append = _insert_if_absent(history, engine.dialect.name)
        guard.install(engine)

    def begin(self, claims: Sequence[Claim] = (), *, late: bool = False) -> SqlUnit:
        """A new unit of work in a transaction of its own; names that are new are interned before it.

        Raises:
            StoreUnavailable: the database can't be reached.
            TransientStoreError: it asks to try again (SQLite busy).
        """
        for claim in claims:
            self.prepare(claim.consumer, [claim.message_type])
        if self._owed:
            self._pay()
        return SqlUnit(self, late=late)

    def prepare(self, consumer: str, message_types: Iterable[str] = ()) -> None:
        """Intern names, so that no delivery has to."""
        self.names.id("worker", self.worker)
        self.names.id("consumer", consumer)
        for message_type in message_types:
            self.names.id("message_type", message_type)

    def translate(self, error: BaseException) -> StoreError | None:
        """What an exception means for the whole delivery, `None` when it is the handler's own affair."""
        return failures.translate(error)

    def record(self, marks: Sequence[Mark]) -> None:
        """Confirmed outputs stop pending, refused ones keep the reason, and history gets a line for each handling."""
        if not marks:
            return
        confirmed = sorted({output_id for mark in marks for output_id in mark.confirmed})
        refused = {output_id: reason for mark in marks for output_id, reason in mark.refused}
        moment = self.clock.now()
        counts: dict[tuple[str, Any], Counter[str]] = {}
        for mark in marks:
            counter = counts.setdefault((mark.claim.consumer, mark.claim.id.key), Counter())
            counter.update(confirmed=len(mark.confirmed), redelivered=int(mark.redelivered))
        rows = [
            {
                "consumer_id": self.names.id("consumer", consumer),
                "message_key": key,
                "worker_id": self.names.id("worker", self.worker),
                "at": moment,
                "confirmed": counter["confirmed"],
                "redelivered": counter["redelivered"],
            }
            for (consumer, key), counter in counts.items()
            if counter.total()
        ]
        try:
            if not refused and self._recorded_at_once(confirmed, rows):
                return
            with self.engine.begin() as connection:
                for start in range(0, len(confirmed), _MARKS_PER_STATEMENT):
                    connection.execute(self._unpend, {"ids": confirmed[start : start + _MARKS_PER_STATEMENT]})
                if rows:
                    connection.execute(self._append, rows)
                if refused:
                    connection.execute(self._explain, [{"id": id_, "why": refused[id_]} for id_ in sorted(refused)])
        except exc.SQLAlchemyError as error:
            raise failures.translate(error) or StoreError(f"Marks could not be recorded: {error}") from error

    def _recorded_at_once(self, confirmed: Sequence[UUID], rows: Sequence[Mapping[str, Any]]) -> bool:
        with self.engine.connect() as connection:
            return self.dialect.record(connection, confirmed, rows)

    def note_start(self, consumer: str, key: UUID) -> int:
        """Record, committed at once, that a handler is about to start; how many earlier starts did not end.

        Raises:
            StoreError: as the port says.
        """
        return self._unfinished.start(consumer, key)

    def note_end(self, consumer: str, key: UUID, left: int = 0) -> None:
        """The handler ended, well or badly: all but `left` recorded starts of this message are forgotten, at once.

        Raises:
            StoreError: as the port says.
        """
        self._unfinished.end(consumer, key, left)

    def relay_alive(self) -> bool:
        """Whether some relay on this database showed life recently."""
        return self.upkeep.relay_alive()

    def late_before(self, consumer: str, retention: timedelta) -> datetime:
        """The start of the retention window, as last refreshed; before that, nothing counts as late."""
        return self._horizons.get((consumer, retention), _NEVER_LATE)

    def refresh_horizons(self, consumer: str, retentions: Iterable[timedelta]) -> None:
        """Read how far back the windows of a consumer reach now; called once in a while, off the hot path."""
        for retention in set(retentions):
            self._horizons[consumer, retention] = self.upkeep.late_before(consumer, retention)

    def verify(self) -> None:
        """See that tables, keys and isolation are as the promises need them; see `idemp.inbox.sql.schema.check`."""
        check(self.engine, self.tables)

    def announce_pending(self) -> None:
        """Wake the relays; if that fails they look by themselves a moment later."""
        try:
            self.upkeep.announce_pending()
        except StoreError as error:
            log.debug("relays not woken: %s", error)

    def close(self) -> None:
        """End what the store itself keeps open; the engine is its owner's."""
        self.upkeep.close()

    # For units of work ----------------------------------------------------------------------------------------------

    def inbox_row(self, claim: Claim, now: datetime) -> dict[str, Any]:
        """The claim as a row."""
        text = claim.id.text
        return {
            **self.key_row(claim),
            "type_id": self.names.id("message_type", claim.message_type),
            "worker_id": self.names.id("worker", self.worker),
            "claimed_at": now,
            "fingerprint": claim.fingerprint,
            "original_id": None if text == str(claim.id.key) else text,
        }

    def key_row(self, claim: Claim) -> dict[str, Any]:
        """The claim's key as bound values."""
        return {"consumer_id": self.names.id("consumer", claim.consumer), "message_key": claim.id.key}

    def withdraw(self, rows: Sequence[Mapping[str, Any]]) -> bool:
        """Take back claims that a handler committed on its own, without their outputs: such messages are not skipped.

        If the database can't do its part now it is owed, and done before the next unit of work begins.

        Returns:
            Whether there was such a claim, or may be; somebody else's, made meanwhile, is left alone.
        """
        try:
            return self._withdraw_now(rows)
        except StoreError as error:
            self._owed.append(rows)
            log.warning(
                "claims not withdrawn yet: %s", error, extra={"event": "claims_not_withdrawn", "claims": len(rows)}
            )
            return True

    def _pay(self) -> None:
        """Withdraw what is owed."""
        while self._owed:
            with suppress(IndexError):  # another thread was faster
                rows = self._owed.popleft()
                try:
                    self._withdraw_now(rows)
                except StoreError:
                    self._owed.appendleft(rows)
                    raise

    def _withdraw_now(self, rows: Sequence[Mapping[str, Any]]) -> bool:
        try:
            with self.engine.begin() as connection:
                withdrawn = [row["message_key"] for row in rows if self._withdrawn(connection, row)]
        except exc.SQLAlchemyError as error:
            raise failures.translate(error) or StoreError(f"A claim could not be withdrawn: {error}") from error
        for key in withdrawn:
            log.error(
                "a handler committed behind idemp's back; its claim is withdrawn",
                extra={"event": "claim_withdrawn", "message_key": str(key)},
            )
        return bool(withdrawn)

    def _withdrawn(self, connection: Connection, row: Mapping[str, Any]) -> bool:
        key = {name: row[name] for name in ("consumer_id", "message_key")}
        ours = {**key, "worker_id": row["worker_id"], "claimed_at": row["claimed_at"]}
        if connection.execute(self._withdraw, ours).rowcount == 0:
            return False
        for statement in self._withdraw_outputs:  # stored by themselves, where autocommit was switched on
            connection.execute(statement, key)
        return True


def _insert_if_absent(table: Table, dialect: str) -> Insert:
    if dialect == "postgresql":
        return postgresql.insert(table).on_conflict_do_nothing()
    if dialect == "sqlite":
        return sqlite.insert(table).on_conflict_do_nothing()
    return insert(table).prefix_with("IGNORE")


def _checked_factory(engine: Engine, factory: sessionmaker[Any] | None) -> sessionmaker[Any]:
    if factory is None:
        return sessionmaker(class_=Session)
    bind = factory.kw.get("bind")
    if bind not in (None, engine) or any(other is not engine for other in (factory.kw.get("binds") or {}).values()):
        raise ConfigurationError(
            "The session factory is bound to another engine than the inbox's: claim and effects would not commit together.",
            fix="Give the sessionmaker of the same engine, without binds=.",
        )
    return factory
