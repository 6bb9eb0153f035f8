"""A message as STOMP headers and bytes, for idemp at the other end and for everybody else.

Texts that STOMP can carry stand in headers of their own, where JMS, a browser of queues or a selector finds them. What it
can't say exactly (numbers, lists, empty texts, line ends, names that the broker uses itself) is JSON in `idemp-more-0`,
`-1`, …, which also says that the message is one of ours: the broker takes at most 10 KiB a header.
"""

from __future__ import annotations

import json
import re
import time
from datetime import UTC, datetime
from itertools import count, islice
from typing import TYPE_CHECKING, Any, Final

from idemp.messages import JSON_CONTENT_TYPE, Message

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

DUE: Final = "idemp-due"
"""Of a message that waits beside its queue: when it comes due, milliseconds since 1970."""
UNSAYABLE: Final = (TypeError, ValueError, RecursionError)
"""What `headers_of` raises."""

_MORE: Final = "idemp-more-"
_MESSAGE_ID: Final = "idemp-message-id"
_LONGEST: Final = 4000  # bytes, each of which may be escaped: the broker takes 10 KiB a header
_MOST_PLAIN: Final = 500  # the broker takes a thousand headers
_LARGEST: Final = 400 * _LONGEST
_LONGEST_TTL: Final = 1e14  # seconds; more milliseconds than that are no number of Java's
_PRIORITIES: Final = 9
_DEFAULT_PRIORITY: Final = "4"
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,199}")
_QUEUE: Final = "/queue/"

#: Fields of a message, and the header of each.
_FIELDS: Final = {
    "type": "type",
    "message_id": _MESSAGE_ID,
    "content_type": "content-type",
    "correlation_id": "correlation-id",
    "reply_to": "reply-to",
}
#: Headers that belong to the protocol or the broker, on the way in or out.
_RESERVED: Final = frozenset({
    *_FIELDS.values(), "ack", "activemq", "browser", "content-length", "destination", "expires", "id", "message-id",
    "original-destination", "persistent", "priority", "receipt", "receipt-id", "redelivered", "redeliverycounter",
    "scheduledjobid", "selector", "subscription", "timestamp", "transaction", "transformation", "transformation-error", DUE,
})  # fmt: skip
_RESERVED_PREFIXES: Final = (_MORE, "amq_", "jms", "activemq.")
_NOT_FORWARDED: Final = frozenset({
    "ack", "content-length", "destination", "message-id", "receipt", "redelivered", "redeliverycounter", "subscription",
    "timestamp", "transaction", DUE,
})  # fmt: skip


def destination(queue: str) -> str:
    """The destination of a queue's name; what is one already, such as a temporary queue of JMS, stays.

    Example:
        >>> destination("orders"), destination("/temp-queue/answers")
        ('/queue/orders', '/temp-queue/answers')
    """
    return queue if queue.startswith("/") else _QUEUE + queue


def headers_of(message: Message, *, wait: float = 0.0, lasting: bool = False) -> dict[str, str]:
    """Everything of a message but its body and destination.

    Args:
        message: what is to be sent.
        wait: seconds that it waits first, in which it does not grow old.
        lasting: whether it is kept however old it is, as in a dead-letter queue.

    Raises:
        TypeError: a header's value is no JSON value.
        ValueError: a header's value contains itself, or is too large.
        RecursionError: it is nested too deeply.

    Example:
        >>> headers_of(Message(body=b"{}", type="orders.Placed", headers={"tenant": "a", "size": 2}))
        {'persistent': 'true', 'type': 'orders.Placed', 'content-type': 'application/json', 'tenant': 'a', \
'idemp-more-0': '{"headers": {"size": 2}}'}
    """
    found = {"persistent": "true"}
    more: dict[str, Any] = {}
    for field, name in _FIELDS.items():
        value = getattr(message, field)
        if value is not None and _plain(value):
            found[name] = destination(value) if field == "reply_to" else value
        elif value is not None:
            more[field] = value
    sayable = (
        name
        for name, value in message.headers.items()
        if _NAME.fullmatch(name) and not _is_reserved(name) and _plain(value)
    )
    plain = set(islice(sayable, _MOST_PLAIN))
    found |= {name: message.headers[name] for name in plain}
    if message.timestamp is not None:
        more["timestamp"] = message.timestamp.isoformat()
    if message.priority is not None:
        more["priority"] = message.priority
        found["priority"] = str(max(0, min(message.priority, _PRIORITIES)))
    if message.ttl is not None:
        more["ttl"] = message.ttl
    if message.ttl is not None and not lasting:
        found["expires"] = str(round(1000 * (time.time() + wait + message.ttl)))
    if len(plain) < len(message.headers):
        more["headers"] = {name: value for name, value in message.headers.items() if name not in plain}
    return found | _chunks(json.dumps(more))


def message_of(headers: Mapping[str, str], body: bytes) -> Message:
    """The message that came; what a foreign producer left out or wrote badly is left out, too.

    Example:
        >>> sent = Message(body=b"{}", type="orders.Placed", message_id="m-1", headers={"size": 2, "a:b": ""}, priority=0)
        >>> message_of(headers_of(sent), b"{}") == sent
        True
        >>> foreign = message_of({"message-id": "ID:x:1", "priority": "7", "tenant": "a", "reply-to": "/queue/r"}, b"")
        >>> foreign.message_id, foreign.priority, foreign.headers, foreign.reply_to
        ('ID:x:1', 7, {'tenant': 'a'}, 'r')
    """
    values: dict[str, Any] = {field: headers[name] for field, name in _FIELDS.items() if name in headers}
    if values.get("reply_to", "").startswith(_QUEUE):
        values["reply_to"] = values["reply_to"].removeprefix(_QUEUE)
    values.setdefault("content_type", JSON_CONTENT_TYPE)
    plain = {name: value for name, value in headers.items() if not _is_reserved(name)}
    more = _more(headers)
    if more is None:
        values.setdefault("message_id", headers.get("message-id"))
        return Message(body=body, headers=plain, **values, **_native(headers))
    values.update(more)
    return Message(body=body, headers={**plain, **values.pop("headers", {})}, **values)


def forwarded(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers with which a message that came is sent on as it is.

    Example:
        >>> forwarded({"message-id": "ID:x:1", "destination": "/queue/a.waiting", "tenant": "a", "expires": "0"})
        {'tenant': 'a', 'persistent': 'true'}
    """
    kept = {name: value for name, value in headers.items() if name.lower() not in _NOT_FORWARDED}
    if kept.get("expires") == "0":
        del kept["expires"]
    return {**kept, "persistent": "true"}


def _chunks(text: str) -> dict[str, str]:
    if len(text) > _LARGEST:
        raise ValueError(f"its headers take {len(text)} bytes")
    starts = range(0, len(text), _LONGEST)
    return {f"{_MORE}{number}": text[start : start + _LONGEST] for number, start in enumerate(starts)}


def _plain(value: Any) -> bool:
    """Whether a text goes through STOMP, JMS and the broker as it is."""
    if not isinstance(value, str) or not value.isprintable() or value != value.strip():
        return False
    return 0 < len(value.encode()) <= _LONGEST


def _is_reserved(name: str) -> bool:
    lower = name.lower()
    return lower in _RESERVED or lower.startswith(_RESERVED_PREFIXES)


def _more(headers: Mapping[str, str]) -> dict[str, Any] | None:
    parts: list[str] = []
    for number in count():
        part = headers.get(f"{_MORE}{number}")
        if part is None:
            break
        parts.append(part)
    try:
        found = json.loads("".join(parts)) if parts else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    read = {name: reads(found[name]) for name, reads in _READS.items() if name in found}
    return {name: value for name, value in read.items() if value is not None}


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _time(value: Any) -> datetime | None:
    try:
        found = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        return None
    return found if found.tzinfo is not None else None


def _seconds(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if 0 <= value <= _LONGEST_TTL else None


def _number(value: Any) -> int | None:
    return value if type(value) is int else None


def _table(value: Any) -> dict[str, Any] | None:
    return value if isinstance(value, dict) else None


#: Fields that `idemp-more-…` may hold, and what reads each: anybody can write one, and badly.
_READS: Final[Mapping[str, Callable[[Any], Any]]] = {
    **dict.fromkeys(_FIELDS, _text),
    "timestamp": _time,
    "priority": _number,
    "ttl": _seconds,
    "headers": _table,
}


def _native(headers: Mapping[str, str]) -> dict[str, Any]:
    """What JMS has of a foreign message."""
    sent, expires = whole(headers.get("timestamp")), whole(headers.get("expires"))
    priority = headers.get("priority", _DEFAULT_PRIORITY)
    return {
        "timestamp": datetime.fromtimestamp(sent / 1000, UTC) if sent else None,
        "ttl": max(0.0, (expires - sent) / 1000) if sent and expires else None,
        "priority": whole(priority) if priority != _DEFAULT_PRIORITY else None,
    }


def whole(text: str | None) -> int | None:
    """A number that a header holds, `None` for anything else.

    Example:
        >>> whole("12"), whole("-1"), whole("9" * 5000), whole(None)
        (12, None, None, None)
    """
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 15 else None  # noqa: PLR2004
