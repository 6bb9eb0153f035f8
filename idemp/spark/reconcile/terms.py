"""By which terms messages are judged, and the words for what is found. No Spark in it."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

from idemp.errors import ConfigurationError

DEFAULT_GRACE: Final = timedelta(minutes=15)
DEFAULT_RETENTION: Final = timedelta(days=7)


class Kind(enum.StrEnum):
    """What can be wrong with a message; of these, a message may have several.

    Example:
        >>> Kind("lost").meaning
        'sent, and not handled within the grace time'
    """

    LOST = "lost"
    CONFLICTING = "conflicting"
    UNDISPATCHED = "undispatched"
    UNKNOWN_ORIGIN = "unknown_origin"
    UNUSABLE = "unusable"
    DUPLICATED = "duplicated"
    LATE = "late"

    @property
    def meaning(self) -> str:
        """What it says of a message, for people."""
        return _MEANINGS[self]


_MEANINGS: Final = {
    Kind.LOST: "sent, and not handled within the grace time",
    Kind.CONFLICTING: "sent again under the same id with another body, or handled with another one",
    Kind.UNDISPATCHED: "handled, and an output has no confirm after the grace time, or was given up",
    Kind.UNKNOWN_ORIGIN: "handled, and never sent as far as the log goes",
    Kind.UNUSABLE: "sent without an id that can be used, or unreadable",
    Kind.DUPLICATED: "sent more than once with the same body, from different places",
    Kind.LATE: "handled, and later than the grace time",
}


class Fate(enum.StrEnum):
    """What became of a message; each has one.

    Example:
        >>> Fate.NOT_YET
        <Fate.NOT_YET: 'not_yet'>
    """

    HANDLED = "handled"  #: sent, and in the inbox
    INITIATED = "initiated"  #: in the inbox as the start of work outside a handler: nobody sends these
    NOT_YET = "not_yet"  #: sent within the grace time before the snapshot, and not handled so far
    UNKNOWN = "unknown"  #: sent longer ago than claims are kept: whether it was handled is no longer known
    OUTSIDE = "outside"  #: sent, or claimed, outside of the span that is judged
    LOST = "lost"  #: see `Kind`
    UNKNOWN_ORIGIN = "unknown_origin"  #: see `Kind`
    UNUSABLE = "unusable"  #: see `Kind`


@dataclass(frozen=True, kw_only=True)
class Terms:
    """By which messages are judged. All times are aware.

    Attributes:
        as_of: the moment that the inbox was read as of.
        since: the first moment judged: from here on the log has all that was sent.
        until: the last one.
        grace: how long a message may take until it is handled, and its outputs until they are confirmed.
        retention: how long claims are kept.
        windows: the same for single message types.

    Raises:
        ConfigurationError: a time without a zone; a grace time or window that is negative; an end before the beginning.

    Example:
        >>> from datetime import UTC
        >>> noon = datetime(2026, 1, 1, 12, tzinfo=UTC)
        >>> Terms(as_of=noon, since=noon - timedelta(hours=6), until=noon).settled.isoformat()
        '2026-01-01T11:45:00+00:00'
    """

    as_of: datetime
    since: datetime
    until: datetime
    grace: timedelta = DEFAULT_GRACE
    retention: timedelta = DEFAULT_RETENTION
    windows: Mapping[str, timedelta] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("as_of", "since", "until"):
            if getattr(self, name).tzinfo is None:
                raise ConfigurationError(f"{name} is a time without a zone.", fix="Say UTC, or another one.")
        if self.since > self.until:
            raise ConfigurationError(f"The span ends ({self.until}) before it begins ({self.since}).")
        if self.grace < timedelta(0) or min((self.retention, *self.windows.values())) <= timedelta(0):
            raise ConfigurationError("A grace time is not negative, and a window longer than nothing.")

    @property
    def settled(self) -> datetime:
        """What was sent, or claimed, by then should have come to an end."""
        return self.as_of - self.grace

    @property
    def claims_since(self) -> datetime:
        """Claims from before then may be of messages sent before the span."""
        return self.since + self.grace

    def kept_since(self, window: timedelta) -> datetime:
        """Claims from before then may be gone."""
        return self.as_of - window
