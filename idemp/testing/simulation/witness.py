"""The witness: sees every call of a port, and says at once when a promise breaks."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
    from datetime import datetime
    from uuid import UUID

    from idemp.messages import Output

EFFECT_ONCE = "effect once"
SENT_AGAIN = "outputs at least once, same id"
NOT_BEFORE_COMMIT = "nothing sent without commit"
NOT_WITHOUT_WORD = "nothing marked sent without the broker's word"
NOTHING_LOST = "nothing lost"
SETTLED_ONCE = "settled once"
RELAY_ALIVE = "a relay without a heartbeat counts as dead"
RECORDED_AT_THE_END = "a worker that ends records what was confirmed"
ONE_LEASE = "one relay at a time has an output"
COMES_TO_REST = "everything comes to rest"
_LONG_DEAD = timedelta(minutes=1)


class Witness:
    """What was committed, sent and confirmed in one schedule.

    Args:
        breaks: called with the promise that broke, and how.
    """

    def __init__(self, breaks: Callable[[str, str], None]) -> None:
        self._breaks = breaks
        self.committed: dict[str, tuple[Output, ...]] = {}
        self.confirmed: set[UUID] = set()
        self._bodies: dict[UUID, bytes] = {}
        self._leases: dict[UUID, datetime] = {}
        self._beat: datetime | None = None

    def picture(self) -> Hashable:
        """All that its later answers depend on."""
        return (frozenset(self.committed), frozenset(self.confirmed), frozenset(self._leases.items()), self._beat)

    def commits(self, message: str, outputs: Sequence[Output]) -> None:
        """A handling of this message is committed."""
        if message in self.committed:
            self._breaks(EFFECT_ONCE, f"{message} was handled and committed a second time")
            return
        self.committed[message] = tuple(outputs)
        for output in outputs:
            self._bodies[output.id] = output.message.body

    def sends(self, output: Output) -> None:
        """An output reaches the broker."""
        if output.message.causation_id not in self.committed:
            self._breaks(
                NOT_BEFORE_COMMIT, f"an output of {output.message.causation_id} was sent, and nothing committed"
            )
        elif output.id not in self._bodies:
            self._breaks(
                SENT_AGAIN, f"an output of {output.message.causation_id} was sent under an id that is not stored"
            )
        elif self._bodies[output.id] != output.message.body:
            self._breaks(SENT_AGAIN, f"an output of {output.message.causation_id} was sent with another body")

    def confirms(self, output: Output) -> None:
        """The broker's word for an output arrived."""
        self.confirmed.add(output.id)

    def marks(self, outputs: Iterable[UUID]) -> None:
        """Somebody records outputs as dispatched."""
        if any(output not in self.confirmed for output in outputs):
            self._breaks(NOT_WITHOUT_WORD, "an output without a confirm was recorded as dispatched")

    def leases(self, outputs: Iterable[UUID], now: datetime, until: datetime) -> None:
        """A relay leases outputs."""
        for output in outputs:
            if self._leases.get(output, now) > now:
                self._breaks(ONE_LEASE, "an output was leased while another relay's lease was not over")
            self._leases[output] = until

    def ends_leases(self, outputs: Iterable[UUID]) -> None:
        """A relay is done with outputs."""
        for output in outputs:
            self._leases.pop(output, None)

    def beats(self, now: datetime) -> None:
        """A relay shows life."""
        self._beat = now

    def takes_a_relay_for_alive(self, now: datetime) -> None:
        """A worker relies on a relay."""
        if self._beat is None or now - self._beat >= _LONG_DEAD:
            self._breaks(RELAY_ALIVE, "a worker relies on a relay that has shown no life for a minute")

    def ends_at_work(self, worker: str, unrecorded: Iterable[UUID]) -> None:
        """A worker that was told to stop has ended, and met no fault."""
        if any(True for _ in unrecorded):
            self._breaks(RECORDED_AT_THE_END, f"{worker} ended, and did not record a confirm")

    def acks(self, message: str, *, relay_seen: bool) -> None:
        """A delivery is acked."""
        if message not in self.committed:
            self._breaks(NOTHING_LOST, f"{message} was acked before any handling of it was committed")
        elif not relay_seen and any(output.id not in self.confirmed for output in self.committed[message]):
            self._breaks(NOTHING_LOST, f"{message} was acked with an unconfirmed output, and no relay lives")

    def stands(self, pending: Collection[UUID]) -> None:
        """No relay is left: each output is confirmed, or stands where operators and the next relay find it."""
        for message, outputs in self.committed.items():
            if any(output.id not in self.confirmed and output.id not in pending for output in outputs):
                self._breaks(NOTHING_LOST, f"an output of {message} has no confirm, and does not count as pending")

    def settles_again(self, message: str) -> None:
        """A delivery is settled that was settled before."""
        self._breaks(SETTLED_ONCE, f"one delivery of {message} was settled twice")

    def rests(self, message: str, effects: int, *, parked: bool, late: bool) -> None:
        """Everything came to rest: what became of a message. `late` says that it may be parked for its age."""
        if effects > 1:
            self._breaks(EFFECT_ONCE, f"{message} had its effect {effects} times")
        elif effects == 0 and not (parked and late):
            self._breaks(NOTHING_LOST, f"{message} was never handled")
        elif parked and not late:
            self._breaks(NOTHING_LOST, f"{message} was parked, though it could be handled")
        for output in self.committed.get(message, ()):
            if output.id not in self.confirmed:
                self._breaks(SENT_AGAIN, f"an output of {message} was never confirmed by the broker")
