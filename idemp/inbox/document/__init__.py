"""An inbox for stores whose only transaction is the conditional write of one document.

Ids of handled messages stand in the documents of the entities that the messages are about: see
`docs/explanation/documents.md`.

>>> inbox = DocumentInbox(InMemoryDocuments(), places={"carts.Add": Place(lambda entity: f"cart:{entity}")})
>>> inbox.place("carts.Add").of("7")
'cart:7'
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from idemp.inbox.document.inbox import DocumentInbox
from idemp.inbox.document.memory import InMemoryDocuments
from idemp.inbox.document.port import Document, Documents, DocumentTooLarge, RevisionConflict
from idemp.inbox.document.state import Place
from idemp.inbox.document.unit import DocumentSession, DocumentUnit

if TYPE_CHECKING:
    from idemp.context import Context

__all__ = [
    "Document",
    "DocumentInbox",
    "DocumentSession",
    "DocumentTooLarge",
    "DocumentUnit",
    "Documents",
    "InMemoryDocuments",
    "Place",
    "RevisionConflict",
    "document_of",
    "session_of",
]


def document_of(ctx: Context) -> dict[str, Any]:
    """The document of the entity that the message is about, to be changed in place; empty where it does not exist yet.

    Raises:
        TypeError: the handler's store is no `DocumentInbox`.
        HandlerError: the message's type is not opted in; see `DocumentSession.open`.

    Example:
        >>> def add(message: dict, ctx: Context) -> None:
        ...     cart = document_of(ctx)
        ...     cart["items"] = cart.get("items", 0) + 1
    """
    return session_of(ctx).document


def session_of(ctx: Context) -> DocumentSession:
    """The session of a handler on documents, typed: what `ctx.session` is.

    Raises:
        TypeError: the handler's store is no `DocumentInbox`.

    Example:
        >>> def add(message: dict, ctx: Context) -> None:
        ...     prices = session_of(ctx).read("prices") or {}
    """
    session: Any = ctx.session
    if not isinstance(session, DocumentSession):
        raise TypeError(f"This handler's session is a {type(session).__name__}, and its store no DocumentInbox.")
    return session
