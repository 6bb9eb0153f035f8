"""Whatever properties a stranger sends make a message, and a message survives the way to properties and back."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from idemp.broker.kombu.wire import attempt_of, copied_headers, message_of, properties_of
from idemp.messages import Message, is_json

SHORT = st.text(max_size=60)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | SHORT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(SHORT, inner, max_size=3),
    max_leaves=8,
)
NAMES = SHORT.filter(lambda name: not name.startswith("x-"))
MESSAGES = st.builds(
    Message,
    body=st.binary(max_size=50),
    type=st.none() | SHORT,
    message_id=st.none() | SHORT,
    content_type=st.sampled_from(["application/json", "text/plain", "application/cloudevents+json; charset=utf-8"]),
    correlation_id=st.none() | SHORT,
    reply_to=st.none() | SHORT,
    headers=st.dictionaries(NAMES, JSON, max_size=4),
    timestamp=st.none() | st.integers(0, 2**33).map(lambda seconds: datetime.fromtimestamp(seconds, UTC)),
    ttl=st.none() | st.integers(0, 10**9).map(lambda milliseconds: milliseconds / 1000),
    priority=st.none() | st.integers(0, 255),
)
ANYTHING = st.recursive(
    JSON
    | st.binary(max_size=9)
    | st.datetimes()
    | st.floats()
    | st.decimals(allow_nan=False, allow_infinity=False, min_value=-9, max_value=9, places=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(SHORT | st.binary(max_size=9), inner, max_size=3),
    max_leaves=8,
)


@given(MESSAGES)
def test_a_message_survives_its_properties(message: Message) -> None:
    """There and back it is equal."""
    properties = properties_of(message)
    headers = properties.pop("application_headers")
    assert message_of(properties, headers, message.body) == message


@given(
    st.dictionaries(SHORT | st.binary(max_size=9), ANYTHING, max_size=4),
    st.fixed_dictionaries(
        {},
        optional={
            "content_type": SHORT | st.binary(max_size=9),
            "content_encoding": SHORT,
            "type": SHORT | st.binary(max_size=9),
            "message_id": SHORT | st.binary(max_size=9),
            "expiration": SHORT,
            "timestamp": st.integers(-(2**63), 2**64),
            "priority": ANYTHING,
        },
    ),
    st.none() | st.binary(max_size=9) | SHORT,
)
def test_nothing_a_stranger_sends_raises(headers, properties, body) -> None:
    """Headers become JSON values, texts become text, the body bytes."""
    message = message_of(properties, headers, body)
    json.dumps(dict(message.headers), allow_nan=False)
    assert isinstance(message.body, bytes)
    assert attempt_of(headers) >= 1


def test_header_types() -> None:
    """What AMQP has beyond JSON."""
    headers = {
        "bytes": b"\xff1",
        "date": datetime(2026, 1, 2),
        "decimal": Decimal("1.5"),
        "nan": float("nan"),
    }
    assert message_of({}, headers, b"").headers == {
        "bytes": "\ufffd1",
        "date": "2026-01-02T00:00:00+00:00",
        "decimal": 1.5,
        "nan": None,
    }


@pytest.mark.parametrize("name", ["x-death", "x-delivery-count", "x-first-death-queue", "x-last-death-reason"])
def test_what_brokers_wrote_is_left_out(name: str) -> None:
    """Both of what the user sees and of copies."""
    assert message_of({}, {name: 1, "mine": 2}, b"").headers == {"mine": 2}
    assert copied_headers({name: 1, "mine": 2}) == {"mine": 2}


@pytest.mark.parametrize("encoding", ["gzip", "utf-16", "bogus;type=x"])
def test_encoded_bodies_keep_their_properties(encoding: str) -> None:
    """Not JSON while here, and as before when published again."""
    message = message_of({"content_type": "application/json", "content_encoding": encoding}, {}, b"..")
    assert not is_json(message.content_type)
    properties = properties_of(message)
    assert (properties["content_type"], properties["content_encoding"]) == ("application/json", encoding)


@pytest.mark.parametrize("encoding", ["utf-8", "UTF-8", "binary", None, ""])
def test_plain_bodies(encoding: str | None) -> None:
    """As kombu and others write it."""
    assert message_of({"content_encoding": encoding}, {}, b"{}").content_type == "application/json"
