"""Log events: one table of names that stay, from which the reference page is generated.

Each record of the logger `idemp` has the attributes `event`, a name of this table, and `fields`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

from idemp.errors import describe_error

__all__ = ["EVENTS", "RUNNING", "Event", "JsonLines", "MessageFields", "log", "message_fields"]

NAMES: Final = ("consumer", "message_type", "message_id", "correlation_id", "attempt")
LONGEST: Final = 255  # characters of an id in a line
DEBUG, INFO, WARNING, ERROR = logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR


@dataclass(frozen=True)
class Event:
    """A kind of log record.

    Attributes:
        name: Area and what happened; stays from release to release.
        level: Level of the logging module.
        text: Template of the message; its names are the fields.
        then: Consequence of the event, or the action of an operator.

    Example:
        >>> EVENTS["worker.started"].text
        'consuming {queue}'
    """

    name: str
    level: int
    text: str
    then: str


EVENTS: Final[Mapping[str, Event]] = {
    event.name: event
    for event in (
        Event("worker.started", INFO, "consuming {queue}", "the worker has passed its checks and takes deliveries"),
        Event("health.started", INFO, "answering /health and /ready at {host}:{port}", "nothing to do"),
        Event("metrics.started", INFO, "answering /metrics at {host}:{port}", "nothing to do"),
        Event("worker.plain", INFO, "not opted in, so these run on every delivery: {types}", "opt in what must not run twice"),
        Event("worker.configured", WARNING, "configured, and not handled by this app: {types}", "look for a misspelt type"),
        Event(
            "worker.logging",
            WARNING,
            "--json changes nothing, because the app configures logging itself",
            "give its handlers the formatter idemp.events.JsonLines",
        ),
        Event("worker.paused", WARNING, "consumption pauses: {error}", "no attempt counts, and no message is lost"),
        Event("check.warned", WARNING, "{finding}", "the text says what fixes it"),
        Event("worker.waiting", WARNING, "waits for the database: {error}", "it starts by itself; see IDEMP_PATIENCE"),
        Event(
            "task.waiting", WARNING, "waits for a connection to the database: {error}", "look at the limit of its user, or wait"
        ),
        Event("queue.undeclared", WARNING, "the queue {queue} cannot be declared yet: {error}", "it is tried again every second"),
        Event("worker.resumed", INFO, "consumption goes on", "nothing to do"),
        Event("worker.stopped", INFO, "stopped", "unhandled messages have been given back"),
        Event(
            "worker.left", WARNING, "could not sign off in the database: {error}", "leases run out, and other workers take over"
        ),
        Event("worker.killed", ERROR, "stopped while {type} was running: its message is delivered again", "raise IDEMP_GRACE"),
        Event("worker.interrupted", ERROR, "interrupted twice: its messages are delivered again", "nothing to do"),
        Event("worker.died", ERROR, "a worker process ended with {code}: another is started", "look for the reason above"),
        Event(
            "worker.reloaded",
            INFO,
            "{files} changed: the worker starts again",
            "nothing to do; idemp worker --reload does this",
        ),
        Event(
            "worker.ended",
            ERROR,
            "the worker ended with {code}, and starts again when a source file changes",
            "correct the error above; idemp worker --reload waits for it",
        ),
        Event("relay.started", INFO, "relaying", "the relay has passed its checks"),
        Event("relay.refused", WARNING, "the broker takes no outputs, so they wait: {reason}", "look at the broker"),
        Event("relay.resumed", INFO, "the broker takes outputs again", "nothing to do"),
        Event("thread.paused", WARNING, "{thread} pauses: {error}", "it tries again by itself"),
        Event("thread.resumed", INFO, "{thread} goes on", "nothing to do"),
        Event(
            "handler.slow", WARNING, "{type} has been running for {seconds:g} s (id {id!r})", "check what the handler waits for"
        ),
        Event(
            "loop.blocked",
            WARNING,
            "{type} keeps the event loop to itself (id {id!r})",
            "await in it, or make it a plain function",
        ),
        Event("batch.split", INFO, "a batch of {count} is run again in parts: {error}", "the message that fails is run alone"),
        Event(
            "message.retry", WARNING, "retry of {type!r} (id {id!r}) in {delay:.1f} s: {rule}: {error}{place}", "it runs again"
        ),
        Event(
            "message.undated",
            WARNING,
            "the timestamp {timestamp!r} of {type!r} (id {id!r}) is not between 2020 and tomorrow; further ones are not logged",
            "correct the producer: seconds since 1970; without a time, a message is never late",
        ),
        Event(
            "message.parked",
            ERROR,
            "parked {type!r} (id {id!r}), which failed {failed}: {rule}: {error}{place}",
            "idemp dead list",
        ),
        Event(
            "message.unstorable", ERROR, "a message that cannot be stored is in the queue {queue}: {error}", "look at that queue"
        ),
        Event(
            "delivery.settled",
            DEBUG,
            "{type!r} (id {id!r}, claim {claim!r}): {verdict}, {outcome}, {outputs} outputs",
            "nothing to do; `idemp worker -v` shows it",
        ),
        Event("delivery.unsettled", WARNING, "deliveries could not be settled: {error}", "the worker tries again"),
        Event("delivery.unacked", WARNING, "deliveries could not be acknowledged: {error}", "the broker delivers them again"),
        Event("output.unrecorded", WARNING, "confirms could not be recorded: {error}", "these outputs are sent again"),
        Event(
            "output.waiting", WARNING, "committed, but the broker refused {count} outputs and no relay is alive", "start a worker"
        ),
        Event(
            "output.unrelayed", WARNING, "{count} outputs wait for a relay, and none is alive", "start a worker, or idemp relay"
        ),
        Event(
            "output.refused",
            WARNING,
            "the broker does not take {count} of {type!r} to {to}: {reason}; tried again for 11 minutes, then in quarantine",
            "correct the name, or start the worker whose queue it is",
        ),
        Event(
            "output.quarantined",
            ERROR,
            "in quarantine: {count} of {type!r} to {to}: {reason}",
            "fix the cause, then idemp inbox redispatch",
        ),
        Event(
            "clock.stepped",
            WARNING,
            "the clock of the database was set back: {count} {what} waited for longer than their delay allows, and are due now",
            "find out what sets that clock",
        ),
        Event("twophase.left", WARNING, "the branch {xid} is left to recovery: {error}", "nothing to do"),
        Event("twophase.recovered", WARNING, "the branch {xid} in {database}: {what}", "find out which process died"),
        Event("twophase.unrecovered", WARNING, "{database} cannot be recovered: {error}", "it is tried again"),
        Event(
            "prepared.unanswered", WARNING, "the outcome of the work {key!r} is unknown: {error}", "the checker is asked again"
        ),
        Event("prepared.unchecked", WARNING, "prepared messages of {app} cannot be checked: {error}", "it is tried again"),
        Event("prepared.left", WARNING, "the message of the work {key!r} is left to the checker: {error}", "nothing to do"),
        Event(
            "prepared.parked",
            ERROR,
            "asked {count} times for the outcome of the work {key!r}",
            "idemp prepared list",
        ),
        Event(
            "wrapped.failed",
            WARNING,
            "requeued in {pause:g} s (id {id!r}): {error}",
            "the broker delivers it again, up to the limit of the queue",
        ),
        Event("wrapped.dead", ERROR, "given to the function for dead letters (id {id!r}): {error}", "look where it keeps them"),
        Event(
            "wrapped.paused", WARNING, "a message is kept, and waits (id {id!r}): {error}", "it is tried again every few seconds"
        ),
        Event("wrapped.resumed", INFO, "the message that waited was handled (id {id!r})", "nothing to do"),
        Event("hook.failed", ERROR, "{hook} raised {error}; its further errors are not logged", "correct the hook"),
    )
}

RUNNING: Final[ContextVar[Sequence[Any]]] = ContextVar("idemp_running", default=())
"""The `idemp.handling.Handling` whose handler runs in this thread or task; of a handler of lists, several."""

_LOG: Final = logging.getLogger("idemp")


def log(name: str, *, error: BaseException | str | None = None, **fields: Any) -> None:
    """Log an event.

    Args:
        name: A name of the table. Another one, as of an adapter that is not idemp's, is a warning with its fields.
        error: Value of the field `error`; an exception becomes one safe line.
        fields: Values of the other fields in the template.

    Example:
        >>> log("worker.started", queue="billing")
    """
    event = EVENTS.get(name)
    if error is not None and (event is None or _LOG.isEnabledFor(event.level)):
        fields["error"] = error if isinstance(error, str) else describe_error(error)
    if event is None:
        event = Event(name, WARNING, " ".join(f"{field}={{{field}}}" for field in fields), "")
    if _LOG.isEnabledFor(event.level):
        text = f"{name}: {event.text.format_map(fields)}"
        _LOG.log(event.level, "%s", text, extra={"event": name, "fields": fields}, stacklevel=2)


def message_fields() -> dict[str, Any]:
    """Return what identifies the message whose handler runs in this thread or task; nothing outside of a handler.

    A handler of lists has no ids.

    Example:
        >>> message_fields()
        {}
    """
    running = RUNNING.get()
    if not running:
        return {}
    handler = running[0].handler
    fields = {"consumer": handler.consumer, "message_type": handler.type}
    if len(running) > 1:
        return fields
    properties, row = running[0].properties, running[0].delivery.row
    ids = {"message_id": properties.get("message_id")}
    ids["correlation_id"] = properties.get("correlation_id") or ids["message_id"]  # as its outputs have it
    return fields | {name: _one_line(id) for name, id in ids.items()} | {"attempt": row.attempts + 1 if row else 1}


def _one_line(id: object) -> str | None:
    """Return the id of a stranger so that it cannot begin another line."""
    text = str(id)[:LONGEST]
    return None if id is None else text if text.isprintable() else text.encode("unicode_escape").decode()


class MessageFields(logging.Filter):
    """Adds the message whose handler runs to each record, so that a format can name it.

    The attributes are `consumer`, `message_type`, `message_id`, `correlation_id` and `attempt`; `-` where there is none.
    Add it to the handlers of `logging`: a filter of a logger is not asked about records of other loggers.

    Example:
        >>> handler = logging.StreamHandler()
        >>> handler.addFilter(MessageFields())
        >>> handler.setFormatter(logging.Formatter("%(levelname)s %(correlation_id)s %(message)s"))
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the attributes that the record has not; return True."""
        found = message_fields()
        for name in NAMES:
            if not hasattr(record, name):
                value = found.get(name)
                setattr(record, name, "-" if value is None else value)
        return True


class JsonLines(logging.Formatter):
    """Formats log records as JSON, one line each, with the event and its fields, or the message whose handler has logged.

    Example:
        >>> record = logging.LogRecord("idemp", logging.INFO, "", 0, "consuming", (), None)
        >>> json.loads(JsonLines().format(record))["text"]
        'consuming'
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as JSON."""
        line = {"at": record.created, "level": record.levelname, "logger": record.name, "process": record.process}
        line |= {"event": getattr(record, "event", None), "text": record.getMessage()}
        kept = {name: value for name in NAMES if (value := getattr(record, name, "-")) != "-"}  # of a filter, before a queue
        line |= kept if hasattr(record, "consumer") else message_fields()
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
