"""The real ports, each call of which is a step: an actor stops before it, and the witness sees what it did."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self, TypeVar, cast

from idemp.broker.port import Ack, Park, Refusal, Retry
from idemp.errors import BrokerUnavailable, CommitUnknown, StoreUnavailable, TransactionEnded, TransientStoreError
from idemp.inbox.port import Claimed, Verdict
from idemp.testing.crash_points import Crash
from idemp.testing.simulation.outages import AWAY, LOST, REFUSED, UNANSWERED, asked, lost_answer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
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
COMMIT_SLOW: Final = "it is slow"
RECORD_FAILED: Final = "record, the database is away"
NACKED: Final = "publish, nacked"
CONFIRM_LOST: Final = "publish, the confirm is lost"
PUBLISH_RAISES: Final = "publish, the publisher raises"
PUBLISH_RAISES_AFTER: Final = "publish, the publisher raises, and the broker has it"
LINK_LOST: Final = "settle, the link is lost"
NOT_YET: Final = "confirm, not yet"
HANDLER_FAILS: Final = "handler, it fails"
HANDLER_LOSES: Final = "handler, the connection is lost"
_MINUTE: Final = timedelta(minutes=1)

T = TypeVar("T")


class SteppedUnit:
    """A unit of work of one actor."""

    def __init__(self, inner: Any, world: World, actor: Actor) -> None:
        self.inner = inner
        self._world = world
        self._actor = actor
        self._handled: list[tuple[str, Sequence[Output]]] = []
        self._claimed = False
        self._lost = False
        self._rolled_back = False
        self._is_under_way = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def usable(self) -> bool:
        """Whether its connection is there."""
        return not self._lost and bool(self.inner.usable())

    def lose_connection(self) -> None:
        """The server notices later that its client is gone."""
        self._lost = True

    def _asked(self, call: str, kinds: tuple[str, ...], faults: tuple[str, ...] = ()) -> str:
        try:
            return asked(self._actor, call, kinds, faults=faults)
        except TransientStoreError:
            self._rolled_back = True
            self._end()
            raise
        except StoreUnavailable:
            self.lose_connection()
            raise

    def _answered(self, chosen: str) -> None:
        try:
            lost_answer(chosen)
        except StoreUnavailable:
            self.lose_connection()
            raise

    def claim(self, claim: Claim) -> Claimed:
        """Insert the id; while another holds it, wait, or be told after a while that it is in flight."""
        chosen = self._asked("claim", _IN_TRANSACTION)
        claimed = self._claim(claim, chosen)
        self._answered(chosen)
        return claimed

    def claim_all(self, claims: Sequence[Claim], wait: timedelta) -> Sequence[Claimed]:
        """All in one step, but for the waiting; in the order of the ids, up to one that is held."""
        del wait
        chosen = self._asked("claim", _IN_TRANSACTION)
        answers = dict.fromkeys((claim.id.key for claim in claims), Claimed(Verdict.CLAIMED))
        for claim in sorted(claims, key=lambda claim: claim.id.key):
            answers[claim.id.key] = claimed = self._claim(claim, chosen)
            if claimed.verdict is Verdict.IN_FLIGHT:
                break
        self._answered(chosen)
        return [answers[claim.id.key] for claim in claims]

    def claim_and_store(self, claim: Claim, outputs: Sequence[Output], relay_after: timedelta) -> Claimed:
        """Both in one step."""
        chosen = self._asked("claim and store", _IN_TRANSACTION)
        claimed = self._claim(claim, chosen)
        if claimed.verdict is Verdict.CLAIMED:
            self._handled.append((claim.id.text, outputs))
            self.inner.store_outputs(claim, outputs, relay_after)
        self._answered(chosen)
        return claimed

    def _claim(self, claim: Claim, chosen: str = "claim") -> Claimed:
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
        told = claimed.verdict.value + told
        actor.tell(
            "claim" if chosen.startswith("claim and") else chosen, told, kept=world.clock.time
        )  # dates its claim
        return claimed

    def store_outputs(self, claim: Claim, outputs: Sequence[Output], relay_after: timedelta | None) -> None:
        """Keep outputs with the claim."""
        self.store_all([(claim, outputs)], relay_after)

    def store_all(self, handled: Sequence[tuple[Claim, Sequence[Output]]], relay_after: timedelta | None) -> None:
        """Keep outputs with their claims."""
        self._asked("store", (REFUSED, LOST, AWAY))
        self._handled += [(claim.id.text, outputs) for claim, outputs in handled]
        self.inner.store_all(handled, relay_after)
        stored = sum(len(outputs) for _, outputs in handled)
        self._actor.tell("store", f"{stored} outputs", kept=self._world.clock.time)  # and when a relay may come

    def commit(self) -> None:
        """Commit, or not know whether it is committed."""
        if self._rolled_back:
            raise TransactionEnded("The simulation rolled this transaction back.", fix="Begin another.")
        if self._lost:
            raise CommitUnknown("The simulation cut the connection.")
        try:
            chosen = self._asked("commit", (REFUSED, AWAY, COMMIT_SLOW), (COMMIT_LOST, COMMIT_FAILED))
        except StoreUnavailable as error:
            raise CommitUnknown("The simulation took the database away.") from error
        if chosen.endswith(COMMIT_SLOW):
            self._is_under_way = True
            self._world.decides_later(self._actor, self._arrives, self._end, [message for message, _ in self._handled])
            self._actor.tell(chosen)
        elif chosen == COMMIT_FAILED:
            self._actor.tell(chosen, "rolled back")
        else:
            self._arrives()
            self._actor.tell(chosen, "committed")
        if chosen != "commit":
            raise CommitUnknown("The simulation took the answer of COMMIT away.")

    def _arrives(self) -> None:
        self.inner.commit()
        self._world.ends += 1
        for message, outputs in self._handled:
            self._world.witness.commits(message, outputs)

    def _end(self) -> None:
        self._world.ends += 1
        self.inner.__exit__(None, None, None)

    def __enter__(self) -> Self:
        self.inner.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        def end() -> None:
            self._world.ends += 1
            self.inner.__exit__(kind, error, trace)

        if self._is_under_way:
            return
        held = self._world.inbox.held(self._world, self._actor)
        if self._actor.dead and self._claimed:  # the server does not know yet that its client is gone
            self._world.later("database", f"rolls back {self._actor.name}", end, held)
        elif self._lost and held != ():
            self._world.later("database", self._world.numbered(f"rolls back what {self._actor.name} lost"), end, held)
        else:
            end()


_IN_TRANSACTION: Final = (REFUSED, LOST, UNANSWERED, AWAY)


class SteppedStore:
    """The store as one actor has it: both halves in one.

    Attributes:
        relay_seen: a relay was alive when the delivery in hand asked.
        unit: the unit of work that was begun last.
        unrecorded: outputs that were confirmed to this actor, and are not recorded yet.
    """

    unit_kind: ClassVar[type[SteppedUnit]] = SteppedUnit

    def __init__(self, inner: Any, world: World, actor: Actor) -> None:
        self.inner = inner
        self._upkeep = inner.upkeep
        self._world = world
        self._actor = actor
        self.relay_seen = False
        self.unit: SteppedUnit | None = None
        self.unrecorded: set[UUID] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def upkeep(self) -> SteppedStore:
        """The other half."""
        return self

    def begin(self, claims: Sequence[Claim] = (), *, late: bool = False) -> SteppedUnit:
        """As the port says."""
        asked(self._actor, "begin", (LOST, AWAY))
        self.unit = unit = self.unit_kind(self.inner.begin(claims, late=late), self._world, self._actor)
        self._actor.tell("begin")
        self._world.units[id(unit.inner)] = self._actor.name
        return unit

    def record(self, marks: Sequence[Mark]) -> None:
        """As the port says, unless the database is away."""
        chosen = asked(self._actor, "record", (REFUSED, UNANSWERED, AWAY), faults=(RECORD_FAILED,))
        if chosen == RECORD_FAILED:
            self._actor.tell(RECORD_FAILED)
            raise StoreUnavailable("The simulation says: away.")
        self._world.witness.marks(output for mark in marks for output in mark.confirmed)
        self.inner.record(list(marks))
        self.unrecorded -= {output for mark in marks for output in mark.confirmed}
        self._actor.tell(chosen, f"{sum(len(mark.confirmed) for mark in marks)} confirmed")
        lost_answer(chosen)

    def verify(self) -> None:
        """As the port says, unless the database is away."""
        if self._actor.away:
            asked(self._actor, "verify")
        self.inner.verify()

    def wait_for_pending(self, timeout: float) -> bool:
        """Not even for a moment."""
        del timeout
        return False

    def _statement(
        self,
        call: str,
        run: Callable[[], T],
        told: Callable[[T], str],
        *,
        ready: Callable[[], bool] | None = None,
        idle: bool = False,
    ) -> T:
        chosen = asked(self._actor, call, ready=ready, idle=idle)
        answer = run()
        self._actor.tell(chosen, told(answer))
        lost_answer(chosen)
        return answer

    def note_start(self, consumer: str, key: UUID) -> int:
        """As the port says."""
        return self._statement(
            "note start", lambda: int(self.inner.note_start(consumer, key)), lambda starts: f"{starts} before"
        )

    def note_end(self, consumer: str, key: UUID, left: int = 0) -> None:
        """As the port says."""
        self._statement("note end", lambda: self.inner.note_end(consumer, key, left), lambda _: f"{left} left")

    def relay_alive(self) -> bool:
        """As the port says."""
        alive = self._statement(
            "relay alive", lambda: bool(self.inner.relay_alive()), lambda alive: "yes" if alive else "no"
        )
        if alive:
            self._world.witness.takes_a_relay_for_alive(self._world.clock.now())
        self.relay_seen |= alive
        return alive

    def late_before(self, consumer: str, retention: timedelta, claims: Sequence[Claim] = ()) -> datetime:
        """As the port says."""
        return self._statement(
            "late before",
            lambda: cast("datetime", self.inner.late_before(consumer, retention, claims)),
            lambda moment: moment.isoformat(" ", "seconds"),
        )

    # Upkeep

    def beat(self, worker: str, *, relay: bool, consumers: Sequence[str]) -> None:
        """As the port says."""

        def run() -> None:
            self._upkeep.beat(worker, relay=relay, consumers=consumers)
            self._world.witness.beats(self._world.clock.now())

        self._statement("beat", run, lambda _: "", ready=self._world.something_pends, idle=True)

    def take_pending(self, limit: int, lease: timedelta) -> Sequence[PendingOutput]:
        """As the port says; while nothing pends at all, nobody asks."""

        def run() -> Sequence[PendingOutput]:
            taken: Sequence[PendingOutput] = self._upkeep.take_pending(limit, lease)
            now = self._world.clock.now()
            self._world.witness.leases([item.output.id for item in taken], now, now + lease)
            return taken

        return self._statement("take pending", run, self._told, ready=self._world.something_pends)

    def _told(self, taken: Sequence[PendingOutput]) -> str:
        each = (f"{self._world.told(item.output)} (attempt {item.attempts})" for item in taken)
        return ", ".join(each) or "nothing due"

    def settle_pending(
        self, confirmed: Sequence[UUID], failed: Mapping[UUID, str], retry_in: timedelta, *, refused: bool = False
    ) -> None:
        """As the port says. A postponement is rounded up to minutes, so that its jitter makes no difference."""

        def run() -> None:
            self._world.witness.marks(confirmed)
            self._world.witness.ends_leases([*confirmed, *failed])
            rounded = -(-retry_in // _MINUTE) * _MINUTE
            self._upkeep.settle_pending(confirmed, failed, rounded, refused=refused)

        self._statement("settle pending", run, lambda _: f"{len(confirmed)} confirmed, {len(failed)} postponed")

    def quarantine(self, outputs: Mapping[UUID, str]) -> None:
        """As the port says."""

        def run() -> None:
            self._world.witness.ends_leases(outputs)
            self._upkeep.quarantine(outputs)

        self._statement("quarantine", run, lambda _: f"{len(outputs)} outputs")

    def purge(
        self, consumer: str, retention: Mapping[str, timedelta], limit: int, *, others: timedelta | None = None
    ) -> int:
        """As the port says; while there are no claims at all, nobody asks."""
        return self._statement(
            "purge",
            lambda: int(self._upkeep.purge(consumer, retention, limit, others=others)),
            lambda gone: f"{gone} claims",
            ready=self._world.something_is_stored,
        )


class SteppedPublisher:
    """A publisher of one actor; each output is a step of its own."""

    def __init__(self, inner: Any, world: World, actor: Actor, store: SteppedStore | None = None) -> None:
        self._inner = inner
        self._world = world
        self._actor = actor
        self._store = store

    def publish(self, outputs: Sequence[Output], timeout: float) -> list[Refusal | None]:
        """As the port says, one after the other."""
        return [self._one(output, timeout) for output in outputs]

    def _one(self, output: Output, timeout: float, *, told_at_once: bool = True) -> Refusal | None:
        witness, told = self._world.witness, self._world.told(output)
        chosen = self._actor.point("publish", faults=self._world.publish_faults)
        if chosen == PUBLISH_RAISES:
            self._actor.tell(chosen, told)
            raise ConnectionError("The simulation says: no connection to the broker.")
        if chosen == NACKED:
            self._actor.tell(chosen, told)
            return Refusal("nacked", "the simulation says so")
        (refusal,) = self._inner.publish([output], timeout)
        witness.sends(output)
        if chosen == CONFIRM_LOST:
            self._actor.tell(chosen, told)
            return Refusal("timeout", "the simulation took the confirm away")
        if chosen == PUBLISH_RAISES_AFTER:
            self._actor.tell(chosen, told)
            raise ConnectionError("The simulation cut the connection to the broker.")
        if refusal is None and told_at_once:
            self._confirms(output)
        answer = f" {'confirmed' if refusal is None else refusal.kind}" if told_at_once else ""
        self._actor.tell(chosen, f"{told}{answer}")
        return refusal  # type: ignore[no-any-return]

    def _confirms(self, output: Output) -> None:
        self._world.witness.confirms(output)
        if self._store is not None:
            self._store.unrecorded.add(output.id)

    def keep_alive(self) -> None:
        """As the port says."""

    def close(self) -> None:
        """As the port says."""


class SteppedSender(SteppedPublisher):
    """A publisher of one actor that need not be waited for: the confirms of each sending are a step of their own."""

    def __init__(self, inner: Any, world: World, actor: Actor, store: SteppedStore) -> None:
        super().__init__(inner, world, actor, store)
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
        others = self._actor.name not in self._world.stopping and self._world.something_waits()
        more = others and len(self._open) < self._world.options.window
        if self._actor.point("confirm", always=(NOT_YET,) if more else ()) == NOT_YET:
            self._actor.tell(NOT_YET)
            return []
        ticket = next(iter(self._open))
        outputs, answers = self._open.pop(ticket)
        for output, refusal in zip(outputs, answers, strict=True):
            if refusal is None:
                self._confirms(output)
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

    @property
    def holds(self) -> bool:
        """Whether a delivery is not settled."""
        return bool(self._held)

    def receive(self, timeout: float) -> Delivery | None:
        """The next delivery; waits without end, unless there is something else to wait for."""
        if not self._actor.stained and not self._held:
            self._actor.memory = 0  # after a delivery without faults, whose marks are recorded, a process is as it was
        ready = self._ready if timeout > 0 and not self._held else None
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

    def _ready(self) -> bool:
        return self._world.something_waits() or self._actor.name in self._world.stopping

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
        receiver = SteppedReceiver(inner, self._world, self._actor, self._store)
        self._world.receivers[self._actor.name] = receiver
        return receiver

    def publisher(self) -> SteppedPublisher:
        """A publisher of its own."""
        kind = SteppedSender if self._world.options.window > 1 else SteppedPublisher
        return kind(self._world.broker.publisher(), self._world, self._actor, self._store)


def _told(settlement: Settlement) -> str:
    if isinstance(settlement, Retry):
        return f"again in {settlement.delay.total_seconds():g} s"
    return f"parked as {settlement.reason}" if isinstance(settlement, Park) else type(settlement).__name__.lower()
