"""What the adapters of document stores share: ids that can be one, bodies as bytes, answers that were lost."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from idemp.errors import CommitUnknown, StoreError, StoreUnavailable, UnaddressableMessage
from idemp.inbox.document.port import DocumentTooLarge

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_ID_BYTES: Final = 2048
"""What DynamoDB takes as a key; CouchDB has no limit of its own, and a URL has about eight thousand bytes."""


def usable(id: str) -> str:
    """The id itself, if a document can have it.

    Raises:
        UnaddressableMessage: it can't; ids come from what messages are about, so the message is parked.

    Example:
        >>> usable("cart-7")
        'cart-7'
        >>> usable("")
        Traceback (most recent call last):
        ...
        idemp.errors.UnaddressableMessage: '' can't be a document's id. The database was not committed. Ids have 1 to ...
    """
    if not id or not _is_text(id) or len(id.encode()) > MAX_ID_BYTES:
        raise UnaddressableMessage(
            f"{id[:64]!r} can't be a document's id.", fix=f"Ids have 1 to {MAX_ID_BYTES} bytes as UTF-8."
        )
    return id


def as_json(id: str, body: Mapping[str, Any], largest: int) -> str:
    """A body as compact JSON.

    Raises:
        DocumentTooLarge: it has more bytes than `largest`.
        StoreError: it holds something that JSON does not have.

    Example:
        >>> as_json("cart-7", {"items": ["é"]}, 100)
        '{"items":["é"]}'
    """
    try:
        text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        size = len(text.encode())
    except (TypeError, ValueError) as error:
        raise StoreError(
            f"The document {id!r} is no JSON: {error}.",
            fix="Keep objects, arrays, strings, numbers and booleans in it.",
        ) from error
    if size > largest:
        raise DocumentTooLarge.of(id, size, largest)
    return text


def lost(store: object, why: object, *, writes: bool) -> StoreUnavailable:
    """The error about a request that was sent, or may have been, and has no answer.

    Example:
        >>> print(lost("Table carts", "timed out", writes=True))
        Table carts: a write was sent, and no answer came: timed out. Whether the database was committed is unknown. ...
    """
    if not writes:
        return StoreUnavailable(f"{store}: no answer came: {why}.")
    return CommitUnknown(
        f"{store}: a write was sent, and no answer came: {why}.",
        fix="Run the delivery again: the state document tells which it was.",
    )


def _is_text(id: str) -> bool:
    try:
        id.encode()
    except UnicodeEncodeError:
        return False
    return True
