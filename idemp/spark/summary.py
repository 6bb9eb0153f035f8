"""What became of the messages of a batch."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from idemp.bulk import Came
from idemp.plurals import counted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from idemp.bulk import Report

log = logging.getLogger("idemp.pipeline")


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Messages by what became of them; the numbers add up to the messages of the input.

    Each verdict was read in the database, by the attempt of a task whose answer Spark took: a message that an attempt
    committed before it was lost is a replay of the next one. What is effective of a first run is `new + replay`.

    Attributes:
        new: handled now; adopted; in a dry run, what would be.
        replay: handled before from the same position of the source, by an earlier attempt or run.
        duplicate: handled before, online or from another position.
        conflict: handled before with another payload.
        parked: can't be handled; in the folder of parked messages, with the reason.
        skipped: left out by the prefilter: handled before from the same position, under the same id; not looked at again.
        outputs: messages that the new ones produced.

    Example:
        >>> summary = Summary(new=3, duplicate=1)
        >>> summary.rows, str(summary)
        (4, '4 messages: 3 new, 0 replay, 1 duplicate, 0 conflict, 0 parked; 0 outputs')
    """

    new: int = 0
    replay: int = 0
    duplicate: int = 0
    conflict: int = 0
    parked: int = 0
    skipped: int = 0
    outputs: int = 0

    @property
    def rows(self) -> int:
        """Messages of the input."""
        return self.new + self.replay + self.duplicate + self.conflict + self.parked + self.skipped

    def as_dict(self) -> dict[str, int]:
        """All numbers, `rows` first."""
        return {"rows": self.rows, **asdict(self)}

    @classmethod
    def of(cls, observed: Mapping[str, Any]) -> Summary:
        """From sums as Spark observed them; of no rows at all they are NULL."""
        return cls(**{name: value or 0 for name, value in observed.items()})

    @classmethod
    def of_report(cls, report: Report) -> Summary:
        """From what the bulk core says."""
        return cls(**{came.value: report.counts[came] for came in Came}, outputs=report.outputs)

    def tell(self, batch: int) -> None:
        """Log it."""
        log.info(
            "batch %d: %s",
            batch,
            self,
            extra={
                "event": "pipeline_batch",
                "batch": batch,
                "rows": self.rows,
                "new": self.new,
                "replay": self.replay,
                "duplicate": self.duplicate,
                "conflict": self.conflict,
                "parked": self.parked,
                "skipped": self.skipped,
                "outputs": self.outputs,
            },
        )

    def __str__(self) -> str:
        told = {name: value for name, value in asdict(self).items() if name != "outputs"}
        if not self.skipped:  # nearly nobody asks for the prefilter
            del told["skipped"]
        counts = ", ".join(f"{value} {name}" for name, value in told.items())
        return f"{counted(self.rows, 'message')}: {counts}; {counted(self.outputs, 'output')}"
