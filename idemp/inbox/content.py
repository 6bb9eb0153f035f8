"""All that a small store keeps, as plain objects."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from idemp.fingerprint import fingerprints_conflict
from idemp.inbox.port import Claim, Claimed, StoredOutput, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from uuid import UUID

    from idemp.messages import Output

FAR_PAST: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass
class Sending:
    """A stored output, and what became of it.

    Attributes:
        output: what to send.
        due_at: when a relay may take it.
        attempts: how often it was sent, or may have been.
        pending: whether it waits for its confirm.
        quarantined: whether no relay sends it any more.
        refusals: how often a relay was refused it for its own sake.
        reason: why it was not sent, for people.
    """

    output: Output
    due_at: datetime
    attempts: int
    pending: bool = True
    quarantined: bool = False
    refusals: int = 0
    reason: str = ""

    def stored(self) -> StoredOutput:
        """The output as an answer to a claim has it."""
        return StoredOutput(self.output, self.pending, None if self.quarantined else self.due_at)


@dataclass
class Handling:
    """What stands under one id: the claim, and the outputs in emission order.

    Attributes:
        claim: who claimed it.
        claimed_at: when.
        sendings: its outputs.

    Example:
        >>> from idemp.identity import effective_id
        >>> claim = Claim(consumer="orders", id=effective_id("envelope", "message-1"), message_type="orders.Place",
        ...               fingerprint=None, wait=timedelta(seconds=2))
        >>> Handling(claim, datetime.now(UTC)).answer(claim).verdict.name
        'DUPLICATE'
    """

    claim: Claim
    claimed_at: datetime
    sendings: list[Sending] = field(default_factory=list)

    def keep(self, outputs: Sequence[Output], now: datetime, relay_after: timedelta | None) -> None:
        """Store its outputs, pending; `relay_after` from now on a relay may take them, with `None` nobody ever.

        Effects are due at once: nobody else runs them.
        """
        left_to_relay = (now + (relay_after or timedelta(0)), 1 if relay_after else 0)
        pending = relay_after is not None
        self.sendings = [
            Sending(output, *((now, 0) if output.is_effect else left_to_relay), pending=pending) for output in outputs
        ]

    def answer(self, claim: Claim) -> Claimed:
        """What somebody learns who claims the same key."""
        if self.claim.id.text != claim.id.text:
            detail = f"its digest belongs to {self.claim.id.text!r}"
            return Claimed(Verdict.CONFLICT, (), detail, collision=True, claimed_at=self.claimed_at)
        if not claim.is_of(self.claim.message_type):
            detail = f"it was handled as {self.claim.message_type!r} at {self.claimed_at.isoformat()}"
            return Claimed(Verdict.CONFLICT, (), detail, collision=True, claimed_at=self.claimed_at)
        outputs, place = tuple(item.stored() for item in self.sendings), self.claim.position
        if fingerprints_conflict(self.claim.fingerprint, claim.fingerprint):
            detail = f"first handled at {self.claimed_at.isoformat()}"
            return Claimed(Verdict.CONFLICT, outputs, detail, claimed_at=self.claimed_at, position=place)
        return Claimed(Verdict.DUPLICATE, outputs, claimed_at=self.claimed_at, position=place)

    @property
    def pending(self) -> bool:
        """Whether some output waits for its confirm."""
        return any(item.pending for item in self.sendings)


@dataclass
class Content:
    """All that a small store keeps. It can be pickled.

    Attributes:
        handlings: by consumer and key of the id.
        starts: number of starts without an end, and the time of the last, by consumer and key.
        relays: last beats, by worker.
        consumed: intervals in which each consumer consumed, oldest first.
        identities: consumer, message type and key's name, and since when they are no longer current.
        queues: consumers and their queues, and when each was last seen to be used.
        purged: when claims of a consumer were last deleted; those that are not there may be from before then.
        data: the effects of the handlers.
        broker: which broker the outputs go to, once a worker or relay has connected to it.
    """

    handlings: dict[tuple[str, UUID], Handling] = field(default_factory=dict)
    starts: dict[tuple[str, UUID], tuple[int, datetime]] = field(default_factory=dict)
    relays: dict[str, datetime] = field(default_factory=dict)
    consumed: dict[str, list[tuple[datetime, datetime]]] = field(default_factory=dict)
    identities: dict[tuple[str, str, str], datetime | None] = field(default_factory=dict)
    queues: dict[tuple[str, str], datetime] = field(default_factory=dict)
    purged: dict[str, datetime] = field(default_factory=dict)
    data: dict[Any, Any] = field(default_factory=dict)
    broker: str | None = None

    def pending(self) -> Iterator[tuple[Handling, Sending]]:
        """Outputs that wait for a confirm, each with its handling."""
        for handling in self.handlings.values():
            yield from ((handling, item) for item in handling.sendings if item.pending)

    def late_before(self, consumer: str, retention: timedelta, now: datetime) -> datetime:
        """The moment since which the consumer has consumed for `retention` in sum."""
        missing, later = retention, now
        for started, ended in reversed(self.consumed.get(consumer, [])):
            until = min(ended, later)
            if until - started >= missing:
                return until - missing
            missing, later = missing - (until - started), started
        return FAR_PAST

    def expired(
        self, consumer: str, retention: Mapping[str, timedelta], others: timedelta | None, now: datetime
    ) -> Iterator[tuple[tuple[str, UUID], timedelta]]:
        """Claims past their windows with nothing pending, and how far past."""
        for key, handling in self.handlings.items():
            window = retention.get(handling.claim.message_type, others)
            if key[0] == consumer and window is not None and not handling.pending:
                lag = self.late_before(consumer, window, now) - handling.claimed_at
                if lag > timedelta(0):
                    yield key, lag

    def given_up(self, consumer: str, after: timedelta, now: datetime) -> Iterator[tuple[str, UUID]]:
        """Starts of the consumer that nobody came back for in so long."""
        for key, (_, last_at) in self.starts.items():
            if key[0] == consumer and now - last_at > after:
                yield key
