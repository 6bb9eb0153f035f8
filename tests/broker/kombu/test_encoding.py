"""Byte for byte what py-amqp writes."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any

import amqp
import pytest
from amqp import spec
from amqp.method_framing import frame_writer
from amqp.serialization import dumps
from hypothesis import given
from hypothesis import strategies as st

from idemp.broker.kombu import encoding
from tests.broker.kombu.test_wire import ANYTHING

UNSAYABLE = (ValueError, IndexError, TypeError, AttributeError, struct.error, amqp.exceptions.AMQPError)
SHORT = st.text(max_size=60)
NUMBERS = st.integers(-(2**63), 2**63 - 1)
HEADERS = st.dictionaries(SHORT, SHORT | NUMBERS | ANYTHING, max_size=5)
KINDS = {
    "s": SHORT | st.binary(max_size=60),
    "F": HEADERS,
    "o": st.integers(0, 255),
    "L": st.integers(0, 2**64 - 1),
}
PROPERTIES = st.fixed_dictionaries(
    {}, optional={name: st.none() | KINDS[kind] for name, kind in amqp.Message.PROPERTIES}
)
SAYABLE = st.fixed_dictionaries(
    {"type": SHORT, "application_headers": st.dictionaries(SHORT, SHORT | NUMBERS, max_size=3)}
)
LENGTHS = st.sampled_from([0, 1, 15, 16, 17, 4087, 4088, 4089, 9000])


def written(frame_max: int, *arguments: Any) -> bytes:
    """What py-amqp makes of a method with its content."""
    pieces: list[bytes] = []
    transport = SimpleNamespace(write=lambda data: pieces.append(bytes(data)))
    connection = SimpleNamespace(frame_max=frame_max, bytes_sent=0)
    frame_writer(connection, transport)(*arguments)
    return b"".join(pieces)


@given(PROPERTIES)
def test_properties(properties: dict[str, Any]) -> None:
    """Whatever properties there are, and whatever stands in the headers."""
    theirs = amqp.Message(b"", **{name: value for name, value in properties.items() if value is not None})
    try:
        expected = theirs._serialize_properties()
    except UNSAYABLE:
        with pytest.raises(UNSAYABLE):
            encoding.encoded(properties)
    else:
        assert encoding.encoded(properties) == expected


@given(st.integers(1, 2047), SHORT, SHORT, st.booleans(), SAYABLE, LENGTHS)
def test_publishes(
    channel: int, exchange: str, routing_key: str, mandatory: bool, properties: dict[str, Any], length: int
) -> None:
    """In one frame, or in many."""
    body = bytes(number % 251 for number in range(length))
    theirs = amqp.Message(body, **{name: value for name, value in properties.items() if value is not None})
    arguments = dumps("Bssbb", (0, exchange, routing_key, mandatory, False))
    ours = encoding.publish(
        channel,
        exchange,
        routing_key,
        mandatory=mandatory,
        properties=encoding.encoded(properties),
        body=body,
        frame_max=4096,
    )
    assert ours == written(4096, 1, channel, spec.Basic.Publish, arguments, theirs)


@given(st.integers(1, 2047), st.integers(0, 2**64 - 1), st.booleans())
def test_acks(channel: int, tag: int, multiple: bool) -> None:
    """Of one, and of all up to it."""
    theirs = written(4096, 1, channel, spec.Basic.Ack, dumps("Lb", (tag, multiple)), None)
    assert encoding.ack(channel, tag, multiple=multiple) == theirs


@pytest.mark.parametrize(
    "properties",
    [
        {"type": "x" * 256},
        {"type": 5},
        {"priority": 256},
        {"priority": -1},
        {"timestamp": -1},
        {"application_headers": {"k" * 256: "v"}},
        {"application_headers": {"k": object()}},
        {"application_headers": {"k": "v", 3: "v"}},
    ],
)
def test_what_amqp_cannot_say(properties: dict[str, Any]) -> None:
    """Is found before anything is sent, as `parcel` expects it."""
    with pytest.raises(UNSAYABLE):
        encoding.encoded(properties)
