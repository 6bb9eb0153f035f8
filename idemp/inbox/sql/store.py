"""The SQL store: claims and outputs in the user's own database, through SQLAlchemy Core and prebuilt statements."""

from __future__ import annotations

import os
import secrets
import socket
from collections import Counter, deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sqlalchemy import Engine, bindparam, delete, exc, insert, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session, sessionmaker

from idemp.clock import Clock, SystemClock
from idemp.errors import ConfigurationError, StoreError
from idemp.forking import ForkAware, check_process
from idemp.inbox.port import DEFAULT_BROKER
from idemp.inbox.sql import failures, guard
from idemp.inbox.sql.brokers import OwnBroker
from idemp.inbox.sql.dialects import check_driver
from idemp.inbox.sql.engine import place_of
from idemp.inbox.sql.horizons import Horizons
from idemp.inbox.sql.locating import located, made_once
from idemp.inbox.sql.names import Names
from idemp.inbox.sql.places import Places
from idemp.inbox.sql.pooling import watch_pool
from idemp.inbox.sql.purged import Purged
from idemp.inbox.sql.readable import refuse_date_styles
from idemp.inbox.sql.schema import check
from idemp.inbox.sql.tables import Tables, shared_tables
from idemp.inbox.sql.times import refresh, shared_clock
from idemp.inbox.sql.translating import DENIED_TOLD
from idemp.inbox.sql.unfinished import Unfinished
from idemp.inbox.sql.unit import SqlUnit
from idemp.inbox.sql.upkeep import SqlUpkeep
from idemp.inbox.sql.withdrawing import withdraw
from idemp.showing import logger

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from datetime import datetime, timedelta
    from uuid import UUID

    from sqlalchemy import Delete, Insert, Table, Update

    from idemp.inbox.port import Claim, Mark
    from idemp.inbox.sql.claiming import ClaimDialect, History
    from idemp.inbox.sql.sets_postgresql import SetUnit

log = logger("idemp.inbox")

_MARKS_PER_STATEMENT: Final = 500


class _Debt(NamedTuple):
    """Claims to be withdrawn, and whether their deliveries know why."""

    rows: Sequence[Mapping[str, Any]]
    told: bool


class SqlStore(ForkAware):
    """Claims and outputs in one SQL database. Safe to share between threads.

    Args:
        engine: any synchronous SQLAlchemy engine on PostgreSQL (psycopg), MariaDB, MySQL or SQLite.
        tables: where idemp's tables live.
        session_factory: makes the sessions that handlers see; default a plain `sessionmaker`.
        clock: source of time.
        worker: this process's name in the inbox; default host, process id and a random part. A forked child takes the
            default, so that no two processes share a name.
        broker: name of the broker that outputs go to; relays of other brokers leave them alone.
        without_returning: take MySQL's path on MariaDB, too.

    Raises:
        ConfigurationError: no synchronous engine, an unknown database, or a session factory that does not fit.

    Example:
        >>> from sqlalchemy import create_engine
        >>> SqlStore(create_engine("sqlite://")).relay_alive.__name__
        'relay_alive'
    """

    per_entity = False

    def __init__(
        self,
        engine: Engine,
        *,
        tables: Tables | None = None,
        session_factory: sessionmaker[Any] | None = None,
        clock: Clock | None = None,
        worker: str | None = None,
        broker: str = DEFAULT_BROKER,
        without_returning: bool = False,
    ) -> None:
        _check_engine(engine)
        self.engine = engine
        self.configured_tables = tables or shared_tables()
        self.clock = shared_clock(engine, clock or SystemClock())
        self.worker = worker or _worker_name()
        self.session_factory = _checked_factory(engine, session_factory)
        self._without_returning = without_returning
        self.broker_name = broker
        self._owed: deque[_Debt] = deque()
        self._ended_by_handlers: set[tuple[int, UUID]] = set()  # as came out only when a debt was paid
        guard.install(engine)
        watch_pool(engine)
        refuse_date_styles(engine)
        self.track()

    def after_fork_in_child(self) -> None:
        """Be another worker, which owes nothing of what the parent owes."""
        self.worker = _worker_name()
        self.upkeep.worker_name = self._unfinished.worker = self.worker
        self._owed.clear()
        self._ended_by_handlers.clear()

    # Made at the first use, which asks the database where the tables are ----------------------------------------------

    @made_once
    def tables(self) -> Tables:
        """The tables, with the schema that they are in."""
        return located(self.engine, self.configured_tables)

    @made_once
    def places(self) -> Places:
        """Which tables an id belongs to."""
        return Places(self.engine, self.tables, self.clock, without_returning=self._without_returning)

    @made_once
    def dialect(self) -> ClaimDialect:
        """What is about whole transactions, and the same in all places."""
        return self.places.plain

    @made_once
    def names(self) -> Names:
        """Interned names."""
        return Names(self.engine, self.tables, self.clock)

    @made_once
    def _broker(self) -> OwnBroker:
        return OwnBroker(self.names, self.broker_name)

    @made_once
    def upkeep(self) -> SqlUpkeep:
        """What relay, cleaner and worker ask."""
        return SqlUpkeep(self.engine, self.tables, self.clock, self.worker, self.names, self.places, self._broker)

    @made_once
    def purged(self) -> Purged:
        """Until when claims may have been deleted."""
        return Purged(self.tables)

    @made_once
    def _unfinished(self) -> Unfinished:
        return Unfinished(self.engine, self.tables, self.clock, self.worker, self.names)

    @made_once
    def _horizons(self) -> Horizons:
        return Horizons(self.upkeep.late_before, self.clock)

    @made_once
    def _unpend(self) -> Delete:
        pending = self.tables.pending
        return delete(pending).where(pending.c.output_id.in_(bindparam("ids", expanding=True)))

    @made_once
    def _explain(self) -> Update:
        pending = self.tables.pending
        return update(pending).where(pending.c.output_id == bindparam("id")).values(reason=bindparam("why"))

    def begin(self, claims: Sequence[Claim] = (), *, late: bool = False) -> SqlUnit:
        """A new unit of work in a transaction of its own; names that are new are interned before it.

        Raises:
            StoreUnavailable: the database can't be reached.
            TransientStoreError: it asks to try again (SQLite busy).
            FutureMessage: the time in an id lies in the future, where its consumer keeps daily tables.
        """
        check_process()
        with DENIED_TOLD:
            if claims:
                self._look_if_due()
            for claim in claims:
                self.prepare(claim.consumer, [claim.message_type])
                self.places.expect(self.names.id("consumer", claim.consumer), claim.id.key)
        if self._owed:
            self._pay()
        return self._made_unit(late=late, unclaimed=not claims and not late)

    def takes_sets(self, consumer: str) -> bool:
        """Whether `begin_set` works here: on PostgreSQL, unless the consumer keeps daily tables, which claims name."""
        if self.engine.dialect.name != "postgresql":
            return False
        with DENIED_TOLD:
            self.places.look_if_due()
        return not self.places.is_divided(self.names.id("consumer", consumer))

    def begin_set(self, consumer: str, message_type: str) -> SetUnit:
        """A unit of work for thousands of messages of a type, which are copied to the server once.

        Raises:
            StoreUnavailable: the database can't be reached.
        """
        with DENIED_TOLD:
            self._look_if_due()
            self.prepare(consumer, [message_type])
        if self._owed:
            self._pay()
        return self._made_set(consumer, message_type)

    def _look_if_due(self) -> None:
        """Read anew, once in a while, what deliveries need to know without asking."""
        refresh(self.clock)
        self.places.look_if_due()
        self._horizons.read_if_due()

    def _made_unit(self, *, late: bool, unclaimed: bool) -> SqlUnit:
        return SqlUnit(self, late=late, unclaimed=unclaimed)

    def _made_set(self, consumer: str, message_type: str) -> SetUnit:
        from idemp.inbox.sql.sets_postgresql import SetUnit  # psycopg is an extra

        return SetUnit(self, consumer, message_type)

    def prepare(self, consumer: str, message_types: Iterable[str] = ()) -> None:
        """Intern names, so that no delivery has to."""
        self.names.id("worker", self.worker)
        self.names.id("consumer", consumer)
        _ = self.broker_id
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
            self._record(confirmed, rows, refused)
        except exc.DBAPIError as error:
            if not self.places.was_wrong(error):
                raise self._not_recorded(error) from error
            self.places.look()  # a day was dropped, and its history with it: what comes after is kept with late ids
            try:
                self._record(confirmed, rows, refused)
            except exc.SQLAlchemyError as again:
                raise self._not_recorded(again) from again
        except exc.SQLAlchemyError as error:
            raise self._not_recorded(error) from error

    def _record(
        self, confirmed: Sequence[UUID], rows: Sequence[Mapping[str, Any]], refused: Mapping[UUID, str]
    ) -> None:
        history: History = {place.tables.history: own for place, own in self.places.by_place(rows)}
        if not refused:
            with self.engine.connect() as connection:
                if self.dialect.record(connection, confirmed, history):
                    return
        with self.engine.begin() as connection:
            for start in range(0, len(confirmed), _MARKS_PER_STATEMENT):
                connection.execute(self._unpend, {"ids": confirmed[start : start + _MARKS_PER_STATEMENT]})
            for table, own in history.items():
                # Two threads may mark one handling in the same microsecond: then one line of history is enough.
                connection.execute(_insert_if_absent(table, self.engine.dialect.name), own)
            if refused:
                connection.execute(self._explain, [{"id": id_, "why": refused[id_]} for id_ in sorted(refused)])

    @staticmethod
    def _not_recorded(error: exc.SQLAlchemyError) -> StoreError:
        known = failures.translate(error) or failures.denied(error)
        return known or StoreError(f"Marks could not be recorded: {error}")

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
        """Whether some relay that ships to this store's broker showed life recently."""
        return self.upkeep.relay_alive()

    def late_before(self, consumer: str, retention: timedelta, claims: Sequence[Claim] = ()) -> datetime:
        """The start of the retention window, as last refreshed, or of the days that are kept of such ids, if that is later.

        Before the window is first read, nothing counts as late by it.
        """
        with DENIED_TOLD:
            kept = [self.places.kept_from(self.names.id("consumer", each.consumer), each.id.key) for each in claims]
            return max([self._horizons.late_before(consumer, retention), *kept])

    def refresh_horizons(self, consumer: str, retentions: Iterable[timedelta]) -> None:
        """Read how far back the windows of a consumer reach now, and which days have tables; off the hot path."""
        self._horizons.read(consumer, retentions)
        self.places.look()

    @property
    def place(self) -> str:
        """The database, without user and password."""
        return place_of(self.engine)

    def verify(self, *, writes: bool = True) -> None:
        """See that tables, keys and isolation are as the promises need them; see `idemp.inbox.sql.schema.check`.

        Args:
            writes: whether it is going to be written; else a user who may only read will do, and a read-only database.
        """
        check(self.engine, self.tables, writes=writes)

    def announce_pending(self) -> None:
        """Wake the relays; if that fails they look by themselves a moment later."""
        try:
            self.upkeep.announce_pending()
        except StoreError as error:
            log.debug("relays not woken: %s", error)

    def announce_effects(self) -> None:
        """Wake who runs effects; if that fails they look by themselves a moment later."""
        try:
            self.upkeep.announce_effects()
        except StoreError as error:
            log.debug("effects not announced: %s", error)

    def close(self) -> None:
        """End what the store itself keeps open; the engine is its owner's."""
        if "upkeep" in vars(self):
            self.upkeep.close()

    @property
    def broker_id(self) -> int | None:
        """Its number in rows of pending outputs; `None` for the default broker."""
        return self._broker.id

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
            "source_position": claim.position,
        }

    def key_row(self, claim: Claim) -> dict[str, Any]:
        """The claim's key as bound values."""
        return {"consumer_id": self.names.id("consumer", claim.consumer), "message_key": claim.id.key}

    def withdraw(self, rows: Sequence[Mapping[str, Any]], *, told: bool) -> bool:
        """Take back claims that a handler committed on its own, without their outputs: such messages are not skipped.

        Args:
            rows: the claims.
            told: whether their deliveries have been told already that a handler ended the transaction.

        Returns:
            Whether there was such a claim; somebody else's, made meanwhile, is left alone.

        Raises:
            StoreError: the database can't do its part now. It is owed, and done before the next unit of work begins.
        """
        try:
            return bool(self._withdraw_now(rows))
        except StoreError as error:
            self._owed.append(_Debt(rows, told))
            log.warning(
                "claims not withdrawn yet: %s", error, extra={"event": "claims_not_withdrawn", "claims": len(rows)}
            )
            raise

    def was_ended(self, row: Mapping[str, Any], *, forget: bool = False) -> bool:
        """Whether a handler was found, later and to nobody's knowledge yet, to have committed this claim on its own."""
        key = (row["consumer_id"], row["message_key"])
        if key not in self._ended_by_handlers:
            return False
        if forget:
            self._ended_by_handlers.discard(key)
        return True

    def _pay(self) -> None:
        """Withdraw what is owed."""
        while self._owed:
            with suppress(IndexError):  # another thread was faster
                debt = self._owed.popleft()
                try:
                    withdrawn = self._withdraw_now(debt.rows)
                except StoreError:
                    self._owed.appendleft(debt)
                    raise
                if not debt.told:
                    self._ended_by_handlers.update(withdrawn)

    def _withdraw_now(self, rows: Sequence[Mapping[str, Any]]) -> list[tuple[int, UUID]]:
        try:
            withdrawn = self._withdrawn(rows)
        except exc.SQLAlchemyError as error:
            known = failures.translate(error) or failures.denied(error)
            raise known or StoreError(f"A claim could not be withdrawn: {error}") from error
        for _, key in withdrawn:
            log.error(
                "a handler committed behind idemp's back; its claim is withdrawn",
                extra={"event": "claim_withdrawn", "message_key": str(key)},
            )
        return withdrawn

    def _withdrawn(self, rows: Sequence[Mapping[str, Any]]) -> list[tuple[int, UUID]]:
        try:
            with self.engine.begin() as connection:
                return withdraw(connection, self.places, rows)
        except exc.DBAPIError as error:
            if not self.places.was_wrong(error):
                raise
        self.places.look()  # a day was dropped, and what is claimed was moved out of it
        with self.engine.begin() as connection:
            return withdraw(connection, self.places, rows)


def _worker_name() -> str:
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(3)}"


def _insert_if_absent(table: Table, dialect: str) -> Insert:
    if dialect == "postgresql":
        return postgresql.insert(table).on_conflict_do_nothing()
    if dialect == "sqlite":
        return sqlite.insert(table).on_conflict_do_nothing()
    return insert(table).prefix_with("IGNORE")


def _check_engine(engine: object) -> None:
    if not isinstance(engine, Engine) or engine.dialect.is_async:
        given = "an asynchronous one" if hasattr(engine, "dialect") else f"a {type(engine).__name__}"
        raise ConfigurationError(
            f"The inbox needs a synchronous SQLAlchemy engine, not {given}.",
            fix='Give one, as in create_engine("postgresql+psycopg://…"); handlers are called from threads.',
        )
    check_driver(engine.dialect)


def _checked_factory(engine: Engine, factory: sessionmaker[Any] | None) -> sessionmaker[Any]:
    if factory is None:
        return sessionmaker(class_=Session)
    if not isinstance(factory, sessionmaker):
        raise ConfigurationError(
            f"The session factory is a {type(factory).__name__}, not a sessionmaker of synchronous sessions.",
            fix="Give the sessionmaker itself: session_factory=sessionmaker(engine).",
        )
    if factory.kw.get("twophase") or factory.kw.get("autobegin") is False:
        raise ConfigurationError(
            "The session factory says twophase=True or autobegin=False: its sessions can't join idemp's transaction.",
            fix="Give a sessionmaker without them.",
        )
    bind = factory.kw.get("bind")
    if bind not in (None, engine) or any(other is not engine for other in (factory.kw.get("binds") or {}).values()):
        raise ConfigurationError(
            "The session factory is bound to another engine than the inbox's: claim and effects would not commit together.",
            fix="Give the sessionmaker of the same engine, without binds=.",
        )
    return factory
