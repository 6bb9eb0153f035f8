"""What the figures are to show: one variant against another, and by how much."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from benchmarks.figures import paired, spread

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.variants import Block


@dataclass(frozen=True)
class Show:
    """A claim about two variants of one pair of database and broker.

    Attributes:
        variant: whose figure it is.
        than: beside which it is put.
        target: what it has to reach, if that was laid down.
        prototype: what a throw-away prototype reached, before idemp was written.
        measure: how many times as fast it is; or how much more CPU time it takes for a message, in microseconds.
        round_trip: milliseconds to the database, where it is said of those.

    Goals are about PostgreSQL with RabbitMQ.
    """

    variant: str
    than: str
    target: float | None = None
    prototype: float | None = None
    measure: Literal["throughput", "cpu"] = "throughput"
    round_trip: float = 0.0

    @property
    def name(self) -> str:
        """For tables."""
        return (
            f"{self.variant} / {self.than}" if self.measure == "throughput" else f"CPU of {self.variant} - {self.than}"
        )

    def told(self, blocks: Mapping[str, Sequence[Block]], *, has_goals: bool) -> dict[str, Any]:
        """Median, quartiles, bounds and verdicts."""
        own, other = blocks[self.variant], blocks[self.than]
        if self.measure == "throughput":
            found = spread(paired([each.seconds for each in other], [each.seconds for each in own]))
        else:
            pairs = zip(own, other, strict=True)
            found = spread([(one.cpu_seconds - two.cpu_seconds) * 1e6 for one, two in pairs], digits=1)
        goal = (
            {"target": self.target, "prototype": self.prototype} if has_goals else {"target": None, "prototype": None}
        )
        at_least = self.measure == "throughput"
        return {"name": self.name, "measure": self.measure, **goal, **found, **verdicts(found, goal, at_least=at_least)}


def verdicts(found: Mapping[str, float], goals: Mapping[str, float | None], *, at_least: bool) -> dict[str, str]:
    """Per goal: whether it is reached beyond what luck would do, by the median only, or not.

    Example:
        >>> figures = {"median": 2.0, "lower_bound": 1.8, "upper_bound": 2.3}
        >>> verdicts(figures, {"target": 1.9, "prototype": None}, at_least=True)
        {'target_verdict': 'by the median only'}
    """
    sign, bound = (1, "lower_bound") if at_least else (-1, "upper_bound")
    told = {}
    for name, goal in goals.items():
        if goal is None:
            continue
        reached = sign * found["median"] >= sign * goal
        surely = reached and sign * found[bound] >= sign * goal
        told[f"{name}_verdict"] = "reached" if surely else "by the median only" if reached else "not reached"
    return told


SHOWS: Final = (
    Show("one confirm at a time", "bare", target=0.95, prototype=0.96),
    Show("window", "bare", target=1.4, prototype=1.36),
    Show("window", "naive", target=4.0, prototype=3.9),
    Show("batch 50", "bare", target=5.0, prototype=4.0),
    Show("batch handler 200", "bare", target=10.0, prototype=8.0),
    Show("batch 50", "batch 50 without idemp", target=0.9, prototype=0.65),
    Show("duplicates in batches", "bare", target=10.0, prototype=9.0),
    Show("duplicates pending in batches", "bare", target=20.0, prototype=24.0),
    Show("batch 50, 1 % failing", "batch 50", target=0.85, prototype=0.84),
    Show("4 processes", "4 processes, bare", target=0.9),
    Show("4 threads", "4 threads, bare", target=0.9, prototype=0.83),
    Show("window", "DBOS", target=3.0),
    Show("window", "Powertools", target=3.0),
    Show("window", "event-forge", target=3.0),
    Show("window", "FastStream", target=3.0),
    Show("one confirm at a time", "bare", target=60.0, measure="cpu"),
    Show("window", "bare", target=60.0, measure="cpu"),
    Show("batch 50", "batch 50 without idemp", target=30.0, measure="cpu"),
    Show("window", "bare", prototype=1.3, round_trip=2.0),
    Show("batch 50", "bare", prototype=3.7, round_trip=2.0),
    Show("batch 50", "batch 50 without idemp", target=0.9, round_trip=2.0),
    Show("batch handler 200", "bare", target=20.0, prototype=21.0, round_trip=2.0),
)


def told(blocks: Mapping[str, Sequence[Block]], *, round_trip: float, has_goals: bool) -> list[dict[str, Any]]:
    """Of all claims about variants that were measured at this distance."""
    return [
        show.told(blocks, has_goals=has_goals)
        for show in SHOWS
        if show.round_trip == round_trip and {show.variant, show.than} <= blocks.keys()
    ]
