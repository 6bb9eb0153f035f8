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
from idemp.handling import Handling
from idemp.hooks import Hooks
from idemp.ports import Verdict
from idemp.sql.records.claims import InboxRecords

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

    def before_handle(self, handling: Handling) -> None:
        """Begin the span of a handling, and put its context into the headers that the handler's outputs copy."""
        self._end(handling, "the message runs again")
        span = self._start(handling)
        inner = trace.set_span_in_context(span)
        headers: dict[str, Any] = dict(handling.properties.get("headers") or {})
        propagate.inject(headers, inner)
        handling.properties = {**handling.properties, "headers": headers}
        handling.notes["span"] = span
        current.attach(inner)  # until the next one, or the end of this one

    def after_commit(self, handling: Handling) -> None:
        """End the span of a handling."""
        if isinstance(span := handling.notes.get("span"), Span):
            span.set_attribute("idemp.outputs", len(handling.outputs))
        self._end(handling)

    def on_duplicate(self, handling: Handling) -> None:
        """Create the span of a duplicate, with a link to the first handling."""
        first = trace.get_current_span(propagate.extract(self._first(handling))).get_span_context()
        links = [Link(first, {"idemp.link": "first handling"})] if first.is_valid else []
        handling.notes["span"] = self._start(handling, links)
        self._end(handling)

    def on_settled(self, handling: Handling) -> None:
        """End the span of a failure; create one if no handler has run."""
        if handling.decision is None or handling.error is None:
            return
        span = handling.notes.get("span") or self._start(handling)
        handling.notes["span"] = span
        span.set_attribute("idemp.rule", handling.decision.rule.name)
        span.set_attribute("idemp.outcome", "dead" if handling.parked else "retry")
        span.set_attribute("error.type", type(handling.error).__qualname__)
        self._end(handling, describe_error(handling.error))

    def _start(self, handling: Handling, links: list[Link] | None = None) -> Span:
        properties, delivery = handling.properties, handling.delivery
        attributes: dict[str, Any] = {
            "messaging.system": self._system(),
            "messaging.operation.name": "process",
            "messaging.operation.type": "process",
            "messaging.destination.name": delivery.queue,
            "messaging.consumer.group.name": self._app.name,
            "messaging.message.body.size": len(delivery.body),
            "idemp.type": handling.handler.type if handling.handler is not None else str(properties.get("type")),
            "idemp.verdict": (handling.verdict or Verdict.CLAIMED).value if handling.claim is not None else "none",
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

    def _end(self, handling: Handling, error: str = "") -> None:
        span = handling.notes.pop("span", None)
        if span is not None:
            if error:
                span.set_status(Status(StatusCode.ERROR, error))
            span.end()
            current.attach(Context())

    def _first(self, handling: Handling) -> Mapping[str, str]:
        """Return the headers that the outputs of the first handling have."""
        for output in handling.outputs:
            return _texts(output.properties.get("headers"))
        with suppress(Exception):  # the database may be away
            records = InboxRecords(self._app.adapters().database)
            for record in records.find(str(handling.claim.key)) if handling.claim is not None else ():
                if record.consumer == self._app.name:
                    for stored in records.outputs(record)[:1]:
                        return _texts(stored.properties.get("headers"))
        return {}


def _texts(headers: Any) -> dict[str, str]:
    items = headers.items() if isinstance(headers, Mapping) else ()
    return {name: value for name, value in items if isinstance(name, str) and isinstance(value, str)}
