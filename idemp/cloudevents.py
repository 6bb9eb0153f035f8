"""CloudEvents 1.0 over AMQP, in binary and in structured mode, in and out.

Sources: CloudEvents 1.0.2, its JSON event format, and its AMQP protocol binding.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final, Literal
from urllib.parse import quote

from idemp.errors import ConfigurationError, Unreadable
from idemp.messages import ORDINARY, Delivery, Output, check_text, media_type, member_text, parse

__all__ = [
    "PREFIX",
    "SOURCE",
    "STRUCTURED",
    "Mode",
    "event_mode",
    "event_source",
    "is_event",
    "read_event",
    "says_id",
    "write_event",
]

Mode = Literal["binary", "structured"]
FAMILY: Final = "application/cloudevents"
STRUCTURED: Final = f"{FAMILY}+json"
BATCH: Final = f"{FAMILY}-batch+json"
PREFIX: Final = "cloudEvents_"
PREFIXES: Final = (PREFIX, "cloudEvents:", "ce-", "ce_")
"""Prefixes of headers: two of the AMQP binding, and those of HTTP and Kafka, which bridges pass on. RabbitMQ uses the first 3."""
BEGINNINGS: Final = frozenset(prefix[:3] for prefix in PREFIXES)
SOURCE: Final = "source"
"""Property of a delivery that was a CloudEvent: its source, which is a part of its id."""
REQUIRED: Final = ("id", SOURCE, "type")


def read_event(delivery: Delivery) -> Delivery:
    """Return a CloudEvent with its attributes as properties and its data as body; any other delivery is returned unchanged.

    All attributes become headers `cloudEvents_NAME`, in both modes. Headers count as those of an event if they have `specversion`.

    Raises:
        Unreadable: An attribute is missing or invalid, or two sets of headers disagree.

    Example:
        >>> body = b'{"specversion": "1.0", "id": "1", "source": "/shop", "type": "shop.Pay", "data": {"cents": 100}}'
        >>> event = read_event(Delivery("billing", {"content_type": "application/cloudevents+json"}, body))
        >>> event.properties["type"], event.properties["source"], event.properties["message_id"], event.body
        ('shop.Pay', '/shop', '1', b'{"cents": 100}')
    """
    properties = delivery.properties
    content, headers = properties.get("content_type"), properties.get("headers")
    if content not in ORDINARY and media_type(content).startswith(FAMILY):
        return _read_structured(delivery, media_type(content))
    if headers and isinstance(headers, Mapping):
        for name in headers:
            if name[:3] in BEGINNINGS:
                attributes = _attributes(headers)
                return _read(delivery, attributes, delivery.body, content) if attributes else delivery
    return delivery


def is_event(properties: Mapping[str, Any]) -> bool:
    """Return whether a message may be a CloudEvent, whose type only `read_event` can determine.

    Example:
        >>> is_event({"headers": {"ce-type": "shop.Pay"}}), is_event({"type": "shop.Pay"})
        (True, False)
    """
    headers = properties.get("headers")
    in_headers = isinstance(headers, Mapping) and any(str(name)[:3] in BEGINNINGS for name in headers)
    return in_headers or media_type(properties.get("content_type")).startswith(FAMILY)


def says_id(properties: Mapping[str, Any]) -> bool:
    """Return whether a CloudEvent has an id: in a header, or in a structured body, which is assumed to have one.

    Example:
        >>> says_id({"headers": {"ce-id": "7"}}), says_id({"headers": {"id": "7"}})
        (True, False)
    """
    headers = properties.get("headers")
    in_headers = isinstance(headers, Mapping) and any(headers.get(f"{prefix}id") for prefix in PREFIXES)
    return in_headers or media_type(properties.get("content_type")) == STRUCTURED


def write_event(output: Output, mode: Mode, source: str) -> None:
    """Make an output a CloudEvent; its id and type are those of the message.

    Args:
        output: The output; its id is set.
        mode: `binary` adds headers; `structured` puts attributes and data into the body.
        source: A URI reference, such as `/orders`.

    Example:
        >>> output = Output("1", "send", "", "stock", {"type": "shop.Reserve", "timestamp": 0.5}, b'{"sku": "A"}')
        >>> write_event(output, "structured", "/orders")
        >>> json.loads(output.body)["data"], output.properties["content_type"]
        ({'sku': 'A'}, 'application/cloudevents+json')
    """
    properties = output.properties
    made = datetime.fromtimestamp(properties["timestamp"], UTC).isoformat().replace("+00:00", "Z")
    attributes = {"specversion": "1.0", "id": output.id, SOURCE: source, "type": properties["type"], "time": made}
    if mode == "binary":
        properties["headers"] = properties.get("headers", {}) | {f"{PREFIX}{name}": text for name, text in attributes.items()}
        return
    properties["content_type"] = STRUCTURED
    text = json.dumps(attributes | {"datacontenttype": "application/json"}, ensure_ascii=False)
    output.body = text[:-1].encode() + b', "data": ' + output.body + b"}"


def event_mode(model: type) -> Mode | None:
    """Return how messages of a class are sent: as CloudEvents by its attribute `__cloudevent__`, or plain.

    Raises:
        ConfigurationError: The attribute has another value.

    Example:
        >>> event_mode(dict) is None
        True
    """
    mode: Mode | None = getattr(model, "__cloudevent__", None)
    if mode not in (None, "binary", "structured"):
        raise ConfigurationError(f"{model.__name__}: __cloudevent__ = {mode!r} has to be 'binary' or 'structured'")
    return mode


def event_source(model: type, consumer: str) -> str:
    """Return the source of events of a class: its attribute `__cloudevent_source__`, or the name of the consumer as a path.

    Example:
        >>> event_source(dict, "new orders")
        '/new%20orders'
    """
    return check_text(getattr(model, "__cloudevent_source__", f"/{quote(consumer)}"), "__cloudevent_source__")


def _attributes(headers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes that headers have; an empty mapping if they are not those of an event."""
    attributes: dict[str, Any] = {}
    for prefix in PREFIXES:
        own = {name.removeprefix(prefix): value for name, value in headers.items() if name.startswith(prefix)}
        if "specversion" not in own:
            continue
        for name in sorted(attributes.keys() & own.keys()):
            if attributes[name] != own[name]:  # a bridge may have added a set, and either may be old
                raise Unreadable(f"two headers disagree about {name} of the CloudEvent: send one set of them")
        attributes |= own
    return attributes


def _read_structured(delivery: Delivery, content: str) -> Delivery:
    if content == BATCH:
        raise Unreadable("the message is a batch of CloudEvents: send each of them as a message")
    event = parse(delivery.body) if content == STRUCTURED else None
    if not isinstance(event, dict):
        raise Unreadable(f"the content type is {content}, but the body is not a CloudEvent in JSON")
    if (encoded := event.pop("data_base64", None)) is not None:
        try:
            body = base64.b64decode(encoded, validate=True)
        except (binascii.Error, TypeError, ValueError):
            raise Unreadable("data_base64 of the CloudEvent is not base64") from None
    else:
        event.pop("data", None)  # taken from the text, so that the body has the producer's own bytes
        body = member_text(delivery.body, "data") or b"null"
    return _read(delivery, event, body, event.get("datacontenttype"))


def _read(delivery: Delivery, attributes: Mapping[str, Any], body: bytes, content: Any) -> Delivery:
    if attributes.get("specversion") != "1.0":
        raise Unreadable(f"the message is a CloudEvent of version {attributes.get('specversion')!r}; 1.0 is read")
    for name in REQUIRED:
        if attributes.get(name) is None:
            raise Unreadable(f"the CloudEvent has no {name}: it has {', '.join(sorted(attributes)[:20])}")
        check_text(attributes.get(name), f"{name} of the CloudEvent", Unreadable)
    headers = delivery.properties.get("headers") or {}
    kept = {name: value for name, value in headers.items() if not name.startswith(PREFIXES[:2])}
    properties = delivery.properties | {
        "message_id": attributes["id"],
        SOURCE: attributes[SOURCE],
        "type": attributes["type"],
        "content_type": content,
        "headers": kept | {f"{PREFIX}{name}": value for name, value in attributes.items()},
    }
    if (made := _seconds(attributes.get("time"))) is not None:
        properties["timestamp"] = made
    return replace(delivery, properties=properties, body=body)


def _seconds(value: Any) -> float | None:
    """Return a time in seconds since 1970; producers write text or, in headers, milliseconds."""
    try:
        if isinstance(value, int) and not isinstance(value, bool):
            return value / 1000
        moment = datetime.fromisoformat(value) if isinstance(value, str) else value
        # A time without a zone is ambiguous, so it does not count.
        return moment.timestamp() if isinstance(moment, datetime) and moment.tzinfo else None
    except (OverflowError, ValueError):
        return None
