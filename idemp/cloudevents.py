"""CloudEvents 1.0 in binary and structured mode, in and out.

Source: CloudEvents 1.0.2 core, JSON format and AMQP binding. The body's bytes are passed on untouched in binary mode, and in
structured mode the data is written once and stored; that is why no SDK re-encodes it here (the tests compare with one).
"""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from idemp.errors import UndecodableMessage
from idemp.messages import CLOUDEVENT_SOURCE_HEADER, JSON_CONTENT_TYPE, Message, canonical_json, parse_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from idemp.clock import Clock

STRUCTURED_CONTENT_TYPE: Final = "application/cloudevents+json"
_PREFIXES: Final = ("cloudEvents_", "cloudEvents:")
_OWN: Final = _PREFIXES[0]
_CARRIED: Final = {"traceparent", "tracestate", "baggage"}


def unwrap(message: Message) -> Message:
    """A message with its CloudEvents attributes where idemp looks for them; other messages come back as they are.

    Raises:
        UndecodableMessage: it says it is a CloudEvent and is none.

    Example:
        >>> body = b'{"specversion":"1.0","id":"1","source":"/shop","type":"orders.Placed","data":{"sku":"A"}}'
        >>> event = unwrap(Message(body=body, content_type="application/cloudevents+json"))
        >>> event.type, event.message_id, event.body
        ('orders.Placed', '1', b'{"sku":"A"}')
    """
    if message.content_type.partition(";")[0].strip().lower() == STRUCTURED_CONTENT_TYPE:
        return _unwrap_structured(message)
    attributes = {
        name[len(prefix) :]: value
        for name, value in message.headers.items()
        for prefix in _PREFIXES
        if name.startswith(prefix)
    }
    return _with_attributes(message, attributes) if attributes else message


def wrapper(mode: str, source: str, clock: Clock) -> Callable[[Message], Message] | None:
    """What puts outgoing messages into CloudEvents form, `None` for plain AMQP properties.

    Args:
        mode: "amqp", "cloudevents-binary" or "cloudevents-structured".
        source: the CloudEvents source of outgoing messages.
        clock: source of the `time` attribute.
    """
    if mode == "amqp":
        return None
    structured = mode == "cloudevents-structured"

    def wrap(message: Message) -> Message:
        attributes = {
            "specversion": "1.0",
            "id": message.message_id,
            "source": source,
            "type": message.type or "idemp.return",
            "time": (message.timestamp or clock.now()).isoformat().replace("+00:00", "Z"),
        }
        if structured:
            carried = {name: value for name, value in message.headers.items() if name in _CARRIED}
            event = {**attributes, **carried, "datacontenttype": message.content_type, "data": json.loads(message.body)}
            return replace(message, body=canonical_json(event), content_type=STRUCTURED_CONTENT_TYPE)
        prefixed = {f"{_OWN}{name}": value for name, value in attributes.items()}
        return replace(message, headers={**message.headers, **prefixed})

    return wrap


def _unwrap_structured(message: Message) -> Message:
    event = parse_json(message)
    if not isinstance(event, dict):
        raise UndecodableMessage("The body of a structured CloudEvent is no JSON object.", fix="Mend the producer.")
    if "data_base64" in event:
        raise UndecodableMessage("The CloudEvent carries binary data; idemp decodes JSON only.")
    attributes = {name: value for name, value in event.items() if name != "data"}
    content_type = attributes.pop("datacontenttype", JSON_CONTENT_TYPE)
    if not isinstance(content_type, str):
        raise UndecodableMessage("The CloudEvent's datacontenttype is no text.", fix="Mend the producer.")
    bare = replace(
        message,
        body=canonical_json(event.get("data")),
        content_type=content_type,
        headers={**message.headers, **{name: event[name] for name in _CARRIED if name in event}},
    )
    return _with_attributes(bare, attributes)


def _with_attributes(message: Message, attributes: Mapping[str, Any]) -> Message:
    missing = [name for name in ("specversion", "id", "source", "type") if not attributes.get(name)]
    if missing:
        raise UndecodableMessage(f"The CloudEvent lacks {', '.join(missing)}.", fix="Mend the producer.")
    if attributes["specversion"] != "1.0":
        raise UndecodableMessage(f"CloudEvents version {attributes['specversion']!r} is unknown; 1.0 is read.")
    headers = {name: value for name, value in message.headers.items() if not name.startswith(_PREFIXES)}
    headers.update((f"{_OWN}{name}", value) for name, value in attributes.items())
    headers[CLOUDEVENT_SOURCE_HEADER] = str(attributes["source"])
    return replace(
        message,
        type=str(attributes["type"]),
        message_id=str(attributes["id"]),
        timestamp=_time(attributes.get("time")) or message.timestamp,
        headers=headers,
    )


def _time(value: object) -> datetime | None:
    try:
        match value:
            case str():
                moment = datetime.fromisoformat(value)
            case int() if value is not True and value is not False:  # an AMQP timestamp, as the SDKs write it
                moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=value)
            case _:
                return None
    except (ValueError, OverflowError):
        return None
    return moment if moment.tzinfo else None
