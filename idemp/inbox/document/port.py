"""The document port: what `DocumentInbox` asks of a store whose only transaction is one conditional write."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from idemp.errors import MessageError, StoreError, TransientStoreError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

OWN: Final = "idemp/"
"""What the ids of idemp's own documents begin with; those of users may not."""


class RevisionConflict(TransientStoreError):
    """Another revision is there than the one expected, or none, or one where none was expected; nothing was changed.

    Example:
        >>> issubclass(RevisionConflict, TransientStoreError)
        True
    """


class UnreadableDocument(StoreError):
    """One document is not as idemp keeps documents: something else wrote it, before idemp perhaps."""


class DocumentRefused(StoreError):
    """The store was reached, and refuses this write for what is in the document; nothing was changed."""


class DocumentTooLarge(MessageError):
    """The document has more bytes than the store takes; nothing was changed, and trying again does not help.

    Example:
        >>> print(DocumentTooLarge.of("cart-7", 500_000, 400_000))
        The document 'cart-7' has 500000 bytes as JSON, and its store takes 400000. The database was not committed. ...
    """

    @classmethod
    def of(cls, id: str, size: int, largest: int, ids: int = 0) -> DocumentTooLarge:
        """The error about one document; sizes in bytes, and how many of them are `ids` of handled messages."""
        share = f"; {ids} of them are ids of handled messages" if ids else ""
        return cls(
            f"The document {id!r} has {size} bytes as JSON, and its store takes {largest}{share}.",
            fix="Keep less in it, or emit smaller or fewer messages from one handling."
            + (" Shorten the retention of its message types, or choose smaller entities." if ids else ""),
        )


@dataclass(frozen=True, slots=True)
class Document:
    """One committed version of a document.

    Attributes:
        id: its name in the collection.
        body: a JSON object.
        revision: names this version: opaque, and never the same twice for one id, deletions in between included. An adapter
            may return a subclass of `str` that also holds what the next write of the document needs.

    Example:
        >>> Document("cart-7", {"items": []}, "1-a").revision
        '1-a'
    """

    id: str
    body: Mapping[str, Any]
    revision: str


class Documents(Protocol):
    """One collection of JSON documents. Its only transaction is the conditional write of one document.

    An adapter sends each request once: a repeated conditional write that had succeeded would answer "conflict". Where an
    answer was lost it says so (`CommitUnknown`); switch off the retries of client libraries. Safe to share between threads.

    All methods raise `StoreUnavailable` where the store can't be reached and nothing was sent, and `TransientStoreError`
    where it is too busy (throttled) and changed nothing.

    Attributes:
        largest: bytes that one document may have as JSON.
    """

    largest: int

    def read(self, id: str) -> Document | None:
        """The latest committed version, never a stale copy; `None` if there is none.

        Raises:
            UnreadableDocument: it is not as `write` leaves documents.
        """
        ...

    def write(self, id: str, body: Mapping[str, Any], expected: str | None) -> str:
        """Write the whole body if `expected` is its present revision, or with `None` if the document does not exist.

        What the store keeps with the document beside its body, and this port does not show, stays as it is: attachments of
        CouchDB, further attributes of a DynamoDB item.

        Returns:
            The new revision.

        Raises:
            RevisionConflict: it is not; this very request changed nothing, and never will.
            CommitUnknown: the answer was lost: it may have been written, or may be still.
            DocumentTooLarge: nothing was changed.
            DocumentRefused: the store has rules for documents, and this one breaks them.
            HandlerError: the body has a field that only the store itself may write.
        """
        ...

    def delete(self, id: str, expected: str) -> None:
        """Delete the document if `expected` is its present revision.

        Raises:
            RevisionConflict: it is not, or the document does not exist; nothing was changed.
            CommitUnknown: the answer was lost.
        """
        ...

    def scan(self, prefix: str, cursor: str | None = None, limit: int = 500) -> tuple[Sequence[Document], str | None]:
        """Up to `limit` documents whose ids begin with `prefix`, and the cursor of the next page; `None` at the end.

        In any order, each once. They may be stale, and what is written meanwhile may be missing.
        """
        ...

    def verify(self) -> None:
        """Look whether the collection is there and set up such that the above holds.

        Raises:
            GuaranteeError: it is set up so that reads may be stale, for example.
            StoreUnavailable: it can't be reached.
        """
        ...

    def close(self) -> None:
        """Give connections back."""
        ...


def size_of(body: Mapping[str, Any]) -> int:
    """Bytes of a document as compact JSON.

    Example:
        >>> size_of({"a": "é"})
        10
    """
    return len(json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode())
