"""The store on SQL: claims and outputs, in the transaction of the handler."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Final
from uuid import UUID

from sqlalchemy import (
    BigInteger,
    BindParameter,
    ColumnElement,
    Connection,
    Double,
    Row,
    Table,
    and_,
    bindparam,
    case,
    cast,
    exc,
    or_,
    select,
)

from idemp.errors import HandlerError, TransactionEnded, TransactionRolledBack
from idemp.identity import name_number
from idemp.messages import RESULT, Output
from idemp.ports import Claim, ClaimAnswer, Handled, Identity, Kind, Verdict
from idemp.sql.dialects import CLAIM_SECONDS, Ended, FastPath, Times
from idemp.sql.engine import Database
from idemp.sql.guard import Unit
from idemp.sql.identities import compare, register_names

__all__ = ["ERASED", "HEAD_START", "UNCLAIMED", "SqlStore", "is_erased", "output_of"]

HEAD_START: Final = 15.0
"""Seconds for which outputs belong to the worker that stored them; longer than it waits for confirms."""
UNCLAIMED: Final = 0
"""Consumer of delayed outputs of types that are not opted in; they have random keys."""
ERASED: Final = {"headers": b"{}", "body": b""}
"""Columns of an erased output. An empty body alone may be a message of another library, which has headers."""
DAY: Final = 86_400.0
MANY: Final = 1_000  # claims that are read back by one statement


class SqlStore:
    """Claims and outputs of one database.

    Args:
        database: Engines and tables.
        worker: Name of this process, which is stored in its claims.
        head_start: Seconds for which relays leave its outputs alone; None stores them as if they had been sent.
        lazy: Whether it may commit without waiting for the disk, if the database shows such commits and the fast path is on.

    Example:
        >>> SqlStore(Database("sqlite:///shop.db"), "worker-1").classify(ValueError()) is None
        True
    """

    def __init__(self, database: Database, worker: str, head_start: float | None = HEAD_START, *, lazy: bool = False) -> None:
        self.database, self.worker, self._fast, self.head_start = database, worker, database.fast_path, head_start
        self.lazy = lazy and database.fast_path is not None
        Unit.guard(database.units)
        dialect, tables = database.dialect, database.tables
        inbox, output, pending, now = tables.inbox, tables.output, tables.pending, dialect.now
        self._key = dialect.key
        made: BindParameter[float] = bindparam("made", type_=Double())
        self._claim = dialect.claim_statement(inbox).values(
            consumer_id=bindparam("consumer"),
            message_key=bindparam("key"),
            type_id=bindparam("type"),
            original_id=bindparam("original"),
            fingerprint=bindparam("payload"),
            # A message from the future stays for its window; one from further than a day does not.
            claimed_at=case((made > now + DAY, now + DAY), (made > now, made), else_=now),
            worker=worker,
        )
        at: tuple[BindParameter[int], BindParameter[Any]] = (bindparam("consumer"), bindparam("key"))
        self._claimed_us = cast(inbox.c.claimed_at * 1_000_000, BigInteger).label("claimed_us")
        claimed = (inbox.c.type_id, inbox.c.original_id, inbox.c.fingerprint, inbox.c.worker, self._claimed_us)
        same = (output.c.consumer_id == inbox.c.consumer_id, output.c.message_key == inbox.c.message_key)
        self._stored = (
            select(*claimed, output, pending.c.due_at, pending.c.quarantined_at, (pending.c.due_at <= now).label("due"))
            .select_from(inbox)
            .outerjoin(output, and_(*same))
            .outerjoin(pending, pending.c.output_id == output.c.output_id)
            .where(inbox.c.consumer_id == at[0], inbox.c.message_key == at[1])
            .order_by(output.c.ordinal)
        )
        identity = tables.identity
        owner = (identity.c.consumer == bindparam("consumer"), identity.c.type == bindparam("type"))
        self._purged = select(identity.c.purged_before).where(*owner)
        # Both take the same rows, so each names its columns.
        place = ("consumer_id", "message_key", "ordinal", "output_id")
        stored = (*place, "kind", "exchange", "routing_key", "mandatory", "delay", "headers", "body")
        self._store = output.insert().values({name: bindparam(name) for name in stored})
        self._pend = pending.insert().values({name: bindparam(name) for name in place} | {"due_at": now + bindparam("wait")})

    def register(self, consumer: str, types: Sequence[str], identities: Sequence[Identity], *, complete: bool = False) -> None:
        """Store names with their numbers, and refuse an identity that was changed while former claims count."""
        formers = [each.former.consumer for each in identities if each.former]
        wanted = sorted({*(("consumer", each) for each in (consumer, *formers)), *(("type", type) for type in types)})
        with self.database.short() as connection:
            register_names(self.database, connection, wanted)
            compare(self.database, connection, consumer, types, identities, complete=complete)

    def connect(self) -> Unit:
        """Begin a unit of work."""
        return Unit(self.database)

    def claim(self, tx: Unit, claims: Sequence[Claim]) -> list[ClaimAnswer]:
        """Insert claims, and mark the transaction."""
        answers: list[ClaimAnswer] = []
        try:
            if self._fast is None or not self._claim_fast(self._fast, tx, claims, answers):
                self.database.dialect.mark(tx.connection, tx.name, self.database.tables.inbox)
                for claim in claims:
                    answers.append(self.claim_on(tx.connection, claim))  # noqa: PERF401 - what was answered is kept
                self.database.dialect.claimed(tx.connection)
        except exc.DBAPIError as error:
            if not self.database.dialect.in_flight(error, self.database.tables.inbox):
                raise
            return [*answers, ClaimAnswer(Verdict.IN_FLIGHT)]
        for claim, answer in zip(claims, answers, strict=True):
            if answer.verdict is Verdict.CLAIMED:
                tx.claims.append(claim)
        return answers

    def _claim_fast(self, fast: FastPath, tx: Unit, claims: Sequence[Claim], answers: list[ClaimAnswer]) -> bool:
        """Claim in one message; return whether that was done."""
        if any(claim.former is not None for claim in claims):
            return False
        rows = [self._row(claim) for claim in claims]
        try:
            answer = fast.claim(tx.connection, tx.name, self.worker, rows)
        except exc.DBAPIError as error:
            if len(claims) == 1 or not self.database.dialect.in_flight(error, self.database.tables.inbox):
                raise
            tx.restart()  # which of them is in flight is seen when they are claimed one by one
            return False
        if answer is None:
            return False
        new, purged = answer  # the latter is read after the claims
        for claim, row in zip(claims, rows, strict=True):
            place = (row["consumer"], claim.key)
            if place in new:
                claim.found = new.pop(place)  # a second one would be a duplicate
                answers.append(ClaimAnswer(Verdict.CLAIMED, late=purged and self._is_late(tx.connection, claim)))
            else:
                # An initiation goes on after a duplicate, and what a listener has set at its begin has to stay.
                last = len(claims) == 1 and not self.database.engine.dispatch.begin
                stored = fast.stored(tx.connection, row, last=last)
                answers.append(_judge(claim, stored, row["original"], {row["type"]}))
        return True

    def claim_within(self, connection: Connection, claim: Claim, wait: float) -> ClaimAnswer:
        """Insert a claim in a transaction of a caller's, and wait some seconds for others; after IN_FLIGHT it cannot be used."""
        inbox, dialect = self.database.tables.inbox, self.database.dialect
        try:
            with dialect.limited(connection, inbox, wait):
                answer = self.claim_on(connection, claim, wait)
        except exc.DBAPIError as error:
            if not dialect.in_flight(error, inbox):
                raise
            return ClaimAnswer(Verdict.IN_FLIGHT)
        if answer.verdict is Verdict.DUPLICATE:
            dialect.let_commit_wait(connection)
        return answer

    def claim_on(self, connection: Connection, claim: Claim, wait: float = CLAIM_SECONDS) -> ClaimAnswer:
        """Insert a claim in any transaction, and one by the former identity of its type; neither stays unless both are new."""
        former = claim.former
        types = {name_number("type", claim.type)}
        if former is not None:
            types.add(name_number("type", former.type))
        answer = self._claim_one(connection, claim, types, wait)
        if answer.verdict is not Verdict.CLAIMED or former is None or former.place == claim.place:
            return answer
        former.resends = claim.resends
        second = self._claim_one(connection, former, types, wait)
        if second.verdict is not Verdict.CLAIMED:
            claim.former = None
            self.withdraw_on(connection, claim)
            claim.former = former
        return replace(second, late=answer.late or second.late)

    def withdraw_on(self, connection: Connection, claim: Claim) -> None:
        """Delete a claim of the same transaction, and the one by the former identity."""
        inbox = self.database.tables.inbox
        for each in (claim, claim.former):
            if each is not None:
                ours = (inbox.c.consumer_id == name_number("consumer", each.consumer), inbox.c.message_key == self._key(each.key))
                connection.execute(inbox.delete().where(*ours))

    def _row(self, claim: Claim) -> dict[str, Any]:
        return {
            "consumer": name_number("consumer", claim.consumer),
            "key": self._key(claim.key),
            "type": name_number("type", claim.type),
            "original": claim.original.encode(),
            "payload": claim.fingerprint,
            "made": claim.made_at,
        }

    def _claim_one(self, connection: Connection, claim: Claim, types: set[int], wait: float) -> ClaimAnswer:
        row = self._row(claim)
        if self.database.dialect.claim(connection, self._claim, row, wait):
            return ClaimAnswer(Verdict.CLAIMED, late=claim.made_at is not None and self._is_late(connection, claim))
        return _judge(claim, connection.execute(self._stored, row).all(), row["original"], types)

    def _is_late(self, connection: Connection, claim: Claim) -> bool:
        """Look after the claim, so that a cleaner which deleted an earlier one has been seen."""
        return claim.made_at is not None and claim.made_at <= self.purged_before(connection, claim.consumer, claim.type)

    def purged_before(self, connection: Connection, consumer: str, type: str) -> float:
        """Return the time of the latest claim that was deleted, in seconds since 1970."""
        purged = connection.execute(self._purged, {"consumer": consumer, "type": type}).scalar()
        return float("-inf") if purged is None else float(purged)

    def limited(self, tx: Unit, seconds: float) -> AbstractContextManager[None]:
        """Set the time-outs of the connection."""
        return self.database.dialect.handler_limited(tx.connection, seconds)

    def finish(self, tx: Unit, handled: Sequence[Handled], *, lazy: bool = False) -> None:
        """Prove the transaction, store outputs, commit; lazily only by the fast path, and if later claims would have another time."""
        lazy = lazy and all(claim.found and abs(claim.found - (claim.made_at or 0.0) * 1e6) > 1 for claim in tx.claims)
        try:
            rows = self._output_rows(handled, self.head_start)
            tx.commit(rows, self._store_rows, self._fast, lazy=lazy)
        except Ended as ended:  # by a commit or a rollback; only a forced replay runs again what may be committed
            if not tx.claims:
                tx.error = TransactionEnded("a commit or a rollback below SQLAlchemy")
            elif (committed := self._committed(tx)) is False:
                tx.error = TransactionRolledBack(self.database.dialect.unmarked)
            else:
                tx.error = TransactionEnded("a commit below SQLAlchemy", committed=committed)
            raise tx.error from ended

    def read_back(self, claims: Sequence[Claim]) -> list[bool]:
        """Read claims in transactions that wait for the disk; return of each whether the one that was made or found still stands."""
        if not self.database.dialect.shows_early:
            return [True] * len(claims)
        times: Times = {}
        for start in range(0, len(claims), MANY):
            keys: dict[int, list[UUID]] = {}
            for claim in claims[start : start + MANY]:
                for each in (claim, claim.former):
                    if each is not None:
                        keys.setdefault(name_number("consumer", each.consumer), []).append(each.key)
            times |= self._times(keys)
        stands = []
        for claim in claims:  # unless another handling has claimed it since, whose outputs may be others
            found = claim.former if claim.former is not None and claim.former.found else claim
            at = times.get((name_number("consumer", found.consumer), found.key))
            stands.append(at is not None and found.found in (None, at))
        return stands

    def _times(self, keys: dict[int, list[UUID]]) -> Times:
        if self._fast is not None and not self.database.engine.dispatch.begin:  # which may set a role
            with self.database.engine.connect() as connection:
                return self._fast.read_back(connection, keys)
        inbox = self.database.tables.inbox
        places = [and_(inbox.c.consumer_id == number, inbox.c.message_key.in_(some)) for number, some in keys.items()]
        read = select(inbox.c.consumer_id, inbox.c.message_key, self._claimed_us).where(or_(*places))
        with self.database.short() as connection, self.database.dialect.impatient(connection):
            rows = connection.execute(read).all()
            self.database.dialect.let_commit_wait(connection)
        return {(row.consumer_id, row.message_key): row.claimed_us for row in rows}

    def store_on(self, connection: Connection, handled: Sequence[Handled], head_start: float | None) -> None:
        """Store outputs in any transaction. They are due for relays after `head_start` seconds."""
        self._store_rows(connection, self._output_rows(handled, head_start))

    def _output_rows(self, handled: Sequence[Handled], head_start: float | None) -> list[dict[str, Any]]:
        rows = []
        for each in handled:
            if each.claim is not None:
                consumer, key = name_number("consumer", each.consumer), self._key(each.claim.key)
                kept: Sequence[Output] = each.outputs
            else:
                consumer, key = UNCLAIMED, self._key(UUID(bytes=secrets.token_bytes(16)))
                kept = [output for output in each.outputs if output.delay is not None]
            for ordinal, output in enumerate(kept):
                due_in = head_start if output.delay is None or head_start is None else output.delay
                rows.append(
                    {
                        "consumer_id": consumer,
                        "message_key": key,
                        "ordinal": ordinal,
                        "output_id": output.id,
                        "kind": output.kind,
                        "exchange": output.exchange,
                        "routing_key": output.routing_key,
                        "mandatory": output.mandatory,
                        "delay": output.delay,
                        "headers": json.dumps(output.properties).encode(),
                        "body": output.body,
                        "wait": None if output.kind == RESULT else due_in,
                    }
                )
        return rows

    def _store_rows(self, connection: Connection, rows: Sequence[dict[str, Any]]) -> None:
        if rows:
            connection.execute(self._store, rows)
        pending = []
        for row in rows:
            if row["wait"] is not None:
                pending.append(row)  # noqa: PERF401 - a comprehension is a call, and this runs for each delivery
        if pending:
            connection.execute(self._pend, pending)

    def intact(self, tx: Unit) -> bool:
        """Ask the driver."""
        return tx.intact()

    def ended(self, tx: Unit) -> HandlerError | None:
        """Return the refusal; or, if the handler committed below SQLAlchemy before it failed, that."""
        ended = isinstance(tx.error, TransactionRolledBack) or (tx.error is not None and tx.error.committed is not False)
        if tx.claims and not tx.ending and not ended and not tx.holds() and self._committed(tx):
            tx.error = TransactionEnded("a commit below SQLAlchemy", committed=True)
        return tx.error

    def classify(self, error: BaseException) -> Kind | None:
        """Ask the dialect."""
        return self.database.dialect.classify(error)

    def probe(self) -> bool:
        """Claim an id and store an output on another connection, and roll back."""
        tables = self.database.tables
        try:
            with Unit(self.database) as unit:
                self.database.dialect.mark(unit.connection, unit.name, tables.inbox)
                key = self._key(UUID(bytes=secrets.token_bytes(16)))
                row = {"consumer": UNCLAIMED, "key": key, "type": 0, "original": b"probe", "payload": None, "made": None}
                self.database.dialect.claim(unit.connection, self._claim, row)
                unit.connection.execute(self._stored, row).first()
                place = {"consumer_id": UNCLAIMED, "message_key": key, "ordinal": 0, "output_id": str(UUID(int=0))}
                unit.connection.execute(self._pend, {**place, "wait": 0.0})
                values = {"kind": "", "exchange": "", "routing_key": "", "mandatory": False, "headers": b"", "body": b""}
                unit.connection.execute(self._store, {**place, **values, "delay": None})
            with self.database.queue_engine.connect() as connection:  # and roll back
                row = {"queue": "", "holder": "", "headers": b"", "body": b""}
                connection.execute(tables.message.insert(), row)
        except Exception:  # noqa: BLE001 - for any reason, no work can be done
            # After a failover, pooled connections may still lead to the former primary, which is read-only now.
            self.database.engine.dispose()
            return False
        return True

    def _committed(self, tx: Unit) -> bool | None:
        """Look on another connection whether claims of an ended transaction were committed; None if that is unknown."""
        try:
            tx.end()  # what ran after the end has no claim
            with self.database.engine.connect() as connection:
                for claim in tx.claims:
                    row = {"consumer": name_number("consumer", claim.consumer), "key": self._key(claim.key)}
                    stored = connection.execute(self._stored, row).first()
                    if stored is not None and stored.worker == self.worker:
                        return True
        except Exception:  # noqa: BLE001 - the database is away
            return None
        return False


def _judge(claim: Claim, rows: Sequence[Row[Any]], original: bytes, types: set[int]) -> ClaimAnswer:
    """Return the verdict on a claim whose place is taken: the same message, or another one."""
    if not rows:  # purged meanwhile, or committed later than the snapshot of this transaction
        return ClaimAnswer(Verdict.IN_FLIGHT)
    stored = rows[0]
    if stored.type_id not in types or stored.original_id != original:
        return ClaimAnswer(Verdict.CONFLICT)
    claim.found = stored.claimed_us
    known = stored.fingerprint is not None and claim.fingerprint is not None
    if known and stored.fingerprint != claim.fingerprint and not claim.skips_conflicts:
        return ClaimAnswer(Verdict.CONFLICT)
    outputs = [output for each in rows if (output := _wanted(each, claim.resends))]
    last = rows[-1]  # where a result is
    result = last.body if last.kind == RESULT and not _erased(last) else None
    return ClaimAnswer(Verdict.DUPLICATE, outputs, worker=stored.worker, result=result)


def is_erased(output: Table) -> ColumnElement[bool]:
    """Return the condition that an output was erased."""
    return and_(*(output.c[name] == value for name, value in ERASED.items()))


def _erased(row: Row[Any]) -> bool:
    return not row.body and bool(row.headers == ERASED["headers"])


def output_of(row: Row[Any], *, sendable: bool) -> Output:
    """Return a stored output."""
    properties = json.loads(row.headers)
    return Output(
        str(row.output_id), row.kind, row.exchange, row.routing_key, properties, row.body, row.delay, row.mandatory, sendable
    )


def _wanted(row: Row[Any], resends: str) -> Output | None:
    """Return an output of a duplicate that is still to be sent, now or later; None for all others."""
    if row.kind is None or row.kind == RESULT or _erased(row):  # without outputs, one row has their columns empty
        return None
    if row.due_at is None:  # confirmed
        return output_of(row, sendable=True) if resends == "always" else None
    if row.quarantined_at is not None:  # the operator decides
        return None
    undelayed = row.delay is None
    return output_of(row, sendable=bool(row.due or (undelayed and resends != "due")))
