"""Pending outputs as relays see them: leased, settled, quarantined."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import bindparam, case, delete, func, literal, select, union_all, update

from idemp.inbox.port import DEFAULT_BROKER, LONGEST_WAIT, PendingOutput, PendingState
from idemp.inbox.sql.brokers import OwnBroker
from idemp.inbox.sql.due import EFFECTS_FROM, EFFECTS_LATER, NEVER, NEVER_RUN, moved
from idemp.inbox.sql.leased import LeasedOutputs
from idemp.inbox.sql.names import Names
from idemp.inbox.sql.short import Locking, Short
from idemp.inbox.sql.tables import Moment
from idemp.inbox.sql.times import Moments

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime
    from uuid import UUID

    from sqlalchemy import ColumnElement, Connection, Engine, Select, Update

    from idemp.clock import Clock
    from idemp.inbox.sql.places import Places
    from idemp.inbox.sql.tables import Tables

MAX_BATCH: Final = 1000
MOST_COUNTED: Final = 100_000
"""Pending outputs that `state` counts: it is asked every few seconds, and its cost must not grow with an outage."""
_RESCUE_SECONDS: Final = 60.0
LOOKED_AT: Final = 2_000
"""At either end of those that wait, in the order in which they are due: the oldest is looked for there."""
_MOST_COUNTED_TRIES: Final = 30_000


class Leases:
    """Takes and settles pending outputs in short transactions; nothing remote ever happens inside one.

    Work is found by its state and by time, never by "greater than the last one seen": a transaction that commits late
    brings rows which such a mark would have passed already.

    Example:
        >>> from datetime import timedelta
        >>> from idemp.clock import SystemClock
        >>> from idemp.inbox.sql.engine import create_engine_safely
        >>> from idemp.inbox.sql.places import Places
        >>> from idemp.inbox.sql.schema import upgrade
        >>> from idemp.inbox.sql.tables import Tables
        >>> engine, tables = create_engine_safely("sqlite://"), Tables()
        >>> upgrade(engine, tables)
        >>> leases = Leases(engine, tables, SystemClock(), Places(engine, tables, SystemClock()))
        >>> leases.take(limit=10, lease=timedelta(seconds=30))
        []
    """

    def __init__(
        self, engine: Engine, tables: Tables, clock: Clock, places: Places, broker: OwnBroker | None = None
    ) -> None:
        self._short = Short(engine)
        self._clock = clock
        self._broker = broker = broker or OwnBroker(Names(engine, tables, clock))
        moments = self._moments = Moments(engine, clock)
        self._leased = LeasedOutputs(engine, tables, places)
        pending = tables.pending
        ids = pending.c.output_id.in_(bindparam("ids", expanding=True))
        one = pending.c.output_id == bindparam("id")
        waiting = pending.c.quarantined_at.is_(None)
        due = (
            select(pending.c.output_id, pending.c.consumer_id, pending.c.message_key)
            .where(pending.c.due_at <= moments.at("now"), waiting)
            .order_by(pending.c.due_at)
            .limit(bindparam("limit"))
        )
        self._due = Locking(due.where(broker.owns(pending)))
        # "+ 0" keeps planners from the index on the consumer, by which they would read and sort all that waits.
        theirs = pending.c.consumer_id + 0 == bindparam("consumer")
        self._due_effects = Locking(due.where(pending.c.due_at >= EFFECTS_FROM, theirs))
        self._lease = (
            update(pending).where(ids).values(due_at=moments.at("until"), attempts=_one_more(pending.c.attempts))
        )
        self._confirm = delete(pending).where(ids)
        later = moved(pending.c.due_at, moments.at("until"), moments.at("effects_until"))
        self._fail = update(pending).where(one, waiting).values(due_at=later, reason=bindparam("why"))
        self._refuse = self._fail.values(refusals=_one_more(pending.c.refusals))
        self._return = self._fail.values(attempts=case((pending.c.attempts > 0, pending.c.attempts - 1), else_=0))
        self._quarantine = (
            update(pending)
            .where(one)
            .values(
                quarantined_at=moments.at("now"),
                due_at=moved(pending.c.due_at, literal(NEVER, Moment()), literal(NEVER_RUN, Moment())),
                reason=bindparam("why"),
            )
        )
        self._release = (
            update(pending)
            .where(ids, pending.c.quarantined_at.is_not(None))
            # In this order: MySQL's family sees what was set already, and here `due_at` tells an effect.
            .ordered_values(
                (pending.c.refusals, case((pending.c.due_at >= NEVER_RUN, 1), else_=0)),
                (pending.c.due_at, later),
                (pending.c.attempts, 1),
                (pending.c.quarantined_at, None),
            )
        )
        # What waits for longer than any pause is due by a clock that was wrong. An effect's pauses have no limit, but one
        # that was never tried has had none.
        late = update(pending).where(pending.c.due_at > moments.at("far"), waiting).values(due_at=moments.at("now"))
        self._rescue = late.where(pending.c.due_at < EFFECTS_FROM)
        self._rescue_effects = late.where(pending.c.due_at < NEVER, pending.c.attempts == 0)
        self._next_rescue = {self._rescue: 0.0, self._rescue_effects: 0.0}
        self._count = select(func.count()).select_from(pending)
        self._state = _state_of(tables, waiting)
        messages = select(pending.c.broker_id).where(pending.c.due_at < EFFECTS_FROM, waiting).limit(MOST_COUNTED)
        counted = messages.subquery()
        self._messages = (
            select(tables.broker.c.name, func.count())
            .select_from(counted.outerjoin(tables.broker, tables.broker.c.id == counted.c.broker_id))
            .group_by(tables.broker.c.name)
        )
        effects = select(pending.c.output_id).where(pending.c.due_at.between(EFFECTS_FROM, NEVER), waiting)
        self._effects = select(func.count()).select_from(effects.limit(MOST_COUNTED).subquery())

    def take(self, limit: int, lease: timedelta) -> list[PendingOutput]:
        """Lease messages whose time has come, at most `MAX_BATCH`; those that were confirmed meanwhile are left out."""
        return self._taken(self._due, self._rescue, limit, lease, **self._broker.said())

    def take_effects(self, consumer_id: int, limit: int, lease: timedelta) -> list[PendingOutput]:
        """Lease effects of this consumer whose time has come, at most `MAX_BATCH`."""
        return self._taken(
            self._due_effects, self._rescue_effects, limit, lease, ahead=EFFECTS_LATER, consumer=consumer_id
        )

    def _taken(
        self,
        looking: Locking,
        rescue: Update,
        limit: int,
        lease: timedelta,
        *,
        ahead: timedelta = timedelta(0),
        **of: Any,
    ) -> list[PendingOutput]:
        def work(connection: Connection) -> list[dict[str, Any]]:
            if self._next_rescue[rescue] <= self._clock.monotonic():
                far = self._moments.said("far", ahead + max(LONGEST_WAIT, 2 * lease))
                connection.execute(rescue, {**far, **self._moments.said("now", ahead)})
            wanted = {**self._moments.said("now", ahead), "limit": min(limit, MAX_BATCH), **of}
            due = [dict(row) for row in connection.execute(looking.on(connection), wanted).mappings()]
            if due:
                # From now on, not from before it waited for its turn: no lease may be over before what it is for.
                ids = [row["output_id"] for row in due]
                connection.execute(self._lease, {"ids": ids, **self._moments.said("until", ahead + lease)})
            return due

        due = self._short.run(work)
        if self._next_rescue[rescue] <= (now := self._clock.monotonic()):
            self._next_rescue[rescue] = now + _RESCUE_SECONDS
        return self._leased.read(due) if due else []

    def give_back(self, outputs: Mapping[UUID, str], retry_in: timedelta) -> None:
        """Leased outputs that were not tried after all: due after `retry_in`, one attempt less."""
        until = self._until(retry_in)
        rows = [{"id": id_, "why": outputs[id_], **until} for id_ in sorted(outputs)]
        if rows:
            self._short.run(lambda connection: connection.execute(self._return, rows))

    def settle(
        self, confirmed: Sequence[UUID], failed: Mapping[UUID, str], retry_in: timedelta, *, refused: bool = False
    ) -> None:
        """Confirmed outputs stop pending; failed ones are due again after `retry_in`, `refused` ones counted as such."""
        until = self._until(retry_in)
        failures = [{"id": id_, "why": failed[id_], **until} for id_ in sorted(failed)]

        def work(connection: Connection) -> None:
            for ids in _batches(confirmed):
                connection.execute(self._confirm, {"ids": ids})
            if failures:
                connection.execute(self._refuse if refused else self._fail, failures)

        self._short.run(work)

    def quarantine(self, outputs: Mapping[UUID, str]) -> None:
        """Take outputs out of the relays' rounds; one that was confirmed meanwhile stays confirmed."""
        now = self._moments.said("now")
        rows = [{"id": id_, "why": outputs[id_], **now} for id_ in sorted(outputs)]
        if rows:
            self._short.run(lambda connection: connection.execute(self._quarantine, rows))

    def release(self, outputs: Sequence[UUID]) -> int:
        """Make quarantined outputs due now (they may have been sent before); how many of them were quarantined."""

        def work(connection: Connection) -> int:
            now = self._until(timedelta(0))
            batches: list[dict[str, Any]] = [{"ids": ids, **now} for ids in _batches(outputs)]
            return sum(connection.execute(self._release, batch).rowcount for batch in batches)

        return self._short.run(work)

    def _until(self, after: timedelta) -> dict[str, float | datetime]:
        """When something is due again, be it a message or an effect."""
        return {**self._moments.said("until", after), **self._moments.said("effects_until", after + EFFECTS_LATER)}

    def count(self) -> int:
        """How many outputs wait for a confirm, quarantined ones included."""
        return self._short.run(lambda connection: connection.scalar(self._count)) or 0

    def waiting(self) -> tuple[dict[str, int], int]:
        """How many messages wait for a relay, by the name of their broker, and how many effects for a worker.

        Each is counted up to `MOST_COUNTED`.
        """

        def work(connection: Connection) -> tuple[dict[str, int], int]:
            messages = {name or DEFAULT_BROKER: number for name, number in connection.execute(self._messages)}
            return messages, connection.scalar(self._effects) or 0

        return self._short.run(work)

    def state(self) -> PendingState:
        """How many outputs wait, how many of them are quarantined, how long the oldest of the others waits.

        Each is counted up to `MOST_COUNTED`. Those that were tried most are due last, those that were not tried due first:
        so the oldest is at one of these ends.
        """
        count, quarantined, oldest = self._short.run(
            lambda connection: connection.execute(self._state, {"most": MOST_COUNTED, "some": LOOKED_AT}).one()
        )
        age = (self._clock.now() - oldest).total_seconds() if oldest is not None else 0.0
        return PendingState(count, quarantined, max(0.0, age))


def _batches(ids: Sequence[UUID]) -> list[list[UUID]]:
    ordered = sorted(set(ids))  # one order for all: transactions that touch the same rows wait, but don't deadlock
    return [ordered[start : start + MAX_BATCH] for start in range(0, len(ordered), MAX_BATCH)]


def _one_more(count: ColumnElement[int]) -> ColumnElement[int]:
    """Counts to a limit: an output may be refused for weeks, and the columns are small integers."""
    return case((count < _MOST_COUNTED_TRIES, count + 1), else_=count)


def _state_of(tables: Tables, waiting: ColumnElement[bool]) -> Select[Any]:
    """One row: outputs, quarantined ones, and when the oldest of the others was claimed."""
    pending, inbox = tables.pending, tables.inbox
    ids = select(pending.c.output_id)
    aside = ids.where(pending.c.due_at >= NEVER, pending.c.quarantined_at.is_not(None))
    counts = [
        select(func.count()).select_from(some.limit(bindparam("most")).subquery()).scalar_subquery()
        for some in (ids, aside)
    ]
    keys = select(pending.c.consumer_id, pending.c.message_key).where(pending.c.due_at < NEVER, waiting)
    ends = [
        keys.order_by(order).limit(bindparam("some")).subquery()
        for order in (pending.c.due_at, pending.c.due_at.desc())
    ]
    seen = union_all(*(select(end.c.consumer_id, end.c.message_key) for end in ends)).subquery()
    same = (inbox.c.consumer_id == seen.c.consumer_id) & (inbox.c.message_key == seen.c.message_key)
    oldest = select(func.min(inbox.c.claimed_at)).select_from(seen.join(inbox, same)).scalar_subquery()
    return select(*counts, oldest)
