"""The witness of handlings in several databases: says at once when one of them does what was not decided."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from idemp.testing.simulation.witness import Witness

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence
    from uuid import UUID

    from idemp.messages import Output
    from idemp.twophase import BranchId, Decision

ALL_OR_NONE: Final = "all databases commit, or none does"
FOREIGN: Final = "nobody else's transactions are touched"
PREPARED_FIRST: Final = "nothing is decided before all databases have prepared"
ALL_BEFORE: Final = "nothing is sent or acked before all databases have committed"
NOTHING_IN_DOUBT: Final = "nothing of ours is left in doubt"


class TwoPhaseWitness(Witness):
    """What was decided, and what each database did.

    Args:
        breaks: called with the promise that broke, and how.
        inbox: whose branches are ours.
        missing: the databases in which a message has no effect yet.
        relays: there are some, which send what is decided, be it carried out or not.
    """

    def __init__(
        self, breaks: Callable[[str, str], None], inbox: bytes, missing: Callable[[str], Sequence[str]], *, relays: bool
    ) -> None:
        super().__init__(breaks)
        self._relays = relays
        self._inbox = inbox
        self._missing = missing
        self.decided: dict[UUID, bytes] = {}

    def picture(self) -> Hashable:
        """All that its later answers depend on."""
        return super().picture(), frozenset(self.decided.items())

    def decides(self, decision: Decision, unprepared: Sequence[str]) -> None:
        """The inbox commits an attempt, and with it a decision."""
        self.decided.setdefault(decision.key, decision.token)
        if unprepared:
            self._breaks(PREPARED_FIRST, f"the inbox committed, and {unprepared[0]} was not prepared")

    def ends(self, database: str, branch: BranchId, *, commit: bool) -> None:
        """A prepared branch is ended."""
        is_decided = self.decided.get(branch.key) == branch.token
        if branch.inbox != self._inbox:
            self._breaks(FOREIGN, f"another inbox's transaction was ended in {database}")
        elif commit and not is_decided:
            self._breaks(ALL_OR_NONE, f"{database} committed what the inbox did not decide")
        elif is_decided and not commit:
            self._breaks(ALL_OR_NONE, f"{database} rolled back what the inbox had decided")

    def sends(self, output: Output) -> None:
        """An output reaches the broker, by whoever handled its message."""
        super().sends(output)
        if not self._relays:
            self._sees_all(f"an output of {output.message.causation_id} was sent", str(output.message.causation_id))

    def acks(self, message: str, *, relay_seen: bool) -> None:
        """A delivery is acked."""
        super().acks(message, relay_seen=relay_seen)
        self._sees_all(f"{message} was acked", message)

    def _sees_all(self, what: str, message: str) -> None:
        for database in self._missing(message):
            self._breaks(ALL_BEFORE, f"{what}, and {database} has not committed")

    def agrees(self, message: str, here: int, there: Mapping[str, int]) -> None:
        """Everything came to rest: how often a message had its effect in the inbox's database, and in the others."""
        for database, effects in there.items():
            if effects != here:
                told = f"{here} times in the inbox's database, and {effects} times in {database}"
                self._breaks(ALL_OR_NONE, f"{message} had its effect {told}")

    def is_left(self, what: Sequence[str], planted: Sequence[str], found: Sequence[str]) -> None:
        """Everything came to rest: what is in doubt still, and which transactions of others there were and are."""
        if what:
            self._breaks(NOTHING_IN_DOUBT, ", ".join(what))
        if sorted(planted) != sorted(found):
            self._breaks(FOREIGN, "a transaction of somebody else is gone")
