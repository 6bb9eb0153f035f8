"""Spans of OpenTelemetry for the deliveries of a worker, by the semantic conventions for messaging.

The span of a handling is the parent of the spans of its outputs: its context is in their headers, and is stored with them.
The span of a duplicate links to the first handling, whose context is read from the stored headers.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import version
from typing import Any, Final

from idemp.app import App
from idemp.errors import describe_error, needs
from idemp.hooks import Hooks
from idemp.ports import Verdict
from idemp.sql.records.claims import InboxRecords
from idemp.work import Work

with needs("opentelemetry"):
    from opentelemetry import context as current
    from opentelemetry import propagate, trace
    from opentelemetry.context import Context
    from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode

__all__ = ["Tracing", "trace_app"]

SYSTEMS: Final = {"amqp": "rabbitmq", "pyamqp": "rabbitmq", "stomp": "activemq"}


def trace_app(app: App) -> None:
    """Create spans for the deliveries of an app's workers, with the tracer provider of their processes.

    Example:
        >>> app = App("orders")
        >>> trace_app(app)
    """
    app.hooks = [*app.hooks, Tracing(app)]


class Tracing(Hooks):
    """Creates a span for each handling, each duplicate and each failure.

    Args:
        app: The app, whose tables have the first handling of a duplicate without pending outputs.

    Example:
        >>> app = App("orders")
        >>> app.hooks = [Tracing(app)]
    """

    def __init__(self, app: App) -> None:
        self._app, self._tracer = app, trace.get_tracer("idemp", version("idemp"))

    def before_handle(self, work: Work) -> None:
        """Begin the span of a handling, and put its context into the headers that the handler's outputs copy."""
        self._end(work, "the message runs again")
        span = self._start(work)
        inner = trace.set_span_in_context(span)
        headers: dict[str, Any] = dict(work.properties.get("headers") or {})
        propagate.inject(headers, inner)
        work.properties = {**work.properties, "headers": headers}
        work.notes["span"] = span
        current.attach(inner)  # until the next one, or the end of this one

    def after_commit(self, work: Work) -> None:
        """End the span of a handling."""
        if isinstance(span := work.notes.get("span"), Span):
            span.set_attribute("idemp.outputs", len(work.outputs))
        self._end(work)

    def on_duplicate(self, work: Work) -> None:
        """Create the span of a duplicate, with a link to the first handling."""
        first = trace.get_current_span(propagate.extract(self._first(work))).get_span_context()
        links = [Link(first, {"idemp.link": "first handling"})] if first.is_valid else []
        work.notes["span"] = self._start(work, links)
        self._end(work)

    def on_settled(self, work: Work) -> None:
        """End the span of a failure; create one if no handler has run."""
        if work.decision is None or work.error is None:
            return
        span = work.notes.get("span") or self._start(work)
        work.notes["span"] = span
        span.set_attribute("idemp.rule", work.decision.rule.name)
        span.set_attribute("idemp.outcome", "dead" if work.parked else "retry")
        span.set_attribute("error.type", type(work.error).__qualname__)
        self._end(work, describe_error(work.error))

    def _start(self, work: Work, links: list[Link] | None = None) -> Span:
        properties, delivery = work.properties, work.delivery
        attributes: dict[str, Any] = {
            "messaging.system": self._system(),
            "messaging.operation.name": "process",
            "messaging.operation.type": "process",
            "messaging.destination.name": delivery.queue,
            "messaging.consumer.group.name": self._app.name,
            "messaging.message.body.size": len(delivery.body),
            "idemp.type": work.handler.type if work.handler is not None else str(properties.get("type")),
            "idemp.verdict": (work.verdict or Verdict.CLAIMED).value if work.claim is not None else "none",
        }
        names = {"message_id": "messaging.message.id", "correlation_id": "messaging.message.conversation_id"}
        attributes |= {name: properties[key] for key, name in names.items() if isinstance(properties.get(key), str)}
        return self._tracer.start_span(
            f"process {delivery.queue}",
            # An empty context, because the current one may still have the span of another delivery.
            context=propagate.extract(_texts(properties.get("headers")), Context()),
            kind=SpanKind.CONSUMER,
            attributes=attributes,
            links=links,
        )

    def _system(self) -> str:
        scheme = self._app.settings.broker_url.partition(":")[0].partition("+")[0]
        return SYSTEMS.get(scheme.removesuffix("s"), "idemp")

    def _end(self, work: Work, error: str = "") -> None:
        span = work.notes.pop("span", None)
        if span is not None:
            if error:
                span.set_status(Status(StatusCode.ERROR, error))
            span.end()
            current.attach(Context())

    def _first(self, work: Work) -> Mapping[str, str]:
        """Return the headers that the outputs of the first handling have."""
        for output in work.outputs:
            return _texts(output.properties.get("headers"))
        with suppress(Exception):  # the database may be away
            records = InboxRecords(self._app.adapters().database)
            for record in records.find(str(work.claim.key)) if work.claim is not None else ():
                if record.consumer == self._app.name:
                    for stored in records.outputs(record)[:1]:
                        return _texts(stored.properties.get("headers"))
        return {}


def _texts(headers: Any) -> dict[str, str]:
    items = headers.items() if isinstance(headers, Mapping) else ()
    return {name: value for name, value in items if isinstance(name, str) and isinstance(value, str)}
