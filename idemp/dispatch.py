"""Sends outputs after COMMIT, and records in batches what the broker confirmed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from idemp.broker.port import Endpoint, Refusal, SendingPublisher
from idemp.errors import StoreError
from idemp.inbox.port import Mark
from idemp.showing import described, logger
from idemp.telemetry import Watch

if TYPE_CHECKING:
    from datetime import timedelta
    from uuid import UUID

    from idemp.broker.port import Publisher
    from idemp.clock import Clock
    from idemp.inbox.port import Claim, Store
    from idemp.messages import Output
    from idemp.outcome import Outcome
    from idemp.telemetry import Telemetry, Via
    from idemp.work import Consumer

log = logger("idemp.dispatch")

MAX_UNRECORDED = 10_000
"""Marks held while the database is away; beyond it the oldest are forgotten, which costs a redispatch and loses nothing."""


def publish_all(publisher: Publisher, outputs: Sequence[Output], timeout: float) -> list[Refusal | None]:
    """Publish, and take an exception of the publisher for a refusal: of the one output that causes it, not of all."""
    if not outputs:
        return []
    try:
        return publisher.publish(outputs, timeout)
    except Exception as error:  # after COMMIT nothing may escape: the outputs are stored, and have to stay visible
        if len(outputs) == 1:
            (output,) = outputs
            log.exception(
                "output can't be sent",
                extra={
                    "event": "output_unsendable",
                    "output_id": str(output.id),
                    "destination": output.routing_key,
                    "message_id": output.message.causation_id,
                },
            )
            return [Refusal("unsendable", f"never sent: {described(error)}")]
        return [answer for output in outputs for answer in publish_all(publisher, [output], timeout)]


def watched_publish(
    watch: Watch, via: Via, publisher: Publisher, outputs: Sequence[Output], timeout: timedelta
) -> list[Refusal | None]:
    """`publish_all`, seen by a watch."""
    if not outputs:
        return []
    watch.sends(outputs, via)
    answers = publish_all(publisher, outputs, timeout.total_seconds())
    watch.sent(outputs, answers, via)
    return answers


def watch_of(telemetry: Telemetry, consumer: Consumer | None, publisher: Publisher) -> Watch:
    """Return a watch that knows the publisher's broker."""
    watch = telemetry.watch(consumer)
    watch.reaches(getattr(publisher, "endpoint", Endpoint()))
    return watch


def reason_of(refusal: Refusal) -> str:
    """Why an output has no confirm, for people.

    Example:
        >>> reason_of(Refusal("nacked", "the queue is full")), reason_of(Refusal("timeout"))
        ('nacked: the queue is full', 'timeout')
    """
    return f"{refusal.kind}: {refusal.detail}".rstrip(": ")


Refused = Sequence[tuple["Output", Refusal]]
"""Outputs without a confirm, each with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shipment:
    """The outputs of one handling on their way to the broker.

    Attributes:
        outputs: what is sent; there may be none.
        timeout: how long to wait for the confirms.
        outcome: what became of the delivery, given the outputs that have no confirm.
        claim: the handling, `None` for outputs that are not stored.
        redelivered: whether they were stored by an earlier handling.
        watch: sees what is sent.

    Example:
        >>> from datetime import timedelta
        >>> from idemp import Outcome
        >>> shipment = Shipment(outputs=(), timeout=timedelta(seconds=1), outcome=lambda refused: Outcome.HANDLED)
        >>> shipment.via, shipment.outcome(())
        ('dispatch', <Outcome.HANDLED: 'handled'>)
    """

    outputs: Sequence[Output]
    timeout: timedelta
    outcome: Callable[[Refused], Outcome]
    claim: Claim | None = None
    redelivered: bool = False
    watch: Watch = field(default_factory=Watch)

    @property
    def via(self) -> Via:
        """Who sends them."""
        return "redispatch" if self.redelivered else "dispatch"


class AtOnce:
    """A publisher that has to be waited for, as one that need not be: its answers are there right after sending.

    Args:
        publisher: publishes with confirms.

    Example:
        >>> from idemp.broker.memory import InMemoryBroker
        >>> at_once = AtOnce(InMemoryBroker().publisher())
        >>> at_once.send([], 1.0), at_once.answered(0.0)
        (1, [(1, [])])
    """

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher
        self._sent = 0
        self._answered: list[tuple[int, list[Refusal | None]]] = []

    def send(self, outputs: Sequence[Output], timeout: float) -> int:
        """Publish, and keep the answers for `answered`."""
        self._sent += 1
        self._answered.append((self._sent, publish_all(self._publisher, outputs, timeout)))
        return self._sent

    def answered(self, seconds: float) -> list[tuple[int, list[Refusal | None]]]:
        """The answers to what was sent since the last call."""
        del seconds
        answered, self._answered = self._answered, []
        return answered


class Dispatcher:
    """Publishes outputs and waits for the confirm of each, at once or later. One per worker thread.

    A mark "dispatched" is recorded only after the broker's word, off the hot path: when `batch` marks have gathered, or
    the oldest is `max_age` seconds old. A crash in between sends those outputs again, under the same ids.

    Args:
        publisher: publishes with confirms.
        store: where marks are recorded.
        clock: source of time.
        batch: marks recorded together.
        max_age: seconds that a mark waits at most, while `flush_if_due` is called.
    """

    def __init__(
        self, publisher: Publisher, store: Store, clock: Clock, *, batch: int = 50, max_age: float = 0.5
    ) -> None:
        self.publisher = publisher
        self._sender = publisher if isinstance(publisher, SendingPublisher) else None
        self._at_once = AtOnce(publisher)
        self._underway: dict[int, Sequence[Shipment]] = {}
        self._store = store
        self._clock = clock
        self._batch = batch
        self._max_age = max_age
        self._marks: list[Mark] = []
        self._confirmed: set[UUID] = set()
        self._oldest = 0.0

    def dispatch(self, shipment: Shipment) -> Refused:
        """Send the outputs and wait; those without a confirm come back, each with the reason."""
        answers = watched_publish(shipment.watch, shipment.via, self.publisher, shipment.outputs, shipment.timeout)
        refused = self._ended(shipment, answers)
        self.flush_if_due()
        return refused

    def send(self, *shipments: Shipment) -> int:
        """Send the outputs, of which there must be some, and do not wait.

        Returns:
            The number under which `answered` tells of them all, together.
        """
        for shipment in shipments:
            shipment.watch.resumes()
            shipment.watch.sends(shipment.outputs, shipment.via)
            shipment.watch.waits()
        outputs = [output for shipment in shipments for output in shipment.outputs]
        seconds = min(shipment.timeout for shipment in shipments).total_seconds()
        ticket = None
        if self._sender is not None:
            try:
                ticket = self._sender.send(outputs, seconds)
            except Exception:  # after COMMIT nothing may escape; `AtOnce` finds, and tells, which output it was
                log.debug("outputs could not be sent; they are published one by one", exc_info=True)
        if ticket is None:
            ticket = -self._at_once.send(outputs, seconds)
        self._underway[ticket] = shipments
        return ticket

    def answered(self, seconds: float = 0.0) -> list[tuple[int, list[Refused]]]:
        """What was sent and is answered by now, each told once, with the outputs of each shipment that have no confirm.

        Where there is none yet, it waits up to `seconds` for one. All are answered soon after their timeouts.
        """
        ended = []
        if self._underway:
            answered = [(-ticket, answers) for ticket, answers in self._at_once.answered(0.0)]
            if self._sender is not None:
                answered += self._sender.answered(0.0 if answered else seconds)
            for ticket, answers in answered:
                shipments, left = self._underway.pop(ticket), iter(answers)
                ended.append(
                    (ticket, [self._answered(each, list(islice(left, len(each.outputs)))) for each in shipments])
                )
        self.flush_if_due()
        return ended

    def _answered(self, shipment: Shipment, answers: Sequence[Refusal | None]) -> Refused:
        shipment.watch.sent(shipment.outputs, answers, shipment.via)
        return self._ended(shipment, answers)

    def _ended(self, shipment: Shipment, answers: Sequence[Refusal | None]) -> Refused:
        claim, outputs = shipment.claim, shipment.outputs
        refused = [(output, answer) for output, answer in zip(outputs, answers, strict=True) if answer is not None]
        for output, refusal in refused:
            log.warning(
                "output %s to %s not confirmed: %s; see `idemp inbox list --pending`",
                output.id,
                output.routing_key,
                reason_of(refusal),
                extra={
                    "event": "output_unconfirmed",
                    "consumer": claim.consumer if claim is not None else None,
                    "message_id": claim.id.text if claim is not None else output.message.causation_id,
                    "message_type": claim.message_type if claim is not None else None,
                    "output_id": str(output.id),
                    "destination": output.routing_key,
                    "refusal": refusal.kind,
                },
            )
        if claim is not None:
            confirmed = tuple(output.id for output, answer in zip(outputs, answers, strict=True) if answer is None)
            reasons = tuple((output.id, reason_of(refusal)) for output, refusal in refused)
            if confirmed or shipment.redelivered or reasons:
                self._remember(Mark(claim, confirmed, shipment.redelivered, reasons))
        return refused

    def is_confirmed(self, output_id: UUID) -> bool:
        """Whether this output was confirmed to us, though it may not be recorded yet."""
        return output_id in self._confirmed

    def flush_if_due(self) -> None:
        """Record the marks when there are enough of them, or the oldest is old enough."""
        if self._marks and (len(self._marks) >= self._batch or self._clock.monotonic() - self._oldest >= self._max_age):
            self.flush()

    def flush(self) -> None:
        """Record all marks now. If the database is away they are kept for the next time."""
        if not self._marks:
            return
        try:
            self._store.record(self._marks)
        except StoreError as error:
            log.warning("marks not recorded, kept: %s", error, extra={"event": "marks_kept", "marks": len(self._marks)})
            del self._marks[:-MAX_UNRECORDED]
            self._oldest = self._clock.monotonic()
            return
        self._marks.clear()
        self._confirmed.clear()

    def _remember(self, mark: Mark) -> None:
        if not self._marks:
            self._oldest = self._clock.monotonic()
        self._marks.append(mark)
        self._confirmed.update(mark.confirmed)
