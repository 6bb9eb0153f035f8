"""What a look at documents finds: unconfirmed outputs, attempts that did not count, and documents that are nearly full."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

from idemp.diagnosis import Diagnosis
from idemp.inbox.document.port import size_of
from idemp.inbox.resending import unconfirmed
from idemp.inbox.watching import NEARLY_FULL
from idemp.plurals import counted

if TYPE_CHECKING:
    from idemp.clock import Clock
    from idemp.inbox.document.collector import Collector
    from idemp.inbox.document.port import Documents

_LOOKED_AT: Final = 500


class Diagnoses:
    """Looks at attempts and at the documents of their entities, at 500 attempts at most.

    Args:
        states: the documents of entities.
        collector: looks through attempts.
        clock: source of time.

    Example:
        >>> from idemp.inbox.document import DocumentInbox, InMemoryDocuments
        >>> [each.name for each in DocumentInbox(InMemoryDocuments()).diagnose()]
        ['unconfirmed outputs', 'attempts', 'document sizes']
    """

    def __init__(self, states: Documents, collector: Collector, clock: Clock) -> None:
        self._states = states
        self._collector = collector
        self._clock = clock

    def run(self) -> list[Diagnosis]:
        """The three lines.

        Raises:
            StoreUnavailable: the documents can't be read.
        """
        attempts = list(islice(self._collector.attempts(), _LOOKED_AT + 1))
        more = len(attempts) > _LOOKED_AT
        named, orphans, sizes = [], 0, {}
        for attempt in attempts[:_LOOKED_AT]:
            state, record = self._collector.named(attempt)
            named += [attempt] if record is not None else []
            orphans += record is None
            if state.revision is not None:
                sizes[state.id] = size_of(state.read)
        seen = counted(min(len(attempts), _LOOKED_AT), "attempt") + (", of more," if more else "")
        oldest = min((attempt.claimed_at for attempt in named if attempt.pending), default=None)
        return [
            unconfirmed(sum(attempt.pending for attempt in named), self._clock.now() - oldest if oldest else None),
            Diagnosis(
                "ok", "attempts", f"{seen} read; {orphans} of them did not count, and the cleaner deletes them in time"
            ),
            self._of_sizes(sizes),
        ]

    def _of_sizes(self, sizes: dict[str, int]) -> Diagnosis:
        if not sizes:
            return Diagnosis("ok", "document sizes", "no document of an entity was looked at")
        largest = max(sizes, key=sizes.__getitem__)
        share = sizes[largest] / self._states.largest
        detail = f"the largest of {len(sizes)} is {largest!r}, with {share:.0%} of the bytes that its store takes"
        if share <= NEARLY_FULL:
            return Diagnosis("ok", "document sizes", detail)
        fix = "Shorten the retention of its message types, choose smaller entities, or keep less in it."
        return Diagnosis("warning", "document sizes", detail, fix)
