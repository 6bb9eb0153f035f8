"""Seeded faults that show when the database fails, a publisher raises, a worker is told to stop, or a relay stays dead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from idemp.broker.port import Ack, Refusal, Release
from idemp.classification import RULES, Rule
from idemp.consuming import Consuming
from idemp.dispatch import Dispatcher
from idemp.errors import StoreError
from idemp.inbox.memory import InMemoryStore
from idemp.inbox.port import Claimed, PendingOutput, Verdict
from idemp.protocol import Protocol
from idemp.relay import Relay
from idemp.retention import Cleaner
from idemp.testing.simulation import Parts

if TYPE_CHECKING:
    import threading
    from uuid import UUID

    from idemp.broker.port import Delivery, Receiver
    from idemp.inbox.port import Claim, UnitOfWork
    from idemp.messages import Output

MINUTE: Final = timedelta(minutes=1)
LONG: Final = timedelta(hours=2)


# The database fails ---------------------------------------------------------------------------------------------------


class FailedClaimIsDuplicate(Protocol):
    def _claim(self, unit: UnitOfWork, claims: Sequence[Claim]) -> Claimed:
        try:
            return super()._claim(unit, claims)
        except StoreError:
            return Claimed(Verdict.DUPLICATE, of=claims[0])


class UnknownRelayIsAlive(Protocol):
    def _relay_alive(self) -> bool:
        try:
            return self.store.relay_alive()
        except StoreError:
            return True


class OutagesCount(Protocol):
    def rule_for(self, error: Exception) -> Rule:
        return RULES[-1]


class StartsWithoutAnswerCount(Protocol):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        class Nothing(dict[tuple[str, "UUID"], int]):
            def __setitem__(self, key: tuple[str, UUID], value: int) -> None:
                del key, value

        super().__init__(*arguments, **options)
        self.suspects._unanswered = Nothing()


class FlushRaises(Dispatcher):
    def flush(self) -> None:
        self._store.record(self._marks)
        self._marks.clear()
        self._confirmed.clear()


class RelayEndsInAnOutage(Relay):
    def run(self, stop: threading.Event, interval: timedelta = timedelta(seconds=1)) -> None:
        while not stop.is_set():
            self.run_once()


class CleanerEndsInAnOutage(Cleaner):
    def run(self, stop: threading.Event | None = None) -> int:
        return self._upkeep.purge(self._consumer, self._retention, self._batch, others=self._longest)


# A publisher raises ---------------------------------------------------------------------------------------------------


class PublisherErrorsEscape(Dispatcher):
    def send(self, *shipments: Any) -> int:
        for shipment in shipments:
            self.publisher.publish(shipment.outputs, shipment.timeout.total_seconds())
        return super().send(*shipments)


class PublisherErrorIsConfirm(Dispatcher):
    def __init__(self, publisher: Any, *arguments: Any, **options: Any) -> None:
        class Believing:
            def publish(self, outputs: Sequence[Output], timeout: float) -> list[Refusal | None]:
                try:
                    answers: list[Refusal | None] = publisher.publish(outputs, timeout)
                except ConnectionError:
                    return [None] * len(outputs)
                return answers

        super().__init__(Believing(), *arguments, **options)  # type: ignore[arg-type]


# A worker is told to stop ---------------------------------------------------------------------------------------------


class AckInsteadOfRelease(Consuming):
    def _live(self, receiver: Receiver, delivery: Delivery) -> float:
        class Acking:
            def __getattr__(self, name: str) -> Any:
                return getattr(receiver, name)

            def settle(self, delivery: Delivery, settlement: Any) -> None:
                receiver.settle(delivery, Ack() if isinstance(settlement, Release) else settlement)

        self._receiver = acking = Acking()  # type: ignore[assignment]
        return super()._live(acking, delivery)  # type: ignore[arg-type]


class AckUnderwayAtTheEnd(Consuming):
    def _settle_underway(self) -> None:
        if self._stop.is_set():
            for arrival in (each for sent in self._underway.values() for each in sent):
                arrival.receiver.settle(arrival.delivery, Ack())
            self._underway.clear()
        super()._settle_underway()


class NotRecordedAtTheEnd(Dispatcher):
    def flush(self) -> None:
        """Nothing is recorded but while it consumes."""

    def flush_if_due(self) -> None:
        if self._marks and self._clock.monotonic() - self._oldest >= self._max_age:
            super().flush()


# A relay stays dead ---------------------------------------------------------------------------------------------------


class RelayAliveForEver(InMemoryStore):
    def relay_alive(self) -> bool:
        return bool(self.content.relays)


class TakingDeletes(InMemoryStore):
    def take_pending(self, limit: int, lease: timedelta) -> Sequence[PendingOutput]:
        taken = super().take_pending(limit, lease)
        self.settle_pending([item.output.id for item in taken], {}, timedelta(0))
        return taken


class LeaseWithoutEnd(InMemoryStore):
    def take_pending(self, limit: int, lease: timedelta) -> Sequence[PendingOutput]:
        taken = super().take_pending(limit, lease)
        ids = {item.output.id for item in taken}
        for handling in self.content.handlings.values():
            for item in handling.sendings:
                item.quarantined |= item.output.id in ids
        return taken


_DEAD: Final[Mapping[str, Any]] = {"relays": 1, "relay_returns": False, "crashes": 1}

CASES: Final[Mapping[str, tuple[Parts, Mapping[str, Any]]]] = {
    "failed claim taken for a duplicate": (Parts(protocol=FailedClaimIsDuplicate), {"outages": 1}),
    "relay of which nothing is known counts as alive": (
        Parts(protocol=UnknownRelayIsAlive),
        {"outages": 1, "faults": 1},
    ),
    "outages count as attempts": (Parts(protocol=OutagesCount), {"outages": 1, "attempts": 1}),
    "starts without an answer count as deaths": (
        Parts(protocol=StartsWithoutAnswerCount),
        {"outages": 2, "attempts": 1, "jumps": (MINUTE,)},
    ),
    "marks that can't be recorded end the worker": (Parts(dispatcher=FlushRaises), {"outages": 1, "copies": 2}),
    "an outage ends the relay": (Parts(relay=RelayEndsInAnOutage), {"outages": 1, "relays": 1, "jumps": (MINUTE,)}),
    "an outage ends the cleaner": (Parts(cleaner=CleanerEndsInAnOutage), {"outages": 1, "purges": 1, "jumps": (LONG,)}),
    "errors of a publisher escape": (Parts(dispatcher=PublisherErrorsEscape), {"faults": 1}),
    "error of a publisher taken for a confirm": (Parts(dispatcher=PublisherErrorIsConfirm), {"faults": 1}),
    "ack instead of giving back": (Parts(consuming=AckInsteadOfRelease), {"stops": 1}),
    "ack at the end what is on its way": (
        Parts(consuming=AckUnderwayAtTheEnd),
        {"stops": 1, "messages": 2, "window": 2, "faults": 1},
    ),
    "confirms not recorded at the end": (Parts(dispatcher=NotRecordedAtTheEnd), {"stops": 1}),
    "a dead relay counts as alive": (
        Parts(store=RelayAliveForEver),
        {**_DEAD, "faults": 1, "jumps": (MINUTE,)},
    ),
    "outputs that a dead relay took are gone": (Parts(store=TakingDeletes), {**_DEAD, "faults": 1, "jumps": (MINUTE,)}),
    "outputs that a dead relay took stay its own": (
        Parts(store=LeaseWithoutEnd),
        {**_DEAD, "faults": 1, "jumps": (MINUTE,)},
    ),
}
"""Names of faults, with the parts and the smallest case that show them."""
