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
from idemp.exact import read_number, rounded
from idemp.messages import CLOUDEVENT_SOURCE_HEADER, JSON_CONTENT_TYPE, Message, canonical_json, parse_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from idemp.clock import Clock

STRUCTURED_CONTENT_TYPE: Final = "application/cloudevents+json"
_PREFIXES: Final = ("cloudEvents_", "cloudEvents:", "ce-", "ce_")
"""Of the AMQP 1.0 binding; of Knative's binding for RabbitMQ; of Kafka's, which bridges pass on."""
_OWN: Final = _PREFIXES[0]
_LONG, _SHORT = _PREFIXES[:2], _PREFIXES[2:]
_CARRIED: Final = {"traceparent", "tracestate", "baggage"}


def unwrap(message: Message) -> Message:
    """A message with its CloudEvents attributes where idemp looks for them; other messages come back as they are.

    Raises:
        UndecodableMessage: it says it is a CloudEvent and is none, or its headers say two things of one attribute.

    Example:
        >>> body = b'{"specversion":"1.0","id":"1","source":"/shop","type":"orders.Placed","data":{"sku":"A"}}'
        >>> event = unwrap(Message(body=body, content_type="application/cloudevents+json"))
        >>> event.type, event.message_id, event.body
        ('orders.Placed', '1', b'{"sku":"A"}')
    """
    if message.content_type.partition(";")[0].strip().lower() == STRUCTURED_CONTENT_TYPE:
        return _unwrap_structured(message)
    sets = {prefix: attributes for prefix in _PREFIXES if (attributes := _attributes(message, prefix))}
    if not sets:
        return message
    (prefix, attributes), *others = sets.items()
    for other, repeated in others:
        _check_agree(prefix, attributes, other, repeated)
    bare = {name: value for name, value in message.headers.items() if not name.startswith(tuple(sets))}
    return _with_attributes(replace(message, headers=bare), attributes)


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
            event = {
                **attributes,
                **carried,
                "datacontenttype": message.content_type,
                "data": json.loads(message.body, parse_float=read_number),
            }
            return replace(message, body=canonical_json(event), content_type=STRUCTURED_CONTENT_TYPE)
        prefixed = {f"{_OWN}{name}": value for name, value in attributes.items()}
        return replace(message, headers={**message.headers, **prefixed})

    return wrap


def _attributes(message: Message, prefix: str) -> dict[str, Any]:
    """The attributes that headers with this prefix hold; none if they are no event's."""
    found = {name[len(prefix) :]: value for name, value in message.headers.items() if name.startswith(prefix)}
    # Other headers may begin with the short ones: only an event says which version of the specification it is of.
    return found if prefix not in _SHORT or "specversion" in found else {}


def _check_agree(prefix: str, attributes: Mapping[str, Any], other: str, repeated: Mapping[str, Any]) -> None:
    """Refuse two sets of headers of which each could be the event: a bridge may have added one, and either may be stale.

    Raises:
        UndecodableMessage: they disagree in an attribute that both have.
    """
    for name in sorted(attributes.keys() & repeated.keys()):
        if not _is_same(name, attributes[name], repeated[name]):
            raise UndecodableMessage(
                f"The CloudEvent has two sets of attributes, and its headers {prefix}{name} and {other}{name} disagree.",
                fix="Have its producer, or the bridge that it came by, send one set.",
            )


def _is_same(name: str, value: Any, other: Any) -> bool:
    if name == "time" and (moment := _time(value)) is not None:
        return moment == _time(other)
    return type(value) is type(other) and bool(value == other)


def _unwrap_structured(message: Message) -> Message:
    event = parse_json(message)
    if not isinstance(event, dict):
        raise UndecodableMessage("The body of a structured CloudEvent is no JSON object.", fix="Mend the producer.")
    if "data_base64" in event:
        raise UndecodableMessage("The CloudEvent carries binary data; idemp decodes JSON only.")
    attributes = {name: rounded(value) for name, value in event.items() if name != "data"}
    content_type = attributes.pop("datacontenttype", JSON_CONTENT_TYPE)
    if not isinstance(content_type, str):
        raise UndecodableMessage("The CloudEvent's datacontenttype is no text.", fix="Mend the producer.")
    bare = replace(
        message,
        body=canonical_json(event.get("data")),
        content_type=content_type,
        headers={**message.headers, **{name: attributes[name] for name in _CARRIED if name in attributes}},
    )
    return _with_attributes(bare, attributes)


def _with_attributes(message: Message, attributes: Mapping[str, Any]) -> Message:
    missing = [name for name in ("specversion", "id", "source", "type") if not attributes.get(name)]
    if missing:
        raise UndecodableMessage(f"The CloudEvent lacks {', '.join(missing)}.", fix="Mend the producer.")
    if attributes["specversion"] != "1.0":
        raise UndecodableMessage(f"CloudEvents version {attributes['specversion']!r} is unknown; 1.0 is read.")
    for name in ("id", "source", "type"):
        if not isinstance(attributes[name], str):
            raise UndecodableMessage(
                f"The CloudEvent's {name} is no text but a {type(attributes[name]).__name__}: two may read the same.",
                fix="Mend the producer.",
            )
    headers = {name: value for name, value in message.headers.items() if not name.startswith(_LONG)}
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
