"""A message as a row of the data pipeline, and back: id, type, body, headers, time, position.

Rows have no columns for the other properties that a consumer reads. Where a message has them they stand among its headers,
under names of idemp's own.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from idemp.cloudevents import unwrap
from idemp.errors import ConfigurationError, UndecodableMessage
from idemp.exact import rounded
from idemp.messages import JSON_CONTENT_TYPE, Message, parse_json

if TYPE_CHECKING:
    from datetime import datetime

CONTENT_TYPE_HEADER: Final = "idemp-content-type"
CORRELATION_HEADER: Final = "idemp-correlation-id"
REPLY_TO_HEADER: Final = "idemp-reply-to"
MAX_POSITION_BYTES: Final = 255
"""Longest source position in UTF-8 bytes: it is stored with the claim."""

PROPERTIES: Final = {
    CONTENT_TYPE_HEADER: "content_type",
    CORRELATION_HEADER: "correlation_id",
    REPLY_TO_HEADER: "reply_to",
}
"""Headers that stand for properties of the message."""


class Columns(NamedTuple):
    """A message with its source position, in the order of the pipeline's columns.

    Attributes:
        id: the message id; of a CloudEvent its id, while its source stands in the headers.
        type: the message type.
        body: the payload.
        headers: a JSON object, `None` without any.
        time: when the producer says that it made the message.
        position: where the message lies in its source, the same at each reading.
    """

    id: str | None
    type: str | None
    body: bytes
    headers: str | None
    time: datetime | None
    position: str


def columns_of(message: Message, position: str) -> Columns:
    """A message as a row, with the CloudEvents attributes where a consumer would find them.

    What says that it is a CloudEvent and is none stays as it came; it will be parked by whoever handles it.

    Example:
        >>> message = Message(body=b"{}", type="t", message_id="m-1", correlation_id="c-1", headers={"tenant": 7})
        >>> columns_of(message, "orders#17")
        Columns(id='m-1', type='t', body=b'{}', headers='{"tenant": 7, "idemp-correlation-id": "c-1"}', time=None, \
position='orders#17')
    """
    with suppress(UndecodableMessage):
        message = unwrap(message)
    headers = dict(message.headers)
    for header, name in PROPERTIES.items():
        value = getattr(message, name)
        if value is not None and not (name == "content_type" and value == JSON_CONTENT_TYPE):
            headers[header] = value
    return Columns(
        id=message.message_id,
        type=message.type,
        body=message.body,
        headers=json.dumps(headers) if headers else None,
        time=message.timestamp,
        position=position,
    )


def message_of(
    id: str | None, type: str | None, body: bytes | None, headers: str | None, time: datetime | None
) -> Message:
    """The message that a row is.

    Raises:
        UndecodableMessage: the headers are no JSON object.

    Example:
        >>> row = columns_of(Message(body=b"x", content_type="text/plain", reply_to="till", headers={"a": 1}), "orders#17")
        >>> found = message_of(*row[:5])
        >>> found.content_type, found.reply_to, found.headers
        ('text/plain', 'till', {'a': 1})
    """
    named = _headers(headers)
    properties = {name: named.pop(header) for header, name in PROPERTIES.items() if isinstance(named.get(header), str)}
    message = Message(body=body or b"", type=type, message_id=id, timestamp=time, headers=named)
    return replace(message, **properties)


def position(source: str, place: int) -> str:
    """A source position.

    Example:
        >>> position("orders-topic/3", 1201)
        'orders-topic/3#1201'
    """
    return f"{source}#{place}"


def check_source(source: str) -> None:
    """See that all positions in a source can be stored.

    Raises:
        ConfigurationError: its name is too long.

    Example:
        >>> check_source("q" * 250)
        Traceback (most recent call last):
        ...
        idemp.errors.ConfigurationError: The source's name has 250 bytes; 235 is the limit for stored positions. ...
    """
    longest = MAX_POSITION_BYTES - len(position("", 2**63))
    size = len(source.encode())
    if size > longest:
        raise ConfigurationError(
            f"The source's name has {size} bytes; {longest} is the limit for stored positions.",
            fix="Give the queue, topic or folder a shorter name.",
        )


def _headers(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value = parse_json(Message(body=text.encode()))
    except UnicodeEncodeError as error:
        raise UndecodableMessage("The headers are no valid Unicode text.", fix="Mend the source.") from error
    if not isinstance(value, dict):
        raise UndecodableMessage("The headers are no JSON object.", fix="Mend the mapping of the source's columns.")
    return {name: rounded(item) for name, item in value.items()}
