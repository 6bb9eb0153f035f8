"""Traces by OpenTelemetry. Needs its API: `pip install 'idemp[otel]'`; exporters are configured as for any other program.

One span per delivery, of kind CONSUMER, continues the trace that the message carries. The outputs of a handling carry its
span on, stored with them, so that every copy of an output says the same; and a duplicate's span links to the span of the
first handling, which it finds there.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from opentelemetry import context, propagate, trace
from opentelemetry.trace import Link, ProxyTracerProvider, SpanKind, Status, StatusCode

from idemp.inbox.port import Verdict
from idemp.messages import OutputKind
from idemp.showing import class_of, guarded, text_of
from idemp.telemetry import Telemetry, Watch
from idemp.telemetry.catalogue import known_type

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from opentelemetry.trace import Span, SpanContext, TracerProvider

    from idemp.broker.port import Delivery, Endpoint, Refusal, Settlement
    from idemp.inbox.port import Claimed
    from idemp.messages import Output
    from idemp.outcome import Outcome
    from idemp.telemetry import Via
    from idemp.work import Consumer, Work

_CLOUDEVENT: Final = "cloudEvents_"
_MOST_LINKS: Final = 32


class Traces(Telemetry):
    """Spans by the tracer provider that the program has configured; without one, nothing is done.

    Args:
        provider: default the global one, looked up at each delivery, so that it may be set later.

    Example:
        >>> Traces().trace_headers()
        {}
    """

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._provider = provider
        self._known: tuple[TracerProvider, trace.Tracer] | None = None

    @property
    def tracer(self) -> trace.Tracer | None:
        """Makes the spans; `None` while no provider is configured."""
        provider = self._provider or trace.get_tracer_provider()
        if isinstance(provider, ProxyTracerProvider | trace.NoOpTracerProvider):
            return None
        known = self._known
        if known is None or known[0] is not provider:
            self._known = known = (provider, provider.get_tracer("idemp"))
        return known[1]

    def watch(self, consumer: Consumer | None) -> Watch:
        """A watch for one thread."""
        return _TracingWatch(self, consumer)

    def trace_headers(self) -> Mapping[str, str]:
        """The present span, and the baggage, as the configured propagators write them."""
        if self.tracer is None or not trace.get_current_span().get_span_context().is_valid:
            return {}
        carrier: dict[str, str] = {}
        propagate.inject(carrier)
        return carrier


class _TracingWatch(Watch):
    def __init__(self, traces: Traces, consumer: Consumer | None) -> None:
        self._traces = traces
        self._consumer = consumer
        self._broker: dict[str, Any] = {"messaging.system": "unknown"}
        self._place = ""
        self._delivery: Delivery | None = None
        self._arrived = 0
        self._span: Span | None = None
        self._parent: SpanContext | None = None
        self._context: context.Context | None = None
        self._token: Any = None
        self._sending: Span | None = None

    def reaches(self, endpoint: Endpoint) -> None:
        self._broker = {"messaging.system": endpoint.system}
        if endpoint.address is not None:
            self._broker["server.address"] = self._place = endpoint.address
        if endpoint.port is not None:
            self._broker["server.port"], self._place = endpoint.port, f"{endpoint.address}:{endpoint.port}"

    # One delivery ---------------------------------------------------------------------------------------------------

    def looks(self) -> bool:
        return self._traces.tracer is not None

    def begins(self, delivery: Delivery) -> None:
        self._delivery, self._span, self._context, self._token = delivery, None, None, None
        self._arrived = time.time_ns()

    def decoded(self, work: Work) -> None:
        # Only now is it known what carries the trace: a structured CloudEvent has it inside of its body.
        self._start(work.registration.message_type, work.message.headers, work.message.message_id)
        if self._span is not None and work.effective is not None:
            self._span.set_attribute("idemp.message_id", work.effective.text)

    def not_claimed(self, claimed: Claimed) -> None:
        if self._span is None:
            return
        self._span.set_attribute("idemp.verdict", claimed.verdict.name)
        if claimed.verdict is not Verdict.DUPLICATE:
            return
        first = next((found for item in claimed.outputs if (found := origin_of(item.output)) is not None), None)
        # Where the first handling ran without traces, its outputs carry the trace of the cause, as this delivery does.
        if first is not None and (self._parent is None or first.span_id != self._parent.span_id):
            self._span.add_link(first, {"idemp.link": "first processing"})

    def repeats(self, error: Exception) -> None:
        if self._span is not None:
            self._span.add_event("idemp.repeats", {"exception.type": class_of(error)})

    def waits(self) -> None:
        if self._token is not None:
            context.detach(self._token)
        self._token = None

    def resumes(self) -> None:
        if self._context is not None and self._token is None:
            self._token = context.attach(self._context)

    def failed(self, error: Exception) -> None:
        if self._span is None and self._delivery is not None and self._consumer is not None:
            message = self._delivery.message
            self._start(known_type(self._consumer, message), message.headers, message.message_id)
        self._note(error)

    def ended(self, outcome: Outcome, settlement: Settlement | None) -> None:
        del settlement
        if self._span is not None:
            self._span.set_attribute("idemp.outcome", outcome.name.lower())

    def left(self, error: BaseException | None) -> None:
        if error is not None:
            self._note(error)
        self.waits()
        if self._span is not None:
            self._span.end()
        self._delivery = self._span = self._parent = self._context = None

    def _start(self, message_type: str, headers: Mapping[str, Any], message_id: str | None) -> None:
        tracer, delivery = self._traces.tracer, self._delivery
        if tracer is None or delivery is None or self._consumer is None:
            return
        present = context.get_current()
        arriving = propagate.extract(_carried(headers), context=present)
        self._parent = trace.get_current_span(arriving).get_span_context()
        local = trace.get_current_span(present).get_span_context()
        attributes: dict[str, Any] = {
            **self._broker,
            "messaging.operation.type": "process",
            "messaging.operation.name": "process",
            **({"messaging.destination.name": delivery.queue} if delivery.queue else {}),
            "messaging.consumer.group.name": self._consumer.name,
            "messaging.message.body.size": len(delivery.message.body),
            "idemp.consumer": self._consumer.name,
            "idemp.message_type": message_type,
            "idemp.attempt": delivery.attempt,
            "idemp.redelivered": delivery.redelivered,
        }
        if message_id:
            attributes["messaging.message.id"] = message_id
        if delivery.message.correlation_id:
            attributes["messaging.message.conversation_id"] = delivery.message.correlation_id
        self._span = tracer.start_span(
            f"process {delivery.queue or self._place}".rstrip(),
            context=arriving,
            kind=SpanKind.CONSUMER,
            attributes=attributes,
            # Inside somebody's own span: the message's trace goes on, and the other one is named.
            links=[Link(local)] if local.is_valid and local.span_id != self._parent.span_id else [],
            start_time=self._arrived,
        )
        self._context = trace.set_span_in_context(self._span, arriving)
        self.resumes()

    def _note(self, error: BaseException) -> None:
        if self._span is not None:
            self._record(self._span, error)
            self._span.set_attribute("error.type", class_of(error))
            self._span.set_status(Status(StatusCode.ERROR, text_of(error)[:500]))

    @staticmethod
    def _record(span: Span, error: BaseException) -> None:
        def shown(_: BaseException) -> None:
            span.add_event("exception", {"exception.type": class_of(error), "exception.message": text_of(error)})

        guarded(lambda: span.record_exception(error), shown)

    # Sending --------------------------------------------------------------------------------------------------------

    def sends(self, outputs: Sequence[Output], via: Via) -> None:
        tracer = self._traces.tracer
        if tracer is None:
            return
        # What a handling sends itself is below its own span already; all other senders name where the outputs come from.
        stored = () if via == "dispatch" else outputs
        origins = {found.span_id: found for output in stored if (found := origin_of(output)) is not None}
        self._sending = tracer.start_span(
            f"send {_named(outputs) or self._place}".rstrip(),
            kind=SpanKind.PRODUCER,
            attributes={
                **self._broker,
                "messaging.operation.type": "send",
                "messaging.operation.name": "send",
                "idemp.via": via,
                **({"idemp.consumer": self._consumer.name} if self._consumer is not None else {}),
                **_what(outputs),
                **_destination(outputs),
            },
            links=[Link(found, {"idemp.link": "first processing"}) for found in list(origins.values())[:_MOST_LINKS]],
        )

    def sent(self, outputs: Sequence[Output], answers: Sequence[Refusal | None], via: Via) -> None:
        del outputs, via
        span, self._sending = self._sending, None
        if span is None:
            return
        refused = [answer for answer in answers if answer is not None]
        span.set_attribute("idemp.refused", len(refused))
        if refused:
            span.set_attribute("error.type", refused[0].kind)
            span.set_status(Status(StatusCode.ERROR, f"{len(refused)} of {len(answers)} have no confirm"))
        span.end()


def origin_of(output: Output) -> SpanContext | None:
    """The span that a stored output carries: that of the handling which made it."""
    found = trace.get_current_span(propagate.extract(_carried(output.message.headers), context=context.Context()))
    return found.get_span_context() if found.get_span_context().is_valid else None


def _carried(headers: Mapping[str, Any]) -> dict[str, str]:
    """The headers that propagators may read: text only, and those of CloudEvents' binary mode by their own names, too."""
    texts = {name: value for name, value in headers.items() if isinstance(value, str)}
    events = {name[len(_CLOUDEVENT) :]: value for name, value in texts.items() if name.startswith(_CLOUDEVENT)}
    return {**{name: events[name] for name in ("traceparent", "tracestate") if name in events}, **texts}


def _what(outputs: Sequence[Output]) -> dict[str, Any]:
    """How many there are, or which one it is."""
    if len(outputs) != 1:
        return {"messaging.batch.message_count": len(outputs)}
    (output,) = outputs
    return {"messaging.message.id": str(output.id), "messaging.message.body.size": len(output.message.body)}


def _destination(outputs: Sequence[Output]) -> dict[str, Any]:
    """Where to, if all go to one place."""
    if (place := _only_place(outputs)) is None:
        return {}
    temporary = {"messaging.destination.temporary": True} if _is_reply(outputs) else {}
    return {"messaging.destination.name": place, **temporary}


def _named(outputs: Sequence[Output]) -> str | None:
    """The destination in a span's name; queues for replies are many, and short-lived."""
    return "(temporary)" if _is_reply(outputs) else _only_place(outputs)


def _only_place(outputs: Sequence[Output]) -> str | None:
    places = {
        f"{output.exchange}:{output.routing_key}" if output.exchange else output.routing_key for output in outputs
    }
    return places.pop() if len(places) == 1 else None


def _is_reply(outputs: Sequence[Output]) -> bool:
    return all(output.kind in {OutputKind.REPLY, OutputKind.RETURN} for output in outputs)
