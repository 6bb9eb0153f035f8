"""What an inbox keeps beside the handlings, as one JSON document: consuming time, identities, queues."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from idemp.inbox.content import Content
from idemp.inbox.document.port import OWN

if TYPE_CHECKING:
    from collections.abc import Mapping
    from uuid import UUID

BOOKS: Final = f"{OWN}books"
_INTERVALS_KEPT: Final = 500
"""Of consuming, one consumer's newest: each standstill begins another. A window that they don't fill has not begun."""


def starts_of(consumer: str) -> str:
    """What the ids of a consumer's starts begin with.

    Example:
        >>> starts_of("orders")
        'idemp/start/orders/'
    """
    return f"{OWN}start/{quote(consumer, safe='')}/"


def start_id(consumer: str, key: UUID) -> str:
    """The id of the document that counts a message's starts."""
    return f"{starts_of(consumer)}{key}"


def encoded(content: Content) -> dict[str, Any]:
    """As a JSON object.

    Example:
        >>> decoded(encoded(Content())) == Content()
        True
    """
    return {
        "consumed": {
            consumer: [[moment.isoformat() for moment in interval] for interval in intervals[-_INTERVALS_KEPT:]]
            for consumer, intervals in content.consumed.items()
        },
        "identities": [
            [*key, ended_at.isoformat() if ended_at is not None else None]
            for key, ended_at in content.identities.items()
        ],
        "queues": [[*place, used_at.isoformat()] for place, used_at in content.queues.items()],
    }


def decoded(body: Mapping[str, Any]) -> Content:
    """What `encoded` made of it."""
    return Content(
        consumed={
            consumer: [(_moment(started), _moment(ended)) for started, ended in intervals]
            for consumer, intervals in body["consumed"].items()
        },
        identities={
            (consumer, message_type, descriptor): _moment(ended_at) if ended_at is not None else None
            for consumer, message_type, descriptor, ended_at in body["identities"]
        },
        queues={(consumer, queue): _moment(used_at) for consumer, queue, used_at in body["queues"]},
    )


def _moment(text: str) -> datetime:
    return datetime.fromisoformat(text)
