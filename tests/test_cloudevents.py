"""CloudEvents in both modes, in and out, and together with the official SDK."""

from __future__ import annotations

import itertools
import json
from datetime import UTC, datetime
from typing import Any

import pytest
from cloudevents.core.bindings import amqp
from cloudevents.core.formats.json import JSONFormat
from cloudevents.core.v1.event import CloudEvent

from idemp import Context, Idempotent, Outcome
from idemp.cloudevents import STRUCTURED_CONTENT_TYPE, unwrap, wrapper
from idemp.errors import UndecodableMessage
from idemp.identity import Key
from idemp.messages import CLOUDEVENT_SOURCE_HEADER, Message
from idemp.testing.clock import FakeClock
from tests.house import House, memory_house

ATTRIBUTES: dict[str, Any] = {
    "id": "event-1",
    "source": "/shop",
    "type": "orders.Placed",
    "specversion": "1.0",
    "time": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
    "datacontenttype": "application/json",
    "tenant": "acme",
}
DATA = {"sku": "A-1", "größe": [1, 2.5, None, False, ""]}
MODES = ["cloudevents-binary", "cloudevents-structured"]


def sdk_message(mode: str) -> Message:
    """What a producer with the SDK sends."""
    event = CloudEvent(attributes=dict(ATTRIBUTES), data=DATA)
    write = amqp.to_structured if mode.endswith("structured") else amqp.to_binary
    sent = write(event, JSONFormat())
    return Message(
        body=sent.application_data,
        content_type=sent.properties["content-type"],
        headers=sent.application_properties,
        message_id="transport-7",
    )


@pytest.mark.parametrize("mode", MODES)
def test_event_of_the_sdk_arrives(mode: str) -> None:
    event = unwrap(sdk_message(mode))
    assert (event.type, event.message_id, event.timestamp) == ("orders.Placed", "event-1", ATTRIBUTES["time"])
    assert (json.loads(event.body), event.content_type) == (DATA, "application/json")
    assert (event.headers[CLOUDEVENT_SOURCE_HEADER], event.headers["cloudEvents_tenant"]) == ("/shop", "acme")
    assert Key.cloudevent().effective(event, None, "t") == Key.message_id().effective(event, None, "t")


@pytest.mark.parametrize("mode", MODES)
def test_both_modes_are_the_same_message(mode: str) -> None:
    """One producer that changes its mode changes neither ids nor fingerprints."""
    house = memory_house()
    house.app.handler(dict, type="orders.Placed", policy=Idempotent())(
        lambda message, ctx: house.effects.write(ctx, "sale")
    )
    assert house.deliver(sdk_message(MODES[0])) is Outcome.HANDLED
    assert house.deliver(sdk_message(mode)) is Outcome.SKIPPED
    assert house.sales() == 1


@pytest.mark.parametrize("mode", MODES)
def test_the_sdk_reads_what_we_send(mode: str) -> None:
    message = Message(
        body=json.dumps(DATA).encode(),
        type="orders.Placed",
        message_id="output-1",
        headers={"traceparent": "00-1-2-01"},
    )
    wrap = wrapper(mode, "/idemp/orders", FakeClock())
    assert wrap is not None
    sent = wrap(message)
    received = amqp.from_amqp_event(
        amqp.AMQPMessage(
            properties={"content-type": sent.content_type},
            application_properties=dict(sent.headers),
            application_data=sent.body,
        )
    )
    assert isinstance(received, CloudEvent)
    assert (received.get_id(), received.get_source(), received.get_type()) == (
        "output-1",
        "/idemp/orders",
        "orders.Placed",
    )
    assert received.get_time() == FakeClock().now()
    data = received.get_data()
    assert (json.loads(data) if isinstance(data, str | bytes) else data) == DATA


@pytest.mark.parametrize("mode", MODES)
def test_our_own_consumer_reads_what_we_send(mode: str) -> None:
    wrap = wrapper(mode, "/idemp/orders", FakeClock())
    assert wrap is not None
    message = Message(body=b'{"a":1}', type="orders.Placed", message_id="output-1", headers={"mine": 0}, priority=0)
    back = unwrap(wrap(message))
    assert (back.body, back.type, back.message_id, back.headers["mine"], back.priority) == (
        b'{"a":1}', "orders.Placed", "output-1", 0, 0,
    )  # fmt: skip
    assert unwrap(back) == back


def test_binary_mode_leaves_the_bytes_alone() -> None:
    body = b'{ "b":1,\n "a":  2 }'
    wrap = wrapper("cloudevents-binary", "/s", FakeClock())
    assert wrap is not None
    assert wrap(Message(body=body, type="t", message_id="1")).body == body
    assert wrapper("amqp", "/s", FakeClock()) is None


@pytest.mark.parametrize("prefix", ["cloudEvents_", "cloudEvents:", "ce-", "ce_"])
def test_each_binding_s_prefix_is_read(prefix: str) -> None:
    """AMQP 1.0's two, that of Knative's binding for RabbitMQ, and Kafka's: the same event under all of them."""
    headers = {f"{prefix}{name}": str(ATTRIBUTES[name]) for name in ("id", "source", "type", "specversion")}
    event = unwrap(Message(body=b"{}", headers={**headers, f"{prefix}tenant": "acme", "mine": 1}, message_id="t-7"))
    assert (event.message_id, event.type) == ("event-1", "orders.Placed")
    assert event.headers == {
        **{f"cloudEvents_{name}": str(ATTRIBUTES[name]) for name in ("id", "source", "type", "specversion", "tenant")},
        "mine": 1,
    }
    assert Key.cloudevent().effective(event, None, "t").text == "/shop,event-1"
    assert unwrap(event) == event


def test_headers_that_begin_as_an_event_s() -> None:
    """Without a version of the specification it is somebody's own header."""
    message = Message(body=b"{}", headers={"ce-mark": "2026", "ce_id": 7})
    assert unwrap(message) is message
    event = Message(body=b"{}", headers={**sdk_message(MODES[0]).headers, "ce-mark": "2026"})
    assert unwrap(event).headers["ce-mark"] == "2026"


@pytest.mark.parametrize("name", ["id", "source", "type"])
@pytest.mark.parametrize("value", [1, 1.0, True, ["1"], {"a": 1}])
def test_attributes_that_are_no_texts(name: str, value: Any) -> None:
    """`1` and `"1"` would be one event."""
    attributes = {**{each: str(ATTRIBUTES[each]) for each in ("id", "source", "type", "specversion")}, name: value}
    binary = Message(body=b"{}", headers={f"ce-{each}": found for each, found in attributes.items()})
    whole = Message(body=json.dumps(attributes).encode(), content_type=STRUCTURED_CONTENT_TYPE)
    for message in (binary, whole):
        with pytest.raises(UndecodableMessage, match=f"{name} is no text"):
            unwrap(message)


def test_other_messages_come_back_as_they_are() -> None:
    message = Message(body=b"{}", type="t", headers={"mine": 1})
    assert unwrap(message) is message


@pytest.mark.parametrize("attribute", ["id", "source", "type", "specversion", "time", "tenant"])
@pytest.mark.parametrize(
    "pair", [*itertools.permutations(["cloudEvents_", "cloudEvents:", "ce-", "ce_"], 2)], ids="".join
)
def test_two_sets_of_attributes_that_disagree(pair: tuple[str, str], attribute: str) -> None:
    """Whichever were taken, the other one may be the event: a duplicate would have two ids, or two events one."""
    attributes = {**ATTRIBUTES, "time": ATTRIBUTES["time"].isoformat()}
    first, second = ({f"{prefix}{name}": value for name, value in attributes.items()} for prefix in pair)
    same = unwrap(Message(body=b"{}", headers={**first, **second, f"{pair[1]}time": "2026-01-02T04:04:05+01:00"}))
    assert (same.type, same.message_id, same.timestamp) == ("orders.Placed", "event-1", ATTRIBUTES["time"])
    assert not [name for name in same.headers if name.startswith(("cloudEvents:", "ce-", "ce_"))]
    assert unwrap(same) == same
    other = "2027-01-02T03:04:05Z" if attribute == "time" else "another"
    with pytest.raises(UndecodableMessage, match=f"{attribute} disagree"):
        unwrap(Message(body=b"{}", headers={**first, **second, f"{pair[1]}{attribute}": other}))


@pytest.mark.parametrize(
    "event",
    [
        b"[]", b"{}", b"not json", b'{"specversion":"1.0","id":"1","source":"/s"}',
        b'{"specversion":"0.3","id":"1","source":"/s","type":"t"}',
        b'{"specversion":"1.0","id":"","source":"/s","type":"t"}',
        b'{"specversion":"1.0","id":"1","source":"/s","type":"t","data_base64":"AA=="}',
        b'{"specversion":"1.0","id":"1","source":"/s","type":"t","datacontenttype":5,"data":{}}',
        b'{"specversion":"1.0","id":"1","id":"2","source":"/s","type":"t"}',
    ],
)  # fmt: skip
def test_says_it_is_one_and_is_none(event: bytes) -> None:
    with pytest.raises(UndecodableMessage):
        unwrap(Message(body=event, content_type=f"{STRUCTURED_CONTENT_TYPE}; charset=utf-8"))


def test_half_an_event_in_binary_mode() -> None:
    with pytest.raises(UndecodableMessage, match="source, type"):
        unwrap(Message(body=b"{}", headers={"cloudEvents_id": "1", "cloudEvents_specversion": "1.0"}))


@pytest.mark.parametrize("time", ["", "yesterday", "2026-01-01T00:00:00", True, 10**30, 1.5, None])
def test_times_that_are_none(time: Any) -> None:
    headers = {f"cloudEvents_{name}": str(ATTRIBUTES[name]) for name in ("id", "source", "type", "specversion")}
    assert unwrap(Message(body=b"{}", headers={**headers, "cloudEvents_time": time})).timestamp is None


@pytest.mark.parametrize("mode", MODES)
def test_outputs_keep_their_bytes_however_often_they_are_sent(mode: str) -> None:
    """The attribute `time` is written once, and stored."""
    house: House = memory_house(wire=mode)

    def place(message: dict[str, Any], ctx: Context) -> None:
        ctx.send({"sku": message["sku"]}, to="stock", type="stock.Reserve")

    house.app.handler(dict, type="orders.Placed", policy=Idempotent())(place)
    first = house.deliver(sdk_message(mode))
    house.clock.advance()
    assert [first, house.deliver(sdk_message(mode))] == [Outcome.HANDLED, Outcome.REDISPATCHED]
    one, two = house.publisher.sent
    assert one.marked_redispatched() == two
    event = unwrap(one.message)
    assert (event.message_id, event.type) == (str(one.id), "stock.Reserve")
    assert event.headers[CLOUDEVENT_SOURCE_HEADER] == "/idemp/shop"
