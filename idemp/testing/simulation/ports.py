"""The real ports, each call of which is a step: an actor stops before it, and the witness sees what it did."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

from idemp.broker.port import Ack, Park, Refusal, Retry
from idemp.errors import BrokerUnavailable, CommitUnknown, StoreUnavailable
from idemp.inbox.port import Claimed, Verdict
from idemp.testing.crash_points import Crash

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime
    from types import TracebackType
    from uuid import UUID

    from idemp.broker.port import Delivery, Settlement, Topology
    from idemp.inbox.port import Claim, Mark, PendingOutput
    from idemp.messages import Output
    from idemp.testing.simulation.stage import Actor
    from idemp.testing.simulation.world import World

GIVES_UP: Final = "claim, waited long enough"
COMMIT_LOST: Final = "commit, its answer is lost"
COMMIT_FAILED: Final = "commit, it fails and its answer is lost"
RECORD_FAILED: Final = "record, the database is away"
NACKED: Final = "publish, nacked"
CONFIRM_LOST: Final = "publish, the confirm is lost"
LINK_LOST: Final = "settle, the link is lost"
NOT_YET: Final = "confirm, not yet"
HANDLER_FAILS: Final = "handler, it fails"
_MINUTE: Final = timedelta(minutes=1)


class SteppedUnit:
    """A unit of work of one actor."""

    def __init__(self, inner: Any, world: World, actor: Actor) -> None:
        self.inner = inner
        self._world = world
        self._actor = actor
        self._handled: list[tuple[str, Sequence[Output]]] = []
        self._claimed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def claim(self, claim: Claim) -> Claimed:
        """Insert the id; while another holds it, wait, or be told after a while that it is in flight."""
        self._actor.point("claim")
        return self._claim(claim)

    def claim_all(self, claims: Sequence[Claim], wait: timedelta) -> Sequence[Claimed]:
        """All in one step, but for the waiting; in the order of the ids, up to one that is held."""
        del wait
        self._actor.point("claim")
        answers = dict.fromkeys((claim.id.key for claim in claims), Claimed(Verdict.CLAIMED))
        for claim in sorted(claims, key=lambda claim: claim.id.key):
            answers[claim.id.key] = claimed = self._claim(claim)
            if claimed.verdict is Verdict.IN_FLIGHT:
                break
        return [answers[claim.id.key] for claim in claims]

    def claim_and_store(self, claim: Claim, outputs: Sequence[Output], relay_after: timedelta) -> Claimed:
        """Both in one step."""
        self._actor.point("claim and store")
        claimed = self._claim(claim)
        if claimed.verdict is Verdict.CLAIMED:
            self._handled.append((claim.id.text, outputs))
            self.inner.store_outputs(claim, outputs, relay_after)
        return claimed

    def _claim(self, claim: Claim) -> Claimed:
        world, actor = self._world, self._actor
        self._claimed = True
        while True:
            tried = world.ends
            claimed: Claimed = self.inner.claim(claim)
            if claimed.verdict is not Verdict.IN_FLIGHT:
                break
            actor.tell("claim", "waits for another")
            if actor.point("claim", ready=lambda tried=tried: world.ends > tried, always=(GIVES_UP,)) == GIVES_UP:  # type: ignore[misc]
                break
        pending = sum(item.pending for item in claimed.outputs)
        told = f", {pending} of {len(claimed.outputs)} outputs pending" if claimed.outputs else ""
        actor.tell("claim", claimed.verdict.value + told, kept=world.clock.time)  # the unit dates its claim
        return claimed

    def store_outputs(self, claim: Claim, outputs: Sequence[Output], relay_after: timedelta | None) -> None:
        """Keep outputs with the claim."""
        self.store_all([(claim, outputs)], relay_after)

    def store_all(self, handled: Sequence[tuple[Claim, Sequence[Output]]], relay_after: timedelta | None) -> None:
        """Keep outputs with their claims."""
        self._actor.point("store")
        self._handled += [(claim.id.text, outputs) for claim, outputs in handled]
        self.inner.store_all(handled, relay_after)
        stored = sum(len(outputs) for _, outputs in handled)
        self._actor.tell("store", f"{stored} outputs", kept=self._world.clock.time)  # and when a relay may come

    def commit(self) -> None:
        """Commit, or not know whether it is committed."""
        chosen = self._actor.point("commit", faults=(COMMIT_LOST, COMMIT_FAILED))
        if chosen != COMMIT_FAILED:
            self.inner.commit()
            self._world.ends += 1
            for message, outputs in self._handled:
                self._world.witness.commits(message, outputs)
        self._actor.tell(chosen, "committed" if chosen != COMMIT_FAILED else "rolled back")
        if chosen != "commit":
            raise CommitUnknown("The simulation took the answer of COMMIT away.")

    def __enter__(self) -> Self:
        self.inner.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        def end() -> None:
            self._world.ends += 1
            self.inner.__exit__(kind, error, trace)

        if self._actor.dead and self._claimed:  # the server does not know yet that its client is gone
            held = self._world.inbox.held(self._world, self._actor)
            self._world.later("database", f"rolls back {self._actor.name}", end, held)
        else:
            end()


class SteppedStore:
    """The store as one actor has it: both halves in one."""

    unit_kind: ClassVar[type[SteppedUnit]] = SteppedUnit

    def __init__(self, inner: Any, world: World, actor: Actor) -> None:
        self.inner = inner
        self._upkeep = inner.upkeep
        self._world = world
        self._actor = actor
        self.relay_seen = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def upkeep(self) -> SteppedStore:
        """The other half."""
        return self

    def begin(self, claims: Sequence[Claim] = (), *, late: bool = False) -> SteppedUnit:
        """As the port says."""
        self._actor.point("begin")
        unit = self.unit_kind(self.inner.begin(claims, late=late), self._world, self._actor)
        self._actor.tell("begin")
        self._world.units[id(unit.inner)] = self._actor.name
        return unit

    def record(self, marks: Sequence[Mark]) -> None:
        """As the port says, unless the database is away."""
        if self._actor.point("record", faults=(RECORD_FAILED,)) == RECORD_FAILED:
            self._actor.tell(RECORD_FAILED)
            raise StoreUnavailable("The simulation says: away.")
        self._world.witness.marks(output for mark in marks for output in mark.confirmed)
        self.inner.record(list(marks))
        self._actor.tell("record", f"{sum(len(mark.confirmed) for mark in marks)} confirmed")

    def note_start(self, consumer: str, key: UUID) -> int:
        """As the port says."""
        self._actor.point("note start")
        starts: int = self.inner.note_start(consumer, key)
        self._actor.tell("note start", f"{starts} before")
        return starts

    def note_end(self, consumer: str, key: UUID, left: int = 0) -> None:
        """As the port says."""
        self._actor.point("note end")
        self.inner.note_end(consumer, key, left)
        self._actor.tell("note end", f"{left} left")

    def relay_alive(self) -> bool:
        """As the port says."""
        self._actor.point("relay alive")
        alive: bool = self.inner.relay_alive()
        self.relay_seen |= alive
        self._actor.tell("relay alive", "yes" if alive else "no")
        return alive

    def late_before(self, consumer: str, retention: timedelta, claims: Sequence[Claim] = ()) -> datetime:
        """As the port says."""
        self._actor.point("late before")
        moment: datetime = self.inner.late_before(consumer, retention, claims)
        self._actor.tell("late before", moment.isoformat(" ", "seconds"))
        return moment

    # Upkeep

    def beat(self, worker: str, *, relay: bool, consumers: Sequence[str]) -> None:
        """As the port says."""
        self._actor.point("beat", ready=self._world.something_pends, idle=True)
        self._upkeep.beat(worker, relay=relay, consumers=consumers)
        self._actor.tell("beat")

    def take_pending(self, limit: int, lease: timedelta) -> Sequence[PendingOutput]:
        """As the port says; while nothing pends at all, nobody asks."""
        self._actor.point("take pending", ready=self._world.something_pends)
        taken: Sequence[PendingOutput] = self._upkeep.take_pending(limit, lease)
        now = self._world.clock.now()
        self._world.witness.leases([item.output.id for item in taken], now, now + lease)
        self._actor.tell("take pending", self._told(taken))
        return taken

    def _told(self, taken: Sequence[PendingOutput]) -> str:
        each = (f"{self._world.told(item.output)} (attempt {item.attempts})" for item in taken)
        return ", ".join(each) or "nothing due"

    def settle_pending(
        self, confirmed: Sequence[UUID], failed: Mapping[UUID, str], retry_in: timedelta, *, refused: bool = False
    ) -> None:
        """As the port says. A postponement is rounded up to minutes, so that its jitter makes no difference."""
        self._actor.point("settle pending")
        self._world.witness.marks(confirmed)
        self._world.witness.ends_leases([*confirmed, *failed])
        rounded = -(-retry_in // _MINUTE) * _MINUTE
        self._upkeep.settle_pending(confirmed, failed, rounded, refused=refused)
        self._actor.tell("settle pending", f"{len(confirmed)} confirmed, {len(failed)} postponed")

    def quarantine(self, outputs: Mapping[UUID, str]) -> None:
        """As the port says."""
        self._actor.point("quarantine")
        self._world.witness.ends_leases(outputs)
        self._upkeep.quarantine(outputs)
        self._actor.tell("quarantine", f"{len(outputs)} outputs")

    def purge(
        self, consumer: str, retention: Mapping[str, timedelta], limit: int, *, others: timedelta | None = None
    ) -> int:
        """As the port says; while there are no claims at all, nobody asks."""
        self._actor.point("purge", ready=self._world.something_is_stored)
        gone: int = self._upkeep.purge(consumer, retention, limit, others=others)
        self._actor.tell("purge", f"{gone} claims")
        return gone


class SteppedPublisher:
    """A publisher of one actor; each output is a step of its own."""

    def __init__(self, inner: Any, world: World, actor: Actor) -> None:
        self._inner = inner
        self._world = world
        self._actor = actor

    def publish(self, outputs: Sequence[Output], timeout: float) -> list[Refusal | None]:
        """As the port says, one after the other."""
        return [self._one(output, timeout) for output in outputs]

    def _one(self, output: Output, timeout: float, *, told_at_once: bool = True) -> Refusal | None:
        witness, told = self._world.witness, self._world.told(output)
        chosen = self._actor.point("publish", faults=(NACKED, CONFIRM_LOST))
        if chosen == NACKED:
            self._actor.tell(chosen, told)
            return Refusal("nacked", "the simulation says so")
        (refusal,) = self._inner.publish([output], timeout)
        witness.sends(output)
        if chosen == CONFIRM_LOST:
            self._actor.tell(chosen, told)
            return Refusal("timeout", "the simulation took the confirm away")
        if refusal is None and told_at_once:
            witness.confirms(output)
        answer = f" {'confirmed' if refusal is None else refusal.kind}" if told_at_once else ""
        self._actor.tell(chosen, f"{told}{answer}")
        return refusal  # type: ignore[no-any-return]

    def keep_alive(self) -> None:
        """As the port says."""

    def close(self) -> None:
        """As the port says."""


class SteppedSender(SteppedPublisher):
    """A publisher of one actor that need not be waited for: the confirms of each sending are a step of their own."""

    def __init__(self, inner: Any, world: World, actor: Actor) -> None:
        super().__init__(inner, world, actor)
        self._sent = 0
        self._open: dict[int, tuple[Sequence[Output], list[Refusal | None]]] = {}

    def send(self, outputs: Sequence[Output], timeout: float) -> int:
        """As the port says, one after the other."""
        self._sent += 1
        self._open[self._sent] = (outputs, [self._one(output, timeout, told_at_once=False) for output in outputs])
        return self._sent

    def answered(self, seconds: float) -> list[tuple[int, list[Refusal | None]]]:
        """The oldest sending, or nothing while there is another message to receive."""
        del seconds
        if not self._open:
            return []
        more = len(self._open) < self._world.options.window and self._world.something_waits()
        if self._actor.point("confirm", always=(NOT_YET,) if more else ()) == NOT_YET:
            self._actor.tell(NOT_YET)
            return []
        ticket = next(iter(self._open))
        outputs, answers = self._open.pop(ticket)
        for output, refusal in zip(outputs, answers, strict=True):
            if refusal is None:
                self._world.witness.confirms(output)
        told = ", ".join(
            f"{self._world.told(output)} {'confirmed' if refusal is None else refusal.kind}"
            for output, refusal in zip(outputs, answers, strict=True)
        )
        self._actor.tell("confirm", told)
        return [(ticket, answers)]


class SteppedReceiver:
    """A receiver of one actor; what it held when it died comes back when the broker notices."""

    def __init__(self, inner: Any, world: World, actor: Actor, store: SteppedStore) -> None:
        self._inner = inner
        self._world = world
        self._actor = actor
        self._store = store
        self._held: dict[object, int] = {}

    def receive(self, timeout: float) -> Delivery | None:
        """The next delivery; waits without end, unless there is something else to wait for."""
        if not self._actor.stained and not self._held:
            self._actor.memory = 0  # after a delivery without faults, whose marks are recorded, a process is as it was
        ready = self._world.something_waits if timeout > 0 and not self._held else None
        self._actor.point("receive", ready=ready, idle=not self._held)
        delivery: Delivery | None = self._inner.receive(0)
        if delivery is None:
            self._actor.tell("receive", "nothing")
        if delivery is not None:
            self._held[delivery.tag] = number = delivery.message.headers.get("copy", 1)
            self._store.relay_seen = False
            again = ", redelivered" if delivery.redelivered else ""
            deferred = delivery.message.headers.get("idemp-deferred", 0)
            self._actor.tell(
                "receive",
                f"{delivery.message.message_id}, copy {number}{again}"
                + (f", attempt {delivery.attempt}" if delivery.attempt > 1 else "")
                + (f", deferred {deferred} times" if deferred else ""),
            )
        return delivery

    def settle(self, delivery: Delivery, settlement: Settlement) -> None:
        """End a delivery, or lose the link before."""
        chosen = self._actor.point("settle", faults=(LINK_LOST,))
        if chosen == LINK_LOST:
            self._actor.tell(chosen)
            raise BrokerUnavailable("The simulation cut the link.")
        message = str(delivery.message.message_id)
        if self._held.pop(delivery.tag, None) is None:
            self._world.witness.settles_again(message)
        if isinstance(settlement, Ack):
            self._world.witness.acks(message, relay_seen=self._store.relay_seen)
        self._inner.settle(delivery, settlement)
        self._actor.tell("settle", _told(settlement))

    def keep_alive(self) -> None:
        """As the port says."""

    def cancel(self) -> None:
        """As the port says."""

    def close(self) -> None:
        """Give back what is held: at once, or when the broker notices that its client is gone."""
        if self._actor.dead and self._held:
            numbers = tuple(self._held.values())
            self._world.later("broker", f"takes back from {self._actor.name}", self._inner.close, numbers)
        else:
            self._inner.close()
        self._held = {}


class SteppedBroker:
    """The broker as one worker has it."""

    def __init__(self, world: World, actor: Actor, store: SteppedStore) -> None:
        self._world = world
        self._actor = actor
        self._store = store

    def declare(self, topology: Topology) -> None:
        """All is declared."""

    def receiver(self, queues: Sequence[str], *, prefetch: int) -> SteppedReceiver:
        """A receiver of its own."""
        if self._actor.dead:
            raise Crash("receiver")
        inner = self._world.broker.receiver(queues, prefetch=prefetch)
        return SteppedReceiver(inner, self._world, self._actor, self._store)

    def publisher(self) -> SteppedPublisher:
        """A publisher of its own."""
        kind = SteppedSender if self._world.options.window > 1 else SteppedPublisher
        return kind(self._world.broker.publisher(), self._world, self._actor)


def _told(settlement: Settlement) -> str:
    if isinstance(settlement, Retry):
        return f"again in {settlement.delay.total_seconds():g} s"
    return f"parked as {settlement.reason}" if isinstance(settlement, Park) else type(settlement).__name__.lower()
