"""The report of a soak, and the verdict."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

MOST_GROWTH = 0.05
MORE_DESCRIPTORS = 6
"""So many more at the end say nothing: a connection is being made again, and a pool has opened its second one."""
_COUNTED = (
    "not_at_rest", "lost", "doubled", "effects_of_what_was_parked", "letters_missing", "letters_unexpected",
    "letters_unexplained", "pending", "quarantined", "left", "outputs", "faults_failed", "faults_that_never_happened",
    "logged_unexpectedly", "survivor_ended", "exit_codes",
)  # fmt: skip


@dataclass
class Report:
    """What was done, and what is left; read from the database and the queues, never from the workers.

    Attributes:
        letters_repeated: copies of dead letters beyond the first of each message.
        letters_explained: so many such copies can come of acks that a fault has swallowed: what a broker delivers again
            fails again, and is parked again.
        letters_unexplained: how many are beyond it.
        left: messages that were left in queues, by queue.
        outputs: what was wrong with outputs, by name.
        survivor_ended: how the worker ended that was never killed, if it did before its time.
        exit_codes: of workers that were told to end, where it was not 0.
        memory_before: of the survivor, in MiB: the median of the sixth minute; `None` in a run too short for it.
        memory_after: the median of the last quarter.
        memory_growth: of the survivor, from the sixth minute to the last quarter; `None` in a run too short for it.
    """

    seconds: float = 0.0
    messages: int = 0
    copies: int = 0
    resent: int = 0
    feeding_held_seconds: float = 0.0
    fail_once: int = 0
    fail_always: int = 0
    killers: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    faults_log: list[tuple[float, str, float]] = field(default_factory=list)
    workers_that_ended: dict[int, int] = field(default_factory=dict)
    # The promises.
    not_at_rest: str = ""
    effects: int = 0
    lost: int = 0
    doubled: int = 0
    effects_of_what_was_parked: int = 0
    letters: dict[str, int] = field(default_factory=dict)
    letters_missing: int = 0
    letters_unexpected: list[str] = field(default_factory=list)
    letters_repeated: int = 0
    letters_explained: int = 0
    letters_unexplained: int = 0
    outputs_seen: int = 0
    outputs: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)
    pending: int = 0
    quarantined: int = 0
    left: dict[str, int] = field(default_factory=dict)
    faults_failed: list[str] = field(default_factory=list)
    faults_that_never_happened: list[str] = field(default_factory=list)
    logged: dict[str, int] = field(default_factory=dict)
    logged_unexpectedly: list[str] = field(default_factory=list)
    survivor_ended: str = ""
    exit_codes: list[int] = field(default_factory=list)
    # The survivor.
    memory_before: float | None = None
    memory_after: float | None = None
    memory_by_minute: list[float | None] = field(default_factory=list)
    threads_before: float | None = None
    threads_after: float | None = None
    descriptors_before: float | None = None
    descriptors_after: float | None = None

    @property
    def memory_growth(self) -> float | None:
        """As a share of what it was; `None` where it is not judged."""
        if self.memory_before is None or self.memory_after is None:
            return None
        return round(self.memory_after / self.memory_before - 1, 4)

    @property
    def broken(self) -> dict[str, Any]:
        """What is not as it should be, by name."""
        found = {name: getattr(self, name) for name in _COUNTED if getattr(self, name)}
        if self.memory_growth is not None and self.memory_growth >= MOST_GROWTH:
            found["memory_growth"] = self.memory_growth
        if _more(self.threads_before, self.threads_after) > 0:
            found["threads"] = (self.threads_before, self.threads_after)
        if _more(self.descriptors_before, self.descriptors_after) > MORE_DESCRIPTORS:
            found["descriptors"] = (self.descriptors_before, self.descriptors_after)
        return found

    def as_json(self) -> dict[str, object]:
        """Everything, and the verdict."""
        return {
            **asdict(self),
            "memory_growth": self.memory_growth,
            "broken": self.broken,
            "promises_held": not self.broken,
        }


def _more(before: float | None, after: float | None) -> float:
    if before is None or after is None:
        return float("inf")  # it was never seen: that is no proof of anything
    return after - before
