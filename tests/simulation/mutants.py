"""Seeded faults in protocol, dispatcher, consuming loop, relay and store; a small case that shows each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

from idemp.broker.port import Ack, Delivery, Park, Settlement
from idemp.consuming import Consuming
from idemp.dispatch import Dispatcher, Shipment, publish_all
from idemp.errors import CommitUnknown
from idemp.inbox.memory import InMemoryStore, MemorySession, MemoryUnit
from idemp.inbox.port import Claimed, Mark, PendingOutput, Verdict
from idemp.outcome import Outcome
from idemp.protocol import Protocol
from idemp.relay import Relay, Round
from idemp.testing.simulation import Parts, Simulation
from idemp.testing.simulation.prepared import PreparedSimulation
from idemp.testing.simulation.twophase import TwoPhaseSimulation
from tests.simulation import world_mutants

if TYPE_CHECKING:
    from idemp.broker.port import Receiver
    from idemp.inbox.port import Claim
    from idemp.work import Work

MINUTE = timedelta(minutes=1)
LONG = timedelta(hours=2)


class AckBeforeCommit(Consuming):
    def _live(self, receiver: Receiver, delivery: Delivery) -> float:
        gathered = self._gathered(receiver, delivery)
        for arrival in gathered:
            receiver.settle(arrival.delivery, Ack())
        for _ in self._handled(gathered):
            pass
        return 0.0


class AckBeforeConfirm(Consuming):
    def _live(self, receiver: Receiver, delivery: Delivery) -> float:
        handled = [arrival for group in self._handled(self._gathered(receiver, delivery)) for arrival in group]
        for arrival in handled:
            receiver.settle(arrival.delivery, Ack())
        for arrival in handled:
            if arrival.handling.shipment is not None:
                arrival.handling.confirmed(self._protocol.dispatcher.dispatch(arrival.handling.shipment))
        return 0.0


class AckOfAll(Consuming):
    def _end(self, arrival: Any, ended: Any) -> None:
        super()._end(arrival, ended)
        for other in (each for sent in self._underway.values() for each in sent):
            other.receiver.settle(other.delivery, Ack())
        self._underway.clear()


class AckTwice(Consuming):
    def _end(self, arrival: Any, ended: Any) -> None:
        super()._end(arrival, ended)
        arrival.receiver.settle(arrival.delivery, Ack())


class DispatchBeforeCommit(Protocol):
    def _early(self, work: Work) -> Outcome | Shipment:
        with self.store.begin(work.claims) as unit:
            claimed = self._claim(unit, work.claims)
            if claimed.verdict is Verdict.CLAIMED:
                outputs = self.run_handler(unit, work)
                unit.store_outputs(work.claims[0], outputs, self.consumer.relay_after)
                shipment = self._shipment(work, outputs, lambda refused: Outcome.HANDLED)
                refused = self.dispatcher.dispatch(shipment)
                unit.commit()
        return shipment.outcome(refused) if claimed.verdict is Verdict.CLAIMED else self.not_claimed(work, claimed)


class NoRedispatch(Protocol):
    def _redispatch(self, work: Work, claimed: Claimed) -> Any:
        return Outcome.SKIPPED


class FreshIds(Protocol):
    def _redispatch(self, work: Work, claimed: Claimed) -> Shipment:
        fresh = [
            replace(each, output=replace(each.output, id=UUID(int=each.output.id.int ^ 1))) for each in claimed.outputs
        ]
        return super()._redispatch(work, replace(claimed, outputs=fresh))


class AckInFlight(Protocol):
    def settlement(self, outcome: Outcome) -> Settlement:
        return Ack() if outcome is Outcome.IN_FLIGHT else super().settlement(outcome)


class AckPending(Protocol):
    def settlement(self, outcome: Outcome) -> Settlement:
        return Ack()


class ParkFailures(Protocol):
    def settle_failure(self, delivery: Delivery, error: Exception) -> tuple[Outcome, Settlement]:
        return Outcome.PARKED, Park("parked at once")


class UnknownIsCommitted(Protocol):
    def _early(self, work: Work) -> Outcome | Shipment:
        try:
            return super()._early(work)
        except CommitUnknown:
            return Outcome.HANDLED


class MarkOnPublish(Dispatcher):
    def send(self, *shipments: Shipment) -> int:
        ticket = super().send(*shipments)
        for each in shipments:
            if each.claim is not None:
                self._remember(Mark(each.claim, tuple(output.id for output in each.outputs), each.redelivered))
        self.flush()
        return ticket


class MarkBeforePublish(Dispatcher):
    def send(self, *shipments: Shipment) -> int:
        for each in shipments:
            if each.claim is not None:
                self._store.record([Mark(each.claim, tuple(output.id for output in each.outputs))])
        return super().send(*shipments)


class NoClaim(InMemoryStore):
    def begin(self, claims: Sequence[Claim] = (), *, late: bool = False) -> MemoryUnit:
        class Unit(MemoryUnit):
            def claim(self, claim: Claim) -> Claimed:
                self._store.holders.pop((claim.consumer, claim.id.key), None)
                self._store.content.handlings.pop((claim.consumer, claim.id.key), None)
                return super().claim(claim)

        return Unit(self)


class ClaimSurvivesRollback(InMemoryStore):
    def begin(self, claims: Sequence[Claim] = (), *, late: bool = False) -> MemoryUnit:
        class Unit(MemoryUnit):
            def claim(self, claim: Claim) -> Claimed:
                claimed = super().claim(claim)
                self._store.content.handlings.update(self._handlings)
                return claimed

        return Unit(self)


class WaitingIsDuplicate(InMemoryStore):
    def begin(self, claims: Sequence[Claim] = (), *, late: bool = False) -> MemoryUnit:
        class Unit(MemoryUnit):
            def claim(self, claim: Claim) -> Claimed:
                claimed = super().claim(claim)
                return Claimed(Verdict.DUPLICATE) if claimed.verdict is Verdict.IN_FLIGHT else claimed

        return Unit(self)


class Autocommit(InMemoryStore):
    def begin(self, claims: Sequence[Claim] = (), *, late: bool = False) -> MemoryUnit:
        class Session(MemorySession):
            def __setitem__(self, name: Any, value: Any) -> None:
                self._unit.committed[name] = value

        unit = MemoryUnit(self)
        unit.session = Session(unit)
        return unit


class PurgeOfPending(InMemoryStore):
    def purge(
        self, consumer: str, retention: Mapping[str, timedelta], limit: int, *, others: timedelta | None = None
    ) -> int:
        for _, item in self.content.pending():
            item.pending = False
        return super().purge(consumer, retention, limit, others=others)


class PurgeTooEarly(InMemoryStore):
    def purge(
        self, consumer: str, retention: Mapping[str, timedelta], limit: int, *, others: timedelta | None = None
    ) -> int:
        self.content.handlings.clear()
        return 1


class NoLease(InMemoryStore):
    def take_pending(self, limit: int, lease: timedelta) -> Sequence[PendingOutput]:
        return super().take_pending(limit, timedelta(0))


class RelayMarksFirst(Relay):
    def run_once(self) -> Round:
        taken = self._upkeep.take_pending(self._batch, self._lease)
        self._upkeep.settle_pending([item.output.id for item in taken], {}, timedelta(0))
        publish_all(self._publisher, [item.output for item in taken], 1)
        return Round(len(taken))


class RelayForgetsRefusals(Relay):
    def run_once(self) -> Round:
        taken = self._upkeep.take_pending(self._batch, self._lease)
        publish_all(self._publisher, [item.output for item in taken], 1)
        if taken:
            self._upkeep.settle_pending([item.output.id for item in taken], {}, timedelta(0))
        return Round(len(taken))


@dataclass(frozen=True)
class Mutant:
    """A seeded fault, and the smallest case that can show it."""

    name: str
    simulation: Simulation | PreparedSimulation | TwoPhaseSimulation


def _case(parts: Parts, **options: Any) -> Simulation:
    alone: dict[str, Any] = {"relays": 0, "purges": 0, "jumps": (), "workers": 1, "copies": 1, "crashes": 0}
    return Simulation(parts=parts, **{**alone, **options})


MUTANTS = [
    Mutant("ack before commit", _case(Parts(consuming=AckBeforeCommit))),
    Mutant("ack before the confirm", _case(Parts(consuming=AckBeforeConfirm), crashes=1)),
    Mutant("ack before the confirm, not waiting", _case(Parts(consuming=AckBeforeConfirm), faults=1, window=2)),
    Mutant("ack of all when one is confirmed", _case(Parts(consuming=AckOfAll), messages=2, crashes=1, window=2)),
    Mutant("mark on sending", _case(Parts(dispatcher=MarkOnPublish), faults=1, window=2)),
    Mutant("ack twice", _case(Parts(consuming=AckTwice))),
    Mutant("dispatch before commit", _case(Parts(protocol=DispatchBeforeCommit))),
    Mutant("no redispatch on duplicate", _case(Parts(protocol=NoRedispatch), crashes=1)),
    Mutant("redispatch under fresh ids", _case(Parts(protocol=FreshIds), copies=2)),
    Mutant("ack what is in flight", _case(Parts(protocol=AckInFlight), workers=2, copies=2)),
    Mutant("ack what pends without a relay", _case(Parts(protocol=AckPending), faults=1)),
    Mutant("park at the first failure", _case(Parts(protocol=ParkFailures), faults=1)),
    Mutant("unknown commit taken for done", _case(Parts(protocol=UnknownIsCommitted), faults=1)),
    Mutant("mark on publish", _case(Parts(dispatcher=MarkOnPublish), faults=1)),
    Mutant("mark before publish", _case(Parts(dispatcher=MarkBeforePublish))),
    Mutant("no claim", _case(Parts(store=NoClaim), copies=2)),
    Mutant("claim survives a rollback", _case(Parts(store=ClaimSurvivesRollback), crashes=1)),
    Mutant("held claim taken for a duplicate", _case(Parts(store=WaitingIsDuplicate), workers=2, copies=2)),
    Mutant("effects committed by themselves", _case(Parts(store=Autocommit), crashes=1)),
    Mutant("purge of pending outputs", _case(Parts(store=PurgeOfPending), purges=1, relays=1, faults=1)),
    Mutant("purge within the window", _case(Parts(store=PurgeTooEarly), purges=1, copies=2)),
    Mutant("relay without lease", _case(Parts(store=NoLease), relays=2, jumps=(MINUTE,))),
    Mutant("relay marks before it publishes", _case(Parts(relay=RelayMarksFirst), relays=1, jumps=(MINUTE,))),
    Mutant("relay forgets refusals", _case(Parts(relay=RelayForgetsRefusals), relays=1, jumps=(MINUTE,), faults=1)),
    *(Mutant(name, _case(parts, **options)) for name, (parts, options) in world_mutants.CASES.items()),
]
