"""CloudEvents: both modes and all prefixes are one message, in and out."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pytest
from cloudevents.core.bindings.amqp import AMQPMessage, from_amqp_event, to_binary_event, to_structured_event
from cloudevents.core.v1.event import CloudEvent
from pydantic import BaseModel

from idemp import App, ConfigurationError, Context, Idempotent
from idemp.cloudevents import STRUCTURED, read_event
from idemp.errors import Unreadable
from idemp.handlers import Handler
from idemp.identity import event_id, message_digest
from idemp.messages import Delivery
from idemp.sql.records.claims import InboxRecords

ID = "018f0000-0000-7000-8000-000000000000"
ATTRIBUTES = {
    "specversion": "1.0",
    "id": ID,
    "source": "/shop",
    "type": "shop.Pay",
    "time": "2026-11-27T12:00:00Z",
    "subject": "ä",
}
DATA = {"cents": 1.5, "b": [1, None]}


class Pay(BaseModel):
    __message_type__ = "shop.Pay"
    cents: float


def binary(prefix: str, **changes: Any) -> Delivery:
    headers = {f"{prefix}{name}": value for name, value in (ATTRIBUTES | changes).items() if value is not None}
    return Delivery("billing", {"headers": {"x": 1, **headers}, "content_type": "application/json"}, json.dumps(DATA).encode())


def structured(content: str = STRUCTURED, **changes: Any) -> Delivery:
    event = {name: value for name, value in (ATTRIBUTES | {"data": DATA} | changes).items() if value is not None}
    return Delivery("billing", {"headers": {"x": 1}, "content_type": content}, json.dumps(event).encode())


HANDLER = Handler("billing", Pay, lambda _: None, Idempotent())
WAYS = [
    *(binary(prefix) for prefix in ("cloudEvents_", "cloudEvents:", "ce-", "ce_")),
    structured(),
    structured(f"{STRUCTURED}; charset=utf-8", datacontenttype="application/json"),
    replace(structured(), body=json.dumps(ATTRIBUTES | {"data": DATA, "data_base64": None}).encode()),  # not set
    structured(data=None, data_base64=base64.b64encode(json.dumps(DATA).encode()).decode()),
]


def test_both_modes_and_all_prefixes_give_one_id_one_fingerprint_and_the_same_properties() -> None:
    events = list(map(read_event, WAYS))
    claims = [HANDLER.accept(event)[1] for event in events]
    assert all(claim == claims[0] for claim in claims)
    assert claims[0] is not None
    assert (claims[0].original, claims[0].key) == event_id("/shop", ID)
    assert str(claims[0].key) == "018f0000-0000-8b07-9e79-a122c92d4bfb"  # a golden value, ordered by time as the id is
    assert claims[0].made_at == 1713691951.104
    for event in events:
        properties = event.properties
        assert {name: properties[name] for name in ("message_id", "source", "type")} == {
            "message_id": ID,
            "source": "/shop",
            "type": "shop.Pay",
        }
        assert properties["timestamp"] == datetime(2026, 11, 27, 12, tzinfo=UTC).timestamp()
        assert (properties["headers"]["cloudEvents_subject"], properties["headers"]["x"]) == ("ä", 1)
        assert read_event(event).properties == properties or properties["content_type"] == "application/json"


def test_the_same_id_of_another_source_is_another_message() -> None:
    keys = {str(event_id(source, id)[1]) for source in ("/shop", "/other") for id in (ID, "7")}
    assert len(keys) == 4


@pytest.mark.parametrize(
    ("delivery", "reason"),
    [
        (binary("ce-", specversion="0.3"), "version '0.3'"),
        (binary("ce-", id=7), "id of the CloudEvent"),
        (binary("cloudEvents_", source=None), "the CloudEvent has no source: it has id, specversion, subject, time, type"),
        (structured(type=""), "type of the CloudEvent"),
        (structured(data=None, data_base64="%"), "base64"),
        (structured("application/cloudevents-batch+json"), "a batch of CloudEvents"),
        (structured("application/cloudevents+avro"), "not a CloudEvent in JSON"),
        (Delivery("billing", {"content_type": STRUCTURED}, b"[]"), "not a CloudEvent in JSON"),
        (
            Delivery(
                "billing",
                {"headers": binary("ce-").properties["headers"] | binary("cloudEvents_", id="8").properties["headers"]},
                b"{}",
            ),
            "disagree about id",
        ),
    ],
)
def test_what_is_no_event_is_refused(delivery: Delivery, reason: str) -> None:
    with pytest.raises(Unreadable, match=reason):
        read_event(delivery)


def test_a_time_of_no_use_is_none() -> None:
    for time in (10**400, "yesterday", "2026-11-27T12:00:00", True):
        assert "timestamp" not in read_event(structured(time=time)).properties
    assert read_event(binary("ce-", time=1_764_000_000_500)).properties["timestamp"] == 1_764_000_000.5


def test_other_messages_stay_as_they_are() -> None:
    for headers in ({}, {"ce-lebrity": "x"}, {"cloudEvents_id": "7"}, None, [1]):
        delivery = Delivery("billing", {"headers": headers, "content_type": "application/json"}, b"{}")
        assert read_event(delivery) is delivery
    with pytest.raises(Unreadable, match="content type 'text/plain'"):
        HANDLER.accept(read_event(structured(datacontenttype="text/plain")))


def test_copies_of_an_event_in_either_mode_wait_as_one() -> None:
    handler = Handler("billing", Pay, lambda _: None, Idempotent())
    claims = [handler.identify(read_event(each)) for each in (*WAYS, structured(id=ID.upper()))]
    assert len({claim.waiting_identity("billing") for claim in claims if claim}) == 1
    others = [handler.identify(read_event(make(**change))) for make in (structured, partial(binary, "ce-")) for change in OTHERS]
    assert len({claim.waiting_identity("billing") for claim in (claims[0], *others) if claim}) == 1 + len(OTHERS)
    assert message_digest(structured(), "moved") is not None  # its id stands in the body
    assert message_digest(structured(), "moved") != message_digest(structured(id="8"), "moved")


OTHERS: list[dict[str, Any]] = [{"id": "8"}, {"source": "/other"}, {"source": "/third"}]


@pytest.mark.parametrize(
    "data", ['{"n":1e23}', "[1E0, 100000000000000000000000]", '{"b":1, "a":"\\u00fc}"}', '"}"', "7.10", "null"]
)
def test_the_data_of_an_event_is_read_as_it_was_written(data: str) -> None:
    begin = json.dumps({**ATTRIBUTES, "x": {"data": "another"}})[:-1]
    for text in (f'{begin}, "data": {data}}}', f'{{ "data" :{data} ,{begin[1:]}}}'):
        delivery = Delivery("billing", {"content_type": STRUCTURED}, text.encode())
        assert read_event(delivery).body == data.encode()


class Paid(BaseModel):
    __message_type__ = "shop.Paid"
    __cloudevent__ = "binary"
    cents: float


class Booked(Paid):
    __message_type__ = "shop.Booked"
    __cloudevent__ = "structured"
    __cloudevent_source__ = "https://books.example/ä"


def test_outputs_are_events_that_an_sdk_reads_and_that_another_app_handles_once() -> None:
    app, books = App("billing"), App("books", policy=Idempotent())

    @app.handler(Pay, policy=Idempotent())
    def pay(message: Pay, ctx: Context) -> None:
        ctx.send(Paid(cents=message.cents), to="books", headers={"x": "1"})
        ctx.send(Booked(cents=message.cents), to="books")

    @books.handler(Paid)
    @books.handler(Booked)
    def note(message: Paid, ctx: Context) -> None:
        seen.append((message.cents, ctx.headers["cloudEvents_source"], ctx.message_id))

    seen: list[Any] = []
    with app.test() as test:
        for way in WAYS:
            test.send(way.body, **way.properties)
        test.run_until_idle()
        outputs = test.outputs
        (account,), _ = InboxRecords(test.database).explain(json.dumps(["s:/shop", f"s:{ID}"]))
        assert (account.claim.message_id, [output.state for output in account.outputs]) == (ID, ["confirmed", "confirmed"])
        assert test.runs == {"shop.Pay": 1}
    assert [output.properties["headers"]["idemp-causation-id"] for output in outputs] == [ID, ID]
    read = [
        from_amqp_event(AMQPMessage({"content-type": each.properties["content_type"]}, each.properties["headers"], each.body))
        for each in outputs
    ]
    assert [(event.get_id(), event.get_source(), event.get_type(), event.get_data()) for event in read] == [
        (outputs[0].id, "/billing", "shop.Paid", {"cents": 1.5}),
        (outputs[1].id, "https://books.example/ä", "shop.Booked", {"cents": 1.5}),
    ]
    with books.test() as test:
        for output in outputs * 2:
            test.send(output.body, **output.properties)
        test.run_until_idle()
    assert seen == [(1.5, "/billing", outputs[0].id), (1.5, "https://books.example/ä", outputs[1].id)]


def test_an_event_that_causes_another_is_found_from_both_sides() -> None:
    app = App("billing", policy=Idempotent())
    ids: list[str | None] = []

    @app.handler(Pay)
    def pay(message: Pay, ctx: Context) -> None:
        ctx.send(Booked(cents=1), to="billing")

    @app.handler(Booked)
    def booked(message: Booked, ctx: Context) -> None:
        ids.append(ctx.message_id)

    with app.test() as test:
        test.send(structured().body, **structured().properties)
        test.run_until_idle()
        if not ids:  # the broker of the test does not deliver to the app
            test.send(test.outputs[0].body, **test.outputs[0].properties)
            test.run_until_idle()
        records = InboxRecords(test.database)
        first, second = (
            records.explain(json.dumps([f"s:{source}", f"s:{id}"]))[0][0]
            for source, id in (("/shop", ID), ("https://books.example/ä", ids[0]))
        )
        assert [effect.type for effect in first.effects] == ["shop.Booked"]
        assert second.cause is not None
        assert second.cause.original_id == first.claim.original_id


def test_events_of_the_sdk_in_all_its_bindings() -> None:
    event = CloudEvent({**ATTRIBUTES, "time": datetime(2026, 11, 27, 12, tzinfo=UTC)}, DATA)
    for write in (to_binary_event, to_structured_event):
        message = write(event)
        headers = dict(message.application_properties)
        read = read_event(
            Delivery(
                "billing", {"headers": headers, "content_type": message.properties.get("content-type")}, message.application_data
            )
        )
        assert HANDLER.accept(read)[1] == HANDLER.accept(read_event(WAYS[0]))[1]
        assert read.properties["timestamp"] == datetime(2026, 11, 27, 12, tzinfo=UTC).timestamp()


def test_another_mode_is_refused() -> None:
    class Odd(BaseModel):
        __message_type__ = "shop.Odd"
        __cloudevent__ = "batch"

    with pytest.raises(ConfigurationError, match="'binary' or 'structured'"):
        Context("billing", {}, None, None).send(Odd(), to="books")
