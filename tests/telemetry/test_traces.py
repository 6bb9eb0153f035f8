"""Traces of deliveries and of what they send, through the real protocol."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
from opentelemetry import baggage, context, trace
from opentelemetry.trace import NoOpTracerProvider, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from idemp import App, BatchContext, Context, Idempotent, Inbox, Outcome, Refuse
from idemp.broker.making import make_broker
from idemp.broker.port import Delivery, Topology
from idemp.errors import StoreUnavailable
from idemp.inbox.memory import InMemoryStore
from idemp.prepared import PreparedMessages
from idemp.prepared.memory import InMemoryHome
from idemp.relay import Relay
from idemp.settings import Settings
from idemp.telemetry.opentelemetry import Traces, origin_of
from tests.house import SELL, House, sale
from tests.telemetry.conftest import Spans, opened

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
INCOMING = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}


def traceparents(house: House) -> list[str]:
    return [output.message.headers["traceparent"] for output in house.publisher.sent]


def traceparent(span: ReadableSpan) -> str:
    return f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-{span.context.trace_flags:02x}"


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def test_delivery_continues_the_trace_of_its_message(traced: House, spans: Spans) -> None:
    traced.sells(outputs=2)
    traced.handle(sale("m-1", headers=INCOMING, correlation_id="talk-1"), attempt=2)
    span = spans.one("process")
    assert (span.name, span.kind) == ("process shop", SpanKind.CONSUMER)
    assert span.parent is not None
    assert (f"{span.parent.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)
    assert attributes(span) == {
        "messaging.system": "memory",
        "messaging.operation.type": "process",
        "messaging.operation.name": "process",
        "messaging.destination.name": "shop",
        "messaging.consumer.group.name": "shop",
        "messaging.message.id": "m-1",
        "messaging.message.conversation_id": "talk-1",
        "messaging.message.body.size": len(sale().body),
        "idemp.consumer": "shop",
        "idemp.message_type": SELL,
        "idemp.attempt": 2,
        "idemp.redelivered": False,
        "idemp.message_id": "m-1",
        "idemp.outcome": "handled",
    }
    assert span.status.status_code is StatusCode.UNSET


def test_outputs_carry_the_span_of_their_handling(any_traced: House, spans: Spans) -> None:
    """What the user's own spans inside the handler are called does not matter."""

    def sell(message: dict[str, Any], ctx: Context) -> None:
        ctx.send({}, to="stock", type="stock.Reserve")
        with spans.tracer.start_as_current_span("inside"):
            ctx.send({}, to="stock", type="stock.Reserve", headers={"tenant": 7})

    any_traced.app.handler(dict, type=SELL, policy=Idempotent())(sell)
    any_traced.handle(sale(headers=INCOMING))
    handling = spans.one("process")
    assert traceparents(any_traced) == [traceparent(handling)] * 2
    assert {output.message.headers["tracestate"] for output in any_traced.publisher.sent} == {"vendor=1"}
    inside = spans.one("inside")
    assert inside.parent is not None
    assert inside.parent.span_id == handling.context.span_id
    send = spans.one("send stock")
    assert send.parent is not None
    assert (send.parent.span_id, send.kind, len(send.links)) == (handling.context.span_id, SpanKind.PRODUCER, 0)
    assert attributes(send)["messaging.batch.message_count"] == 2
    assert attributes(send)["messaging.destination.name"] == "stock"


def test_duplicate_links_to_the_first_processing(any_traced: House, spans: Spans) -> None:
    """A later trace of its own, the very bytes and headers of the first, and a link."""
    any_traced.sells(outputs=2)
    any_traced.handle(sale(headers=INCOMING))
    first = spans.one("process")
    any_traced.restart()
    other = f"00-{'c' * 32}-{'d' * 16}-01"
    any_traced.handle(sale(headers={"traceparent": other}))
    again = spans.named("process")[1]
    assert f"{again.context.trace_id:032x}" == "c" * 32
    assert [link.context.span_id for link in again.links] == [first.context.span_id]
    assert [link.context.trace_id for link in again.links] == [first.context.trace_id]
    assert dict(again.links[0].attributes or {}) == {"idemp.link": "first processing"}
    assert attributes(again)["idemp.outcome"] == "redispatched"
    assert traceparents(any_traced) == [traceparent(first)] * 4
    assert [output.message.body for output in any_traced.publisher.sent[:2]] == [
        output.message.body for output in any_traced.publisher.sent[2:]
    ]
    send = spans.named("send stock")[-1]
    assert [link.context.span_id for link in send.links] == [first.context.span_id]


def test_stored_headers_do_not_change_with_the_trace_of_a_redelivery(any_traced: House) -> None:
    any_traced.sells(outputs=1)
    any_traced.script.answers = ["closed"]
    any_traced.handle(sale(headers=INCOMING))
    for number in range(3):
        any_traced.handle(sale(headers={"traceparent": f"00-{'e' * 32}-{number + 1:016x}-01"}))
    assert len(set(traceparents(any_traced))) == 1
    assert len(traceparents(any_traced)) == 3


def test_first_processing_without_traces_is_not_linked_to(spans: Spans) -> None:
    """Its outputs carry the trace of their cause on, which is no handling."""
    with opened("sqlite", Traces(NoOpTracerProvider())) as house:
        house.sells(outputs=1)
        house.handle(sale(headers=INCOMING))
        assert traceparents(house) == [INCOMING["traceparent"]]
        house.restart()
        house.app.observe(Traces(spans.provider))
        house.handle(sale(headers=INCOMING))
    assert len(spans.one("process").links) == 0


def test_without_a_provider_the_headers_of_the_cause_are_passed_on() -> None:
    with opened("memory", Traces()) as house:
        house.sells(outputs=1)
        house.handle(sale(headers={**INCOMING, "baggage": "tenant=7"}))
        (output,) = house.publisher.sent
    assert {name: output.message.headers[name] for name in (*INCOMING, "baggage")} == {
        **INCOMING,
        "baggage": "tenant=7",
    }


def test_span_begins_before_decoding(traced: House, spans: Spans) -> None:
    decoded = []

    def key(message: dict[str, Any]) -> str:
        decoded.append(time.time_ns())
        return str(message["sku"])

    traced.app.handler(dict, type=SELL, policy=Idempotent(key=key))(lambda message: None)
    traced.handle()
    assert (spans.one("process").start_time or 0) <= decoded[0]


def test_baggage_reaches_the_handler_and_its_outputs(traced: House) -> None:
    seen = []

    def sell(message: dict[str, Any], ctx: Context) -> None:
        seen.append(baggage.get_baggage("tenant"))
        ctx.send({}, to="stock", type="stock.Reserve")

    traced.app.handler(dict, type=SELL, policy=Idempotent())(sell)
    traced.handle(sale(headers={**INCOMING, "baggage": "tenant=7"}))
    assert seen == ["7"]
    assert traced.publisher.sent[0].message.headers["baggage"] == "tenant=7"


def test_without_incoming_trace_a_new_one_begins(traced: House, spans: Spans) -> None:
    traced.sells(outputs=1)
    traced.handle()
    span = spans.one("process")
    assert span.parent is None
    assert traceparents(traced) == [traceparent(span)]


@pytest.mark.parametrize("value", ["", "garbage", 7, b"\x00", None, ["00-x"]])
def test_unusable_trace_headers(traced: House, spans: Spans, value: Any) -> None:
    traced.sells(outputs=1)
    assert traced.handle(sale(headers={"traceparent": value, "tracestate": value}))[0] is Outcome.HANDLED
    assert spans.one("process").parent is None


def test_failure_is_recorded(traced: House, spans: Spans) -> None:
    def fail(message: dict[str, Any]) -> None:
        raise RuntimeError("no stock")

    traced.app.handler(dict, type=SELL, policy=Idempotent(attempts=2))(fail)
    traced.handle(attempt=1)
    traced.handle(attempt=2)
    assert [attributes(span)["idemp.outcome"] for span in spans.named("process")] == ["retried", "parked"]
    for span in spans.named("process"):
        assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "no stock")
        assert attributes(span)["error.type"] == "RuntimeError"
        (event,) = span.events
        assert (event.attributes or {})["exception.message"] == "no stock"


def test_held_delivery(traced: House, spans: Spans) -> None:
    traced.sells()
    traced.script.store_faults = [StoreUnavailable("away")] * 6
    with pytest.raises(StoreUnavailable):
        traced.handle()
    span = spans.one("process")
    assert attributes(span)["error.type"] == "StoreUnavailable"
    assert "idemp.outcome" not in attributes(span)
    assert [event.name for event in span.events].count("idemp.repeats") == 5


@pytest.mark.parametrize(
    ("message", "name"),
    [
        (sale(type="made.up.Type", headers=INCOMING), "unknown"),
        (sale(type=None, headers=INCOMING), "unknown"),
        (sale(body=b"{", headers=INCOMING), SELL),
    ],
)
def test_what_can_not_be_decoded_has_a_span_too(traced: House, spans: Spans, message: Any, name: str) -> None:
    traced.sells()
    outcome = traced.handle(message)[0]
    assert outcome in {Outcome.PARKED, Outcome.RETRIED}
    span = spans.one("process")
    assert (attributes(span)["idemp.message_type"], f"{span.context.trace_id:032x}") == (name, TRACE)
    assert attributes(span)["idemp.outcome"] == outcome.value


@pytest.mark.parametrize("mode", ["binary", "structured"])
def test_cloudevents_carry_traces(traced: House, spans: Spans, mode: str) -> None:
    traced.sells()
    event = {"specversion": "1.0", "id": "e-1", "source": "/till", "type": SELL, **INCOMING}
    if mode == "binary":
        message = sale(type=None, headers={f"cloudEvents_{name}": value for name, value in event.items()})
    else:
        body = json.dumps({**event, "data": {"sku": "A-1"}}).encode()
        message = sale(type=None, body=body, content_type="application/cloudevents+json")
    assert traced.handle(message)[0] is Outcome.HANDLED
    assert f"{spans.one('process').context.trace_id:032x}" == TRACE


@pytest.mark.parametrize("takes", ["one", "several"])
def test_each_of_a_batch_has_a_span_of_its_own(traced: House, spans: Spans, takes: str) -> None:
    """Each continues its own message's trace, and each output carries the span of its own handling."""

    def one(message: dict[str, Any], ctx: Context) -> None:
        assert takes == "several" or trace.get_current_span().get_span_context().is_valid
        ctx.send({}, to="stock", type="stock.Reserve")

    def several(messages: list[dict[str, Any]], ctx: BatchContext) -> None:
        for each in ctx.each:
            each.send({}, to="stock", type="stock.Reserve")

    policy = Idempotent(batch=10)
    if takes == "one":
        traced.app.handler(dict, type=SELL, policy=policy)(one)
    else:
        traced.app.batch_handler(dict, type=SELL, policy=policy)(several)
    before = context.get_current()
    names = ["a", "b", "c"]
    headers = [{"traceparent": f"00-{number:032x}-{PARENT}-01"} for number in (1, 2, 3)]
    found = traced.together(*(sale(name, headers=each) for name, each in zip(names, headers, strict=True)))
    assert [outcome for outcome, _ in found] == [Outcome.HANDLED] * 3
    assert context.get_current() == before
    made = spans.named("process shop")
    assert [span.context.trace_id for span in made] == [1, 2, 3]
    assert all(not span.links for span in made)
    assert traceparents(traced) == [traceparent(span) for span in made]
    sent = spans.named("send")
    assert [span.parent.span_id for span in sent if span.parent] == [span.context.span_id for span in made]


def test_context_of_the_thread_is_as_before(traced: House, spans: Spans) -> None:
    before = context.get_current()

    def fail(message: dict[str, Any]) -> None:
        raise Refuse("never")

    traced.app.handler(dict, type=SELL, policy=Idempotent())(fail)
    traced.handle()
    traced.script.store_faults = [StoreUnavailable("away")] * 6
    with suppress(StoreUnavailable):
        traced.handle(sale("2"))
    assert context.get_current() == before
    assert not trace.get_current_span().get_span_context().is_valid


def test_relay_links_to_the_handlings_whose_outputs_it_sends(any_traced: House, spans: Spans) -> None:
    any_traced.sells(outputs=2)
    for number in range(3):
        any_traced.script.answers = ["closed"] * 2
        any_traced.handle(sale(f"m-{number}"))
    any_traced.clock.advance(timedelta(minutes=5))
    any_traced.script.answers = ["confirm", "nacked"]
    Relay(any_traced.app.store.upkeep, any_traced.publisher, telemetry=any_traced.app.telemetry).run_once()
    handlings = {span.context.span_id for span in spans.named("process")}
    send = spans.named("send stock")[-1]
    assert ({link.context.span_id for link in send.links}, len(send.links)) == (handlings, 3)
    assert (send.parent, send.kind) == (None, SpanKind.PRODUCER)
    assert attributes(send)["messaging.batch.message_count"] == 6
    assert (send.status.status_code, attributes(send)["error.type"]) == (StatusCode.ERROR, "nacked")
    assert any_traced.publisher.sent[0].message.headers["traceparent"] in {
        traceparent(span) for span in spans.named("process")
    }


def test_initiation_carries_the_present_trace_on(any_traced: House, spans: Spans) -> None:
    with spans.tracer.start_as_current_span("GET /checkout") as request, any_traced.app.initiate(id="r-1") as unit:
        unit.send({}, to="stock", type="stock.Reserve")
    origin = origin_of(unit.outputs[0])
    assert origin is not None
    assert origin.span_id == request.get_span_context().span_id


def test_wrapped_function_inside_a_span_of_its_own(spans: Spans) -> None:
    """The message's trace goes on, and the surrounding span is linked."""

    def ship(message: dict[str, int], ctx: Context) -> None: ...

    inbox = Inbox(InMemoryStore(), telemetry=Traces(spans.provider))
    handle = inbox.wrap(ship, type="shop.Ship", consumer="shop", policy=Idempotent())
    with spans.tracer.start_as_current_span("poll") as poll:
        handle(sale("1", type="shop.Ship", headers=INCOMING))
        handle(sale("2", type="shop.Ship"))
    first, second = spans.named("process")
    assert f"{first.context.trace_id:032x}" == TRACE
    assert [link.context.span_id for link in first.links] == [poll.get_span_context().span_id]
    assert second.parent is not None
    assert (second.parent.span_id, len(second.links)) == (poll.get_span_context().span_id, 0)


def test_what_is_sent_can_be_read_by_others(traced: House, spans: Spans) -> None:
    """By the W3C propagator, as any consumer would."""
    traced.sells(outputs=1)
    traced.handle()
    found = TraceContextTextMapPropagator().extract(dict(traced.publisher.sent[0].message.headers))
    assert trace.get_current_span(found).get_span_context().span_id == spans.one("process").context.span_id


@pytest.mark.parametrize("server", ["rabbitmq", "redis", "activemq"])
def test_the_broker_is_named_by_whoever_sends(request: pytest.FixtureRequest, spans: Spans, server: str) -> None:
    """A handling, a relay, and the checker of prepared messages; by the conventions for messaging."""
    url = request.getfixturevalue(f"{server}_url")
    broker = make_broker(url, Settings(allow_at_most_once=True))
    broker.declare(Topology(exchange="idemp", queues=("stock",)))
    app = App("shop", store=InMemoryStore(), broker=broker, telemetry=Traces(spans.provider))
    prepared = PreparedMessages(app, InMemoryHome())

    @app.handler(dict, type=SELL, policy=Idempotent())
    def sell(message: dict[str, Any], ctx: Context) -> None:
        ctx.send({}, to="stock", type="stock.Reserve")

    publisher = broker.publisher()
    app.protocol(publisher).handle(Delivery(message=sale(), queue="shop"))
    with app.initiate() as unit:
        unit.send({}, to="stock", type="stock.Reserve")
    assert Relay(app.store.upkeep, publisher, telemetry=app.telemetry).run_once().confirmed == 1
    output = prepared.make({}, to="stock", type="stock.Reserve", key="p-1").output
    assert prepared.publishers.publish([output], timedelta(seconds=20)) == [None]
    parts = urlsplit(url.replace(url.partition(":")[0], "http", 1))
    for span in (spans.one("process shop"), *spans.named("send stock")):
        told = attributes(span)
        assert (told["messaging.system"], told["server.address"]) == (server, parts.hostname)
        assert told["server.port"] == parts.port
        assert told["messaging.operation.name"] == told["messaging.operation.type"] == span.name.split()[0]
    assert [attributes(span)["idemp.via"] for span in spans.named("send")] == ["dispatch", "relay", "prepared"]
    assert all("messaging.message.id" in attributes(span) for span in spans.named("send"))
    publisher.close()
    prepared.close()


def test_queues_for_replies_are_in_no_name(traced: House, spans: Spans) -> None:
    """They are many, and a span's name has to be one of few."""
    traced.broker.declare(Topology(exchange="", queues=("reply-0f3c",)))

    def ask(message: dict[str, Any], ctx: Context) -> None:
        ctx.reply({}, type="stock.Answer")

    traced.app.handler(dict, type=SELL, policy=Idempotent(), replies=True)(ask)
    traced.handle(sale(reply_to="reply-0f3c"))
    send = spans.one("send")
    assert (send.name, attributes(send)["messaging.destination.name"]) == ("send (temporary)", "reply-0f3c")
    assert attributes(send)["messaging.destination.temporary"] is True
