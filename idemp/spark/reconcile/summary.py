"""A reconciliation in small: what JSON and the page show. No Spark in it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict

from idemp.spark.reconcile.terms import Fate, Kind, Terms


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Finding(_Frozen):
    """A message with which something is wrong.

    Attributes:
        kind: what it is.
        consumer: whose message.
        type: its message type, empty where nobody says it.
        id: its id, as a person would call it; `None` where it was sent without one.
        key: the inbox's key for it; `None` where its id can't be used.
        sent_at: when it was sent first.
        claimed_at: when it was claimed; `None` where it was not.
        sends: rows of the log.
        outputs: how many it has.
        pending: those without a confirm.
        quarantined: of these, those that a relay gave up.
        fault: the error that parks it, by its class, where its id can't be used.
    """

    kind: Kind
    consumer: str
    type: str
    id: str | None
    key: str | None
    sent_at: datetime | None
    claimed_at: datetime | None
    sends: int
    outputs: int
    pending: int
    quarantined: int
    fault: str | None


class Counts(_Frozen):
    """How many messages met which fate, and how many have which finding.

    Attributes:
        messages: all; the sum of the fates.
        sends: rows of the log that they came from.
        outputs: what was produced.
        pending: outputs without a confirm.
        handled: sent, and in the inbox.
        initiated: claimed by work outside a handler, which nobody sends.
        not_yet: sent within the grace time, not handled so far.
        unknown: sent longer ago than claims are kept.
        outside: not of the span that is judged.
        lost: sent, and not handled within the grace time.
        unknown_origin: handled, and never sent.
        unusable: sent without an id that can be used, or unreadable.
        conflicting: of all of these, those with two bodies.
        undispatched: of all of these, those with an output that has no confirm.
        duplicated: of all of these, those sent more than once.
        late: of those handled, those handled late.
    """

    messages: int = 0
    sends: int = 0
    outputs: int = 0
    pending: int = 0
    handled: int = 0
    initiated: int = 0
    not_yet: int = 0
    unknown: int = 0
    outside: int = 0
    lost: int = 0
    unknown_origin: int = 0
    unusable: int = 0
    conflicting: int = 0
    undispatched: int = 0
    duplicated: int = 0
    late: int = 0

    def of(self, kind: Kind | Fate) -> int:
        """How many are so.

        Example:
            >>> Counts(lost=2).of(Kind.LOST)
            2
        """
        number: int = getattr(self, kind.value)
        return number


class TypeCounts(Counts):
    """The counts of one consumer and message type."""

    consumer: str
    type: str


class HourCounts(Counts):
    """The counts of one hour, by when messages were sent; `None` for those without a time, or outside the span."""

    hour: datetime | None


class Summary(_Frozen):
    """What a reconciliation found.

    Attributes:
        version: of this form; it changes where a field's meaning does.
        as_of: the moment that the inbox was read as of.
        since: the first moment judged.
        until: the last one.
        grace_seconds: how long a message, and its outputs, may take.
        retention_seconds: how long claims are kept.
        totals: over all.
        types: by consumer and message type.
        hours: in order.
        findings: some of each kind, the oldest first; the Parquet files have all.

    Example:
        >>> from datetime import UTC, timedelta
        >>> noon = datetime(2026, 1, 1, 12, tzinfo=UTC)
        >>> terms = Terms(as_of=noon, since=noon - timedelta(hours=6), until=noon)
        >>> summary = Summary.of(terms, totals=Counts(messages=7, handled=5, lost=2), types=[], hours=[], findings=[])
        >>> summary.found(), summary.found(allowed=[Kind.LOST])
        ({<Kind.LOST: 'lost'>: 2}, {})
    """

    version: Literal[1] = 1
    as_of: datetime
    since: datetime
    until: datetime
    grace_seconds: float
    retention_seconds: float
    totals: Counts
    types: list[TypeCounts]
    hours: list[HourCounts]
    findings: list[Finding]

    @classmethod
    def of(
        cls,
        terms: Terms,
        *,
        totals: Counts,
        types: list[TypeCounts],
        hours: list[HourCounts],
        findings: list[Finding],
    ) -> Self:
        """With the terms by which it was judged."""
        return cls(
            as_of=terms.as_of,
            since=terms.since,
            until=terms.until,
            grace_seconds=terms.grace.total_seconds(),
            retention_seconds=terms.retention.total_seconds(),
            totals=totals,
            types=types,
            hours=hours,
            findings=findings,
        )

    def found(self, *, allowed: Sequence[Kind] = ()) -> dict[Kind, int]:
        """The kinds of findings that there are, and how many messages have each, but for those that are allowed."""
        numbers = {kind: self.totals.of(kind) for kind in Kind if kind not in allowed}
        return {kind: number for kind, number in numbers.items() if number}
