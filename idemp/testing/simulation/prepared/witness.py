"""The witness of prepared messages: knows the local work's fate, and says at once when a promise breaks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from idemp.prepared.port import State
from idemp.testing.simulation.witness import NOT_BEFORE_COMMIT, NOT_WITHOUT_WORD, Witness

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Mapping
    from collections.abc import Set as AbstractSet
    from uuid import UUID

    from idemp.messages import Output
    from idemp.prepared.port import Prepared

WORK_ONCE: Final = "local work once"
PUBLISHED: Final = "committed work is published, once in effect"
NEVER: Final = "what is rolled back is never published"
NOT_TURNED: Final = "no decision is turned round"
ONE_ID: Final = "one id per key"
REALLY_ASKED: Final = "only checks that were asked count"
PARKED: Final = "undecided is parked, neither dropped nor published"
DONE: Final = "a producer without an error has its message published"
TRUTH: Final = "errors tell the truth about the local work"

_AFTER: Final = {
    None: frozenset({State.PREPARED}),
    State.PREPARED: frozenset({State.COMMITTED, State.ROLLED_BACK, State.PARKED}),
    State.PARKED: frozenset({State.PREPARED, State.COMMITTED, State.ROLLED_BACK}),
    State.COMMITTED: frozenset({State.PUBLISHED}),
    State.PUBLISHED: frozenset(),
    State.ROLLED_BACK: frozenset(),
}
_ONE: Final = 1


@dataclass(slots=True)
class Attempt:
    """One run of a producer's code.

    Attributes:
        key: what it is about.
        committed: its own local work is committed.
        told_not: it was told that it is not, nor will be.
        done: it ended without an error: the message is as good as published.
    """

    key: str
    committed: bool = False
    told_not: bool = False
    done: bool = False


class PreparedWitness(Witness):
    """What was prepared, worked, decided and published in one schedule.

    Args:
        breaks: called with the promise that broke, and how.
        decides: the home does; else the barrier.
        guessed: the checker takes work that it does not see for rolled back, which is its author's fault; the decision
            stands all the same, and whoever committed the work is told.

    Attributes:
        ids: the id of each key.
        worked: keys whose local work is committed.
        attempts: all of them so far.
    """

    def __init__(self, breaks: Callable[[str, str], None], *, decides: bool = True, guessed: bool = False) -> None:
        super().__init__(breaks)
        self._decides = decides
        self._guessed = guessed
        self.ids: dict[str, UUID] = {}
        self.worked: set[str] = set()
        self.attempts: list[Attempt] = []
        self._states: dict[UUID, State] = {}
        self._rolled_back: set[UUID] = set()
        self._committed: set[UUID] = set()

    def picture(self) -> Hashable:
        """All that its later answers depend on."""
        return (
            super().picture(),
            frozenset(self.worked),
            frozenset(self.ids),
            frozenset(self._rolled_back),
            frozenset(self._committed),
            frozenset(self._states.items()),
            tuple(sorted((each.key, each.committed, each.told_not, each.done) for each in self.attempts)),
        )

    def begins(self, key: str) -> Attempt:
        """A producer runs its code."""
        self.attempts.append(attempt := Attempt(key))
        return attempt

    def prepares(self, prepared: Prepared) -> None:
        """A producer stores a message."""
        key = str(prepared.key)
        if self.ids.setdefault(key, prepared.id) != prepared.id:
            self._breaks(ONE_ID, f"{key} was prepared under a second id")

    def works(self, attempt: Attempt) -> None:
        """The local work of a producer is committed."""
        attempt.committed = True
        if attempt.key in self.worked:
            self._breaks(WORK_ONCE, f"the local work of {attempt.key} was committed a second time")
        self.worked.add(attempt.key)
        if attempt.told_not:
            self._breaks(
                TRUTH, f"the local work of {attempt.key} is committed, and its producer was told that it is not"
            )
        if self.ids.get(attempt.key) in self._rolled_back and not self._guessed:
            self._breaks(NOT_TURNED, f"the local work of {attempt.key} was committed after its message was rolled back")

    def tells(self, attempt: Attempt, committed: str) -> None:
        """A producer is told how it ended: its local work is committed "yes", "no" or "unknown"."""
        if committed == "yes" and attempt.key not in self.worked:
            self._breaks(TRUTH, f"the producer of {attempt.key} was told that its work is committed, and it is not")
        if committed == "no":
            attempt.told_not = True
            if attempt.committed:
                self._breaks(TRUTH, f"the producer of {attempt.key} was told that its work is not committed, and it is")

    def sends(self, output: Output) -> None:
        """A final message reaches the broker."""
        key = str(output.message.causation_id)
        if key not in self.worked:
            self._breaks(NOT_BEFORE_COMMIT, f"the message of {key} was published, and its local work is not committed")
        if output.id in self._rolled_back:
            self._breaks(NEVER, f"the message of {key} was published after it was rolled back")
        if self._decides and output.id not in self._committed:
            self._breaks(PARKED, f"the message of {key} was published, and its home had not decided so")
        if self.ids.get(key) != output.id:
            self._breaks(ONE_ID, f"the message of {key} was published under another id than it was prepared")

    def rolls_back(self, prepared: Prepared) -> None:
        """A rollback was decided."""
        self._rolled_back.add(prepared.id)
        if str(prepared.key) in self.worked and not self._guessed:
            self._breaks(PUBLISHED, f"{prepared.key} was rolled back, and its local work is committed")

    def published(self, prepared: Prepared) -> None:
        """Somebody records that it was published."""
        if prepared.id not in self.confirmed:
            self._breaks(NOT_WITHOUT_WORD, f"{prepared.key} was recorded as published without a confirm")

    def settles(self, ids: Collection[UUID]) -> None:
        """Somebody tells the barrier that nothing is left to do for these."""
        for id_ in ids:
            if id_ not in self.confirmed and id_ not in self._rolled_back:
                self._breaks(NOT_WITHOUT_WORD, f"the barrier of {self._key(id_)} was settled without a confirm")

    def counts(self, prepared: Prepared, *, asked: bool) -> None:
        """A check is counted."""
        if not asked:
            self._breaks(REALLY_ASKED, f"a check of {prepared.key} was counted, and nobody was asked")

    def parks(self, prepared: Prepared, checks: int, most: int) -> None:
        """It is set aside after so many checks."""
        if checks < most:
            self._breaks(REALLY_ASKED, f"{prepared.key} was parked after {checks} of {most} checks")

    def sees(self, found: Mapping[UUID, AbstractSet[State]]) -> None:
        """Where all messages of a home that decides stand now."""
        states = {id_: next(iter(each)) for id_, each in found.items()}
        for id_ in self._states.keys() | states.keys():
            before, now = self._states.get(id_), states.get(id_)
            if before is now:
                continue
            if now is State.COMMITTED:
                self._committed.add(id_)
            if now is None or now.is_final:
                self.ends_leases([id_])
            if now is None and not (before and before.is_final):
                self._breaks(PARKED, f"{self._key(id_)} is gone, and was not decided")
            elif now is not None and now not in _AFTER[before]:
                told = "was not there" if before is None else f"was {before.value}"
                self._breaks(NOT_TURNED, f"{self._key(id_)} {told}, and is {now.value}")
        self._states = states

    def comes_to_rest(self, key: str, effects: int, states: AbstractSet[State], *, known: bool) -> None:
        """Everything came to rest: what became of a key. `known` says that nobody answers "unknown" in the end."""
        worked, id_ = key in self.worked, self.ids.get(key)
        if effects > worked:
            self._breaks(
                PUBLISHED, f"{key} had its effect {effects} times, and its work was {'' if worked else 'not '}done"
            )
        if state_is_open := states & {State.PREPARED, State.COMMITTED}:
            self._breaks(PARKED, f"{key} is {', '.join(sorted(state_is_open))} to the end")
        if any(each.done and each.key == key for each in self.attempts) and id_ not in self.confirmed:
            self._breaks(DONE, f"the producer of {key} ended without an error, and its message was never published")
        if State.PARKED in states and (not known or id_ in self.confirmed):
            return  # copies of what is published stay parked for a person
        if State.PARKED in states:
            self._breaks(PARKED, f"{key} is parked, and its fate is known")
        elif worked and self._guessed and id_ in self._rolled_back:
            return
        elif worked and effects != _ONE:
            self._breaks(PUBLISHED, f"the local work of {key} is committed, and its effect came {effects} times")
        elif worked and id_ not in self.confirmed:
            self._breaks(PUBLISHED, f"the local work of {key} is committed, and its message was never confirmed")

    def _key(self, id_: UUID) -> str:
        return next((key for key, of_key in self.ids.items() if of_key == id_), str(id_))
