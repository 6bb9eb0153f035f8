"""Spans: a duplicate leads to the first handling, an output to what it causes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from pydantic import BaseModel

from idemp import App, AsyncContext, Context, Idempotent, Retry
from idemp.telemetry.tracing import Tracing, trace_app

EXPORTER = InMemorySpanExporter()
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Pay(BaseModel):
    __message_type__ = "shop.Pay"
    id: int
    fails: bool = False


class Paid(BaseModel):
    __message_type__ = "shop.Paid"
    id: int


@pytest.fixture(autouse=True)
def spans() -> Iterator[InMemorySpanExporter]:
    if not isinstance(trace.get_tracer_provider(), TracerProvider):
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(EXPORTER))
        trace.set_tracer_provider(provider)
    EXPORTER.clear()
    yield EXPORTER
    EXPORTER.clear()


def made(*, asynchronous: bool = False) -> App:
    app = App("billing", policy=Idempotent(key="id", retry=Retry(attempts=2, delays=("0s",))))

    def handle(message: Pay, ctx: Any) -> None:
        with trace.get_tracer("shop").start_as_current_span("charge"):
            if message.fails:
                raise ValueError("no money")
            ctx.send(Paid(id=message.id), to="billing")

    if asynchronous:

        @app.handler(Pay)
        async def pay_async(message: Pay, ctx: AsyncContext) -> None:
            await asyncio.sleep(0)
            handle(message, ctx)
    else:
        app.handler(Pay)(handle)

    @app.handler(Paid)
    def paid(message: Paid, ctx: Context) -> None:
        assert ctx.headers["traceparent"]

    trace_app(app)
    return app


def named(name: str) -> list[ReadableSpan]:
    return [span for span in EXPORTER.get_finished_spans() if span.name == name]


def said(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_duplicate_links_to_the_first_handling_and_an_output_is_its_child(asynchronous: bool) -> None:
    app = made(asynchronous=asynchronous)
    with app.test() as test:
        test.send(Pay(id=1), message_id="m1", headers={"traceparent": PARENT})
        test.run_until_idle()
        test.send(Pay(id=1), message_id="m2", headers={"traceparent": PARENT})  # its outputs are confirmed by now
        test.run_until_idle()
        output = test.outputs[0]
    first, effect, duplicate = named("process billing")
    assert (first.kind, first.status.status_code) == (SpanKind.CONSUMER, StatusCode.UNSET)
    assert first.parent is not None
    assert f"{first.parent.trace_id:032x}-{first.parent.span_id:016x}" in PARENT
    assert said(first) == {
        "messaging.system": "idemp",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": "billing",
        "messaging.consumer.group.name": "billing",
        "messaging.message.body.size": len(json.dumps({"id": 1, "fails": False}, separators=(",", ":"))),
        "messaging.message.id": "m1",
        "idemp.type": "shop.Pay",
        "idemp.verdict": "claimed",
        "idemp.outputs": 1,
    }
    (inner,) = named("charge")
    assert inner.parent == first.context
    assert output.properties["headers"]["traceparent"].split("-")[2] == f"{first.context.span_id:016x}"
    assert effect.parent is not None
    assert effect.parent.span_id == first.context.span_id
    assert said(duplicate)["idemp.verdict"] == "duplicate"
    assert [link.context.span_id for link in duplicate.links] == [first.context.span_id]
    assert trace.get_current_span().get_span_context().span_id not in (first.context.span_id, duplicate.context.span_id)


def test_failures_have_spans_with_their_rule_and_a_message_without_a_handler_has_one() -> None:
    app = made()
    with app.test() as test:
        test.send(Pay(id=1, fails=True))
        test.send(b"{}", type="shop.Unknown")
        test.run_until_idle(raises=False)
    failed = [
        (said(span)["idemp.rule"], said(span)["idemp.outcome"], said(span)["error.type"]) for span in named("process billing")
    ]
    assert sorted(failed) == [
        ("handler", "dead", "ValueError"),
        ("handler", "retry", "ValueError"),
        ("unknown type", "retry", "UnknownType"),
    ]
    assert {span.status.status_code for span in named("process billing")} == {StatusCode.ERROR}
    assert all(
        "no money" in (span.status.description or "")
        for span in named("process billing")
        if said(span)["error.type"] == "ValueError"
    )


def test_without_a_hook_the_context_of_a_message_is_passed_on() -> None:
    app = made()
    app.hooks = [hook for hook in app.hooks if not isinstance(hook, Tracing)]
    with app.test() as test:
        test.send(Pay(id=1), headers={"traceparent": PARENT, "tracestate": "a=b", "x": "not passed on"})
        test.run_until_idle()
        headers = test.outputs[0].properties["headers"]
    assert {name: text for name, text in headers.items() if not name.startswith("idemp-")} == {
        "traceparent": PARENT,
        "tracestate": "a=b",
    }
    assert named("process billing") == []
