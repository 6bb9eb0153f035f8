"""What came of a storm, read from the database and the output queue; no counter of the code under test is asked."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from idemp.broker.copies import dead_queue

if TYPE_CHECKING:
    from idemp.demo.place import Place
    from idemp.demo.plan import Plan
    from idemp.messages import Message

EVENTS: Final = ("orders.OrderPlaced", "stock.StockReserved", "orders.OrderConfirmed")
_EVERYTHING: Final = 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The numbers of a storm.

    Attributes:
        fed: messages sent by the demo.
        duplicates: how many of them repeat an order.
        deliveries: handler runs that began, and deliveries that were skipped as duplicates.
        redeliveries: deliveries beyond the first of each message, duplicates that were fed included.
        begun: handler runs that began.
        rolled_back: handler runs that a kill, or a conflict in the database, rolled back.
        executions: handler runs that committed, by what they wrote themselves.
        skipped: deliveries skipped as duplicates, as far as recorded before a kill.
        outputs_stored: outputs in the inbox.
        outputs_redispatched: copies in the audit queue that say that they may be one.
        effects: orders, reservations, confirmations, and pieces taken from the stock.
        kills: worker processes killed.
        kills_unsettled: those that held an unsettled delivery, looked at while the process stood still.
        lost: effects that are missing, or events that were never seen.
        doubled: effects that happened more than once, pieces of stock included.
        two_ids: events that were seen under more than one id.
        altered: events that were seen with other bytes under the same id.
        never_seen: events that did not reach the audit queue.
        pending: outputs still without a confirm.
        unsettled: messages left in the queues.
        dead: messages in the dead-letter queues.
        seconds: how long it took, from the first worker's start until all was at rest.
        at_rest: whether it came to rest at all.
        folder: where files were kept, `None` if they were removed.
    """

    fed: int
    duplicates: int
    deliveries: int
    redeliveries: int
    begun: int
    rolled_back: int
    executions: int
    skipped: int
    outputs_stored: int
    outputs_redispatched: int
    effects: dict[str, int]
    kills: int
    kills_unsettled: int
    lost: int
    doubled: int
    two_ids: int
    altered: int
    never_seen: int
    pending: int
    unsettled: int
    dead: int
    seconds: float
    at_rest: bool
    folder: str | None = None

    @property
    def broken(self) -> dict[str, int]:
        """The promises that broke, none of them if all is well."""
        names = ("lost", "doubled", "two_ids", "altered", "never_seen", "pending", "unsettled", "dead")
        found = {name: int(getattr(self, name)) for name in names if getattr(self, name)}
        return found if self.at_rest else {**found, "not at rest": 1}


def prove(plan: Plan, place: Place, *, kills: int, kills_unsettled: int, seconds: float, at_rest: bool) -> Proof:
    """Read everything; the workers have ended."""
    numbers = range(1, plan.orders + 1)
    placed = place.counts("SELECT order_id, count(*) FROM {p}orders GROUP BY order_id")
    confirmed = place.counts("SELECT order_id, sum(confirmations) FROM {p}orders GROUP BY order_id")
    reserved = place.counts("SELECT order_id, count(*) FROM {p}reservations GROUP BY order_id")
    taken = place.in_stock - place.scalar("SELECT sum(quantity) FROM {p}stock")
    effects = [placed, reserved, confirmed]
    events = _Events(place.broker.browse(place.audit, _EVERYTHING))
    never_seen = sum((kind, number) not in events.ids for kind in EVENTS for number in numbers)
    begun = sum(len(file.read_text().splitlines()) for file in place.notes.iterdir())
    executions = sum(effect.total() for effect in effects)
    skipped = place.scalar("SELECT sum(redelivered) FROM {i}history")
    first = place.scalar("SELECT count(*) FROM {i}inbox")
    return Proof(
        fed=plan.messages,
        duplicates=plan.duplicates,
        deliveries=begun + skipped,
        redeliveries=begun + skipped - first,
        begun=begun,
        rolled_back=begun - executions,
        executions=executions,
        skipped=skipped,
        outputs_stored=place.scalar("SELECT count(*) FROM {i}output"),
        outputs_redispatched=events.redispatched,
        effects={
            "orders": placed.total(),
            "reservations": reserved.total(),
            "confirmations": confirmed.total(),
            "pieces": taken,
        },
        kills=kills,
        kills_unsettled=kills_unsettled,
        lost=sum(effect[number] == 0 for effect in effects for number in numbers) + max(0, plan.pieces - taken),
        doubled=sum(max(0, count - 1) for effect in effects for count in effect.values()) + max(0, taken - plan.pieces),
        two_ids=sum(len(ids) > 1 for ids in events.ids.values()),
        altered=sum(len(bodies) > 1 for bodies in events.bodies.values()),
        never_seen=never_seen,
        pending=place.scalar("SELECT count(*) FROM {i}pending"),
        unsettled=place.witness.remaining([place.orders, place.stock]),
        dead=sum(place.broker.depth(dead_queue(queue)) for queue in (place.orders, place.stock)),
        seconds=seconds,
        at_rest=at_rest,
        folder=str(place.folder) if place.keep else None,
    )


class _Events:
    """What the audit queue holds: for each event of an order the ids, and for each id the bodies."""

    def __init__(self, messages: list[Message]) -> None:
        self.ids: dict[tuple[str | None, int], set[str | None]] = {}
        self.bodies: dict[str | None, set[bytes]] = {}
        self.redispatched = 0
        for message in messages:
            body: dict[str, Any] = json.loads(message.body)
            self.ids.setdefault((message.type, int(body["order_id"])), set()).add(message.message_id)
            self.bodies.setdefault(message.message_id, set()).add(message.body)
            self.redispatched += message.redispatched
