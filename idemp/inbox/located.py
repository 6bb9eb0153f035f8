"""Where a store that keeps claims with entities has a handled message."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from idemp.inbox.content import Handling


@dataclass(frozen=True, slots=True)
class Located:
    """A handled message, and its place.

    Attributes:
        place: the stream and the commit, or the document.
        handling: the claim, when it was committed, and its outputs.

    Example:
        >>> Located.__slots__
        ('place', 'handling')
    """

    place: str
    handling: Handling
