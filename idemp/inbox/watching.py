"""Warnings about entities, each once: documents that are nearly full, and entities that two consumers share."""

from __future__ import annotations

from typing import Final

from idemp.showing import logger

log = logger("idemp.inbox")

NEARLY_FULL: Final = 0.8
"""Share of the bytes that a document may have, from which on its growth is worth a warning."""
_REMEMBERED: Final = 1_000


class Warned:
    """What a process has warned of. Safe to share between threads; a warning may come twice if there are very many.

    Example:
        >>> warned = Warned()
        >>> warned.first("cart-7"), warned.first("cart-7")
        (True, False)
    """

    def __init__(self) -> None:
        self._seen: set[object] = set()

    def first(self, subject: object) -> bool:
        """Whether this is the first warning about it."""
        if subject in self._seen:
            return False
        if len(self._seen) >= _REMEMBERED:
            self._seen.clear()
        self._seen.add(subject)
        return True

    def shared(self, consumer: str, other: str, entity: str) -> None:
        """Warn of two consumers that keep what they handled in one stream or one document."""
        if self.first((consumer, other)):
            log.warning(
                "the entity %r is one for the consumers %s and %s: each sees, and competes with, what the other one writes; "
                "if that is not meant, make their entities differ, by a prefix in the policy's entity",
                entity,
                consumer,
                other,
                extra={"event": "entity_shared", "consumer": consumer, "other": other, "entity": entity},
            )

    def nearly_full(self, consumer: str, id: str, size: int, largest: int, ids: int) -> None:
        """Warn of a document that the store will refuse before long."""
        if size > NEARLY_FULL * largest and self.first(("size", id)):
            log.warning(
                "the document %r has %d bytes of the %d that its store takes, with %d ids of handled messages; shorten the "
                "retention of its message types, choose smaller entities, or keep less in it",
                id,
                size,
                largest,
                ids,
                extra={
                    "event": "document_nearly_full",
                    "consumer": consumer,
                    "document": id,
                    "bytes": size,
                    "largest": largest,
                    "ids": ids,
                },
            )
