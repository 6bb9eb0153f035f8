"""What the brokers of our own share: how a message is kept, and what settling changes about it."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from idemp.messages import ATTEMPT_HEADER, DEAD_PREFIX, DEFERRED_HEADER, FIRST_SEEN_HEADER, Message, counter

if TYPE_CHECKING:
    from idemp.broker.port import Park, Retry

DEAD_SUFFIX: Final = ".dead"


def dead_queue(queue: str) -> str:
    """The name of a queue's dead-letter queue.

    Example:
        >>> dead_queue("orders")
        'orders.dead'
    """
    return queue + DEAD_SUFFIX


def attempt_of(message: Message) -> int:
    """The number of the attempt that a delivery of this message is, from its header; 1 if there is no usable one.

    Example:
        >>> attempt_of(Message(body=b"")), attempt_of(Message(body=b"", headers={"idemp-attempt": 3}))
        (1, 3)
    """
    value = message.headers.get(ATTEMPT_HEADER)
    return value if type(value) is int and value > 0 else 1


def retried(message: Message, retry: Retry, now: datetime) -> Message:
    """The copy that a `Retry` leaves in the queue.

    Example:
        >>> from datetime import UTC, timedelta
        >>> from idemp.broker.port import Retry
        >>> noon = datetime(2025, 1, 1, 12, tzinfo=UTC)
        >>> retried(Message(body=b""), Retry(timedelta(seconds=1), counted=True), noon).headers
        {'idemp-first-seen': '2025-01-01T12:00:00+00:00', 'idemp-attempt': 2}
    """
    headers = {FIRST_SEEN_HEADER: now.isoformat(), **message.headers}
    if retry.counted:
        headers[ATTEMPT_HEADER] = retry.attempt or attempt_of(message) + 1
    else:
        headers[DEFERRED_HEADER] = counter(message.headers, DEFERRED_HEADER) + 1
    return replace(message, headers=headers)


def parked(message: Message, park: Park) -> Message:
    """The copy that a `Park` leaves in the dead-letter queue.

    Example:
        >>> from idemp.broker.port import Park
        >>> parked(Message(body=b"", headers={"tenant": 1}), Park("Refuse")).headers
        {'tenant': 1, 'idemp-dead-reason': 'Refuse'}
    """
    return replace(message, headers={**message.headers, f"{DEAD_PREFIX}reason": park.reason, **park.headers})


def properties_text(message: Message) -> str:
    """Everything of a message but its body, as JSON text.

    Raises:
        TypeError: a header's value is no JSON value.
        ValueError: a header's value contains itself.
    """
    values: dict[str, Any] = {
        "type": message.type,
        "message_id": message.message_id,
        "content_type": message.content_type,
        "correlation_id": message.correlation_id,
        "reply_to": message.reply_to,
        "headers": dict(message.headers),
        "timestamp": message.timestamp.isoformat() if message.timestamp is not None else None,
        "ttl": message.ttl,
        "priority": message.priority,
    }
    return json.dumps({name: value for name, value in values.items() if value is not None})


def restored(properties: str, body: bytes) -> Message:
    """A message made again from its properties and body.

    Example:
        >>> message = Message(body=b"{}", type="orders.Placed", headers={"tenant": 0}, priority=0)
        >>> restored(properties_text(message), b"{}") == message
        True
    """
    values: dict[str, Any] = json.loads(properties)
    timestamp = values.pop("timestamp", None)
    return Message(body=body, timestamp=datetime.fromisoformat(timestamp) if timestamp else None, **values)
