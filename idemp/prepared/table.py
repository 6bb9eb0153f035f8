"""The table home: a prepared message is a row of the outbox that relays leave alone until its work is known to be committed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Select, and_, delete, or_, select, update

from idemp.context import CAUSATION
from idemp.errors import Conflict
from idemp.prepared.ports import Prepared
from idemp.sql.engine import Database
from idemp.sql.retention import STEP, UNDECIDED
from idemp.sql.scheduler import SATURATED
from idemp.sql.store import HEAD_START, output_of

__all__ = ["PreparedRecord", "TableHome"]

LEASE: Final = 60.0  # seconds for which a checker owns a message


@dataclass(frozen=True)
class PreparedRecord:
    """A prepared message, for operators.

    Attributes:
        id: Id of the message.
        app: Name of the app that prepared it.
        key: The producer's name of the work.
        state: `waiting`, `parked`; or `quarantined`: the work is committed, and the broker has refused the message.
        checks: Number of checks without a decision; -1 if the message is not checked.
        due_at: Time of the next check, in seconds since 1970.
        reason: The reason why the message is not checked.

    Example:
        >>> PreparedRecord("1", "orders", "7", "shop.Reserve", "waiting", 2, 0.0, "").state
        'waiting'
    """

    id: str
    app: str
    key: str
    type: str
    state: str
    checks: int
    due_at: float
    reason: str


class TableHome:
    """Prepared messages in the tables of idemp, under the negative number of their app.

    Args:
        database: The database of idemp's tables.
        app: Name of the app; None for all apps, whose messages can be listed, resumed and parked.
        number: Number of the app in the tables.
        longest: Maximum number of seconds between two checks of a message.

    Example:
        >>> TableHome(Database("sqlite:///shop.db")).app
    """

    def __init__(self, database: Database, app: str | None = None, number: int = 0, longest: float = 60.0) -> None:
        self._database, self.app, self._number, self._longest = database, app, number, longest
        self._pending, self._output, self._name = database.tables.pending, database.tables.output, database.tables.name

    def prepare(self, prepared: Prepared, wait: float) -> None:
        """Insert the rows of a message, or compare it with the stored one."""
        self._insert(prepared, wait, 0)

    def lease(self, limit: int) -> list[Prepared]:
        """Lease rows for a minute."""
        pending, now = self._pending, self._database.dialect.now
        # A time later than any check can be due means that the clock of the database was set back.
        ready = or_(pending.c.due_at <= now, pending.c.due_at > now + max(self._longest, LEASE) + STEP)
        due = select(pending.c.output_id).where(*self._waiting(), ready).order_by(pending.c.due_at).limit(limit)
        with self._database.engine.connect() as connection:  # no write lock, unless there is something to lease
            if connection.execute(due.limit(1)).first() is None:
                return []
        with self._database.short() as connection:
            ids = connection.scalars(self._database.dialect.lock(due)).all()
            connection.execute(update(pending).where(pending.c.output_id.in_(ids)).values(due_at=now + LEASE))
            rows = connection.execute(self._rows().where(pending.c.output_id.in_(ids))).all()
        return [Prepared(self.app or "", _key(row.headers), output_of(row, sendable=True), row.attempts) for row in rows]

    def commit(self, prepared: Prepared) -> None:
        """Turn the message into an ordinary output, due when the head start of its dispatcher is over."""
        values = {"refusals": 0, "attempts": 0, "reason": None, "due_at": self._database.dialect.now + HEAD_START}
        self._change(prepared.output.id, **values)

    def end(self, prepared: Prepared) -> None:
        """Delete the row in any state."""
        with self._database.short() as connection:
            connection.execute(delete(self._pending).where(self._pending.c.output_id == prepared.output.id))

    def postpone(self, prepared: Prepared, wait: float) -> None:
        """Set the time of the next check."""
        self._change(prepared.output.id, attempts=prepared.checks + 1, due_at=self._database.dialect.now + wait)

    def park(self, prepared: Prepared, reason: str) -> None:
        """Stop the checks of a message until an operator resumes it. A message from another home is inserted here."""
        self._insert(prepared, 0.0, SATURATED)
        self.park_ids([prepared.output.id], reason)

    def still_there(self, ids: Sequence[str]) -> set[str]:
        """Return the ids among these whose messages wait or are parked."""
        pending = self._pending
        with self._database.engine.connect() as connection:
            known = connection.scalars(select(pending.c.output_id).where(pending.c.output_id.in_(ids)))
            return {str(id) for id in known}

    # For operators

    def find(self, ids: Sequence[str] = (), *, parked: bool = False, limit: int = 1000) -> list[PreparedRecord]:
        """Return messages of all apps that are undecided or in quarantine, or those that are parked; or those of ids or keys."""
        name, pending = self._name, self._pending
        columns = (pending.c.due_at, pending.c.reason, pending.c.quarantined_at)
        query = self._rows().add_columns(name.c.name.label("app"), *columns)
        undecided = pending.c.refusals == UNDECIDED
        shown = and_(undecided, pending.c.attempts >= SATURATED) if parked else undecided | pending.c.quarantined_at.is_not(None)
        query = query.join(name, name.c.id == -pending.c.consumer_id).where(shown)
        with self._database.engine.connect() as connection:
            records = [_record(row) for row in connection.execute(query.order_by(pending.c.due_at).limit(None if ids else limit))]
        return [record for record in records if not ids or record.id in ids or record.key in ids]

    def resume(self, ids: Sequence[str]) -> int:
        """Let messages be checked now, with a new count, or sent again if they are in quarantine; return how many."""
        pending, fresh = self._pending, {"attempts": 0, "reason": None, "due_at": self._database.dialect.now}
        kept = pending.c.output_id.in_(sorted(ids)), pending.c.quarantined_at.is_not(None)
        with self._database.short() as connection:
            sent = connection.execute(update(pending).where(*kept).values(refusals=0, quarantined_at=None, **fresh)).rowcount
        return sent + self._change(*ids, **fresh)

    def park_ids(self, ids: Sequence[str], reason: str) -> int:
        """Park messages; return how many."""
        return self._change(*ids, attempts=SATURATED, reason=reason[:1000].encode())

    def _change(self, *ids: str, **values: Any) -> int:
        pending = self._pending
        undecided = (pending.c.output_id.in_(sorted(ids)), pending.c.refusals == UNDECIDED)
        with self._database.short() as connection:
            return connection.execute(update(pending).where(*undecided).values(values)).rowcount

    def _waiting(self) -> tuple[Any, ...]:
        pending = self._pending
        return pending.c.consumer_id == -self._number, pending.c.refusals == UNDECIDED, pending.c.attempts < SATURATED

    def _rows(self) -> Select[Any]:
        output, pending = self._output, self._pending
        same = and_(*(output.c[name] == pending.c[name] for name in ("consumer_id", "message_key", "ordinal")))
        return select(output, pending.c.attempts).join(pending, same)

    def _insert(self, prepared: Prepared, wait: float, checks: int) -> None:
        output, pending, dialect, sent = self._output, self._pending, self._database.dialect, prepared.output
        place = {"consumer_id": -self._number, "message_key": dialect.key(prepared.place), "ordinal": 0, "output_id": sent.id}
        texts = {name: getattr(sent, name) for name in ("kind", "exchange", "routing_key", "mandatory", "body")}
        texts |= {"delay": None, "headers": json.dumps(sent.properties).encode()}
        undecided = dialect.insert_new(pending, ["output_id"]).values(due_at=dialect.now + wait)
        with self._database.short() as connection:
            connection.execute(dialect.insert_new(output, ["consumer_id", "message_key", "ordinal"]), {**place, **texts})
            connection.execute(undecided, {**place, "refusals": UNDECIDED, "attempts": checks})
            stored = connection.execute(self._rows().where(pending.c.output_id == sent.id)).first()
            if stored is None:  # another process has just ended the message; work under its key is not done again
                return
            there = output_of(stored, sendable=True)
            if (there.routing_key, there.properties["type"], there.body) != (
                sent.routing_key,
                sent.properties["type"],
                sent.body,
            ):
                raise Conflict(f"another message is prepared under the key {prepared.key!r}")


def _key(headers: bytes) -> str:
    return str(json.loads(headers)["headers"][CAUSATION])


def _record(row: Any) -> PreparedRecord:
    properties = json.loads(row.headers)
    state, checks = ("parked", -1) if row.attempts >= SATURATED else ("waiting", row.attempts)
    if row.quarantined_at is not None:
        state, checks = "quarantined", -1
    reason = (row.reason or b"").decode(errors="replace")
    return PreparedRecord(str(row.output_id), row.app, _key(row.headers), properties["type"], state, checks, row.due_at, reason)
