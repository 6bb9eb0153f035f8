"""What became of a chunk, row by row counted."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from idemp.inbox.port import Verdict
from idemp.showing import class_of, text_of

if TYPE_CHECKING:
    from idemp.bulk.rows import Row
    from idemp.inbox.port import Claim, Claimed


class Came(enum.Enum):
    """What became of a row.

    Example:
        >>> Came("replay")
        <Came.REPLAY: 'replay'>
    """

    NEW = "new"  #: handled now (adopted, in a dry run: would be)
    REPLAY = "replay"  #: claimed before from the same source position: our own retry
    DUPLICATE = (
        "duplicate"  #: claimed before from another position, by an online consumer, or it is not known from where
    )
    CONFLICT = "conflict"  #: claimed before with another payload, or another id shares its digest
    PARKED = "parked"  #: a row that can't be handled, or whose handler fails


@dataclass(frozen=True, slots=True, kw_only=True)
class Parked:
    """A row that was not handled, and is not to be dropped: put it where somebody looks at it.

    Attributes:
        row: as it came.
        reason: why, for people.
        error: the error's type.

    Example:
        >>> from idemp.bulk import Row
        >>> Parked(row=Row(id="m-1"), reason="It has no type.", error="UnknownMessageType").row.id
        'm-1'
    """

    row: Row
    reason: str
    error: str

    @classmethod
    def of(cls, row: Row, error: Exception) -> Parked:
        r"""A row, and what it is parked with, as a text that can be written: errors quote whatever they met.

        Example:
            >>> from idemp.bulk import Row
            >>> print(Parked.of(Row(id="m-1"), ValueError("no file \udc80")).reason)
            no file \udc80
        """
        reason = text_of(error) or class_of(error)
        return cls(row=row, reason=reason, error=class_of(error))


@dataclass(kw_only=True)
class Report:
    """What became of a chunk.

    Attributes:
        counts: rows by what became of them; they add up to the rows of the chunk.
        parked: those that are PARKED, and the conflicts that their types' policies park.
        outputs: how many outputs were stored.

    Example:
        >>> first, second = Report(counts=Counter({Came.NEW: 2})), Report(counts=Counter({Came.NEW: 1}), outputs=1)
        >>> first.add(second)
        >>> first.counts[Came.NEW], first.outputs, first.rows
        (3, 1, 3)
    """

    counts: Counter[Came] = field(default_factory=Counter)
    parked: list[Parked] = field(default_factory=list)
    outputs: int = 0

    @property
    def rows(self) -> int:
        """How many rows there were."""
        return self.counts.total()

    def add(self, other: Report) -> None:
        """Count another chunk's rows along."""
        self.counts.update(other.counts)
        self.parked += other.parked
        self.outputs += other.outputs


def came_of(claim: Claim, claimed: Claimed) -> Came:
    """What a claim's answer says of its row."""
    if claimed.verdict is Verdict.CLAIMED:
        return Came.NEW
    if claimed.verdict is Verdict.CONFLICT:
        return Came.CONFLICT
    same = claim.position is not None and claim.position == claimed.position
    return Came.REPLAY if same else Came.DUPLICATE
