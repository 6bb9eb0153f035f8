"""Documents in memory, for tests: the same port and the same conformance suite as a server."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any, Final

from idemp.inbox.document.port import Document, DocumentTooLarge, RevisionConflict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_LARGEST: Final = 16 << 20


class InMemoryDocuments:
    """One collection of documents for one process; loses everything at its end.

    Args:
        largest: bytes that one document may have as JSON.

    Attributes:
        beside: by id, what other programs keep with a document outside of its body, as CouchDB keeps attachments. No write
            changes it; it goes with its document.

    Example:
        >>> documents = InMemoryDocuments()
        >>> first = documents.write("cart-7", {"items": 1}, None)
        >>> second = documents.write("cart-7", {"items": 2}, first)
        >>> documents.write("cart-7", {"items": 3}, first)
        Traceback (most recent call last):
        ...
        idemp.inbox.document.port.RevisionConflict: 'cart-7' has another revision than 1. ...
    """

    def __init__(self, largest: int = _LARGEST) -> None:
        self.largest = largest
        self.beside: dict[str, Any] = {}
        self._kept: dict[str, tuple[bytes, str]] = {}  # as JSON: nobody changes what is in here by changing an object
        self._revisions = 0
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return "InMemoryDocuments()"

    def read(self, id: str) -> Document | None:
        """The latest version."""
        with self._lock:
            found = self._kept.get(id)
        return Document(id, json.loads(found[0]), found[1]) if found is not None else None

    def write(self, id: str, body: Mapping[str, Any], expected: str | None) -> str:
        """Write it if `expected` is its revision."""
        text = json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
        if len(text) > self.largest:
            raise DocumentTooLarge.of(id, len(text), self.largest)
        with self._lock:
            self._check(id, expected)
            revision = self._next_revision(id)
            self._kept[id] = (text, revision)
        return revision

    def delete(self, id: str, expected: str) -> None:
        """Delete it if `expected` is its revision."""
        with self._lock:
            self._check(id, expected)
            del self._kept[id]
            self.beside.pop(id, None)

    def scan(self, prefix: str, cursor: str | None = None, limit: int = 500) -> tuple[Sequence[Document], str | None]:
        """In the order of their ids; the cursor is the last one."""
        with self._lock:
            ids = sorted(id_ for id_ in self._kept if id_.startswith(prefix) and (cursor is None or id_ > cursor))
            page = [(id_, *self._kept[id_]) for id_ in ids[:limit]]
        documents = [Document(id_, json.loads(text), revision) for id_, text, revision in page]
        return documents, documents[-1].id if len(ids) > limit else None

    def verify(self) -> None:
        """It is always ready."""

    def close(self) -> None:
        """Nothing is open."""

    def _check(self, id: str, expected: str | None) -> None:
        found = self._kept.get(id)
        if (found[1] if found is not None else None) != expected:
            wanted = "exists" if expected is None else f"has another revision than {expected}"
            raise RevisionConflict(f"{id!r} {wanted}.", fix="Read it again.")

    def _next_revision(self, id: str) -> str:
        del id  # one count for all of them, so that none repeats even where one is deleted and made again
        self._revisions += 1
        return str(self._revisions)
