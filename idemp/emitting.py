"""What a handling emits: outputs with derived ids, checked and encoded when they are asked for."""

from __future__ import annotations

import json
import os
import reprlib
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from idemp.errors import OutputError, UndecodableMessage
from idemp.messages import (
    BAGGAGE_HEADERS,
    CAUSATION_HEADER,
    HEADER_PREFIX,
    HOPS_HEADER,
    RETURN_CODE_HEADER,
    TRACE_HEADERS,
    UNSTORED_HEADER,
    Message,
    Output,
    OutputKind,
    parse_json,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime
    from uuid import UUID

    from idemp.codecs import Types

MAX_OUTPUTS = 10_000
"""Outputs of one handling. They are held in memory and stored in one transaction."""

MAX_SECONDS = 10 * 365 * 86_400.0
"""Longest delay or time to live, in seconds: ten years."""

MAX_PRIORITY = 255

MAX_NAME_BYTES = 255
"""Of what AMQP calls a short string: destinations, types, correlation ids, names of headers. Tables take no longer ones."""


def _check_number(name: str, value: object, most: float = MAX_SECONDS) -> None:
    """Every broker must be able to write it: a stored output that can't be sent would be stuck for ever."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise OutputError(f"{name}={value!r} is no number from 0 to {most:g}.", fix="Leave it out for none.")


def _check_names(named: Mapping[str, object]) -> None:
    """Likewise; a name that the store can't take would burn all attempts before it is told."""
    for what, name in named.items():
        if name is not None and not _is_short_text(name):
            raise OutputError(
                f"The {what} of an output can't be {reprlib.repr(name)}.",
                fix=f"Use text of at most {MAX_NAME_BYTES} bytes of UTF-8, none of them zero.",
            )


def _is_short_text(name: object) -> bool:
    try:
        return isinstance(name, str) and "\x00" not in name and len(name.encode()) <= MAX_NAME_BYTES
    except UnicodeEncodeError:  # half of a surrogate pair
        return False


class Emitter:
    """Collects the outputs of one handling, from any of its threads, in emission order.

    Args:
        types: names and codecs of message classes.
        exchange: where published outputs go.
        derive_id: the id of the output with a given ordinal.
        cause: the message being handled, `None` in an initiation without one.
        stored: whether the outputs will be stored; those of types that are not opted in say so in a header.
        max_body_bytes: largest body, bytes.
        wire: last step of an outgoing message, such as its CloudEvents form.
        trace: headers that carry the handling's own trace on; without them those of the cause are passed on.
        encode_effect: the stored form of an effect's value; `None` where nobody would run effects.
        now: the timestamp of all outputs; their ids may have an earlier message's time. `None` for none.
    """

    def __init__(
        self,
        *,
        types: Types,
        exchange: str,
        derive_id: Callable[[int], UUID],
        cause: Message | None = None,
        causation_id: str | None = None,
        stored: bool = True,
        max_body_bytes: int = 8 * 1024 * 1024,
        wire: Callable[[Message], Message] | None = None,
        trace: Mapping[str, str] | None = None,
        encode_effect: Callable[[str, Any], bytes] | None = None,
        now: datetime | None = None,
    ) -> None:
        self._types = types
        self._exchange = exchange
        self._derive_id = derive_id
        self._cause = cause
        self._causation_id = causation_id
        self._stored = stored
        self._max_body_bytes = max_body_bytes
        self._wire = wire
        self._trace = dict(trace or {})
        self._encode_effect = encode_effect
        self._now = now
        self._outputs: list[Output] = []
        self._lock = threading.Lock()
        self._closed = False
        self._process = os.getpid()

    def emit(
        self,
        kind: OutputKind,
        value: Any,
        *,
        to: str | None = None,
        type: str | None = None,
        headers: Mapping[str, Any] | None = None,
        correlation_id: str | None = None,
        reply_to: str | None = None,
        ttl: float | None = None,
        delay: float = 0.0,
        priority: int | None = None,
        mandatory: bool = True,
    ) -> UUID:
        """Add one output; its body is encoded now, so later changes to `value` don't matter."""
        _check_number("ttl", ttl)
        _check_number("delay", delay)
        _check_number("priority", priority, most=MAX_PRIORITY)
        if kind is OutputKind.RETURN:
            name, body = None, b"null"
        else:
            name, body = self._types.encode(value, type)
        return self._add(
            kind,
            name,
            body,
            to=to,
            headers=headers,
            delay=delay,
            mandatory=mandatory,
            correlation_id=correlation_id,
            reply_to=reply_to,
            ttl=ttl,
            priority=priority,
        )

    def emit_encoded(self, type: str, body: bytes, *, to: str | None, headers: Mapping[str, Any] | None) -> UUID:
        """Add one output whose body is JSON already: sent to a queue, or published where `to` names none."""
        try:
            parse_json(Message(body=body))
        except UndecodableMessage as error:
            raise OutputError(f"The output of type {type!r} is no JSON: {error.message}") from error
        return self._add(OutputKind.SEND if to else OutputKind.PUBLISH, type, body, to=to, headers=headers)

    def emit_effect(self, name: str, value: Any) -> UUID:
        """Add work to be done after COMMIT by the function that is registered under this name."""
        if not self._stored:
            raise OutputError(
                f"The effect {name!r} was declared by a handler whose type is not opted in: nothing of it is stored.",
                fix="Say policy=Idempotent(…) for the type; or do it in the handler, each time that it runs.",
            )
        if self._encode_effect is None:
            raise OutputError(
                f"The effect {name!r} can't be stored here: nobody would run it.",
                fix="Effects need an App, whose workers run them, on a SQL store (or one in memory).",
            )
        return self._add(OutputKind.EFFECT, name, self._encode_effect(name, value), to=name, headers=None)

    def _add(
        self,
        kind: OutputKind,
        name: str | None,
        body: bytes,
        *,
        to: str | None,
        headers: Mapping[str, Any] | None,
        delay: float = 0.0,
        mandatory: bool = True,
        correlation_id: str | None = None,
        **properties: Any,
    ) -> UUID:
        if len(body) > self._max_body_bytes:
            raise OutputError(
                f"The output of type {name!r} has {len(body)} bytes; {self._max_body_bytes} is the limit.",
                fix="Send a reference instead, or raise max_body_bytes.",
            )
        if os.getpid() != self._process:
            raise OutputError(
                f"An output of type {name!r} was emitted in a process that its handler had forked; it was not sent.",
                fix="Emit it in the handler's own process, from what the child hands back.",
            )
        own_headers = {**self._headers(), **_checked_headers(headers)}
        _check_names(
            {"type": name, "queue": to, "correlation_id": correlation_id, "reply_to": properties.get("reply_to")}
        )
        exchange, routing_key = self._destination(kind, name, to)
        _check_names({"destination": routing_key})
        with self._lock:
            if self._closed:
                raise OutputError(
                    f"An output of type {name!r} was emitted after its handling had ended; it was not sent.",
                    fix="Emit before the handler returns; join the handler's threads.",
                )
            if len(self._outputs) >= MAX_OUTPUTS:
                raise OutputError(f"One handling emitted more than {MAX_OUTPUTS} outputs.", fix="Split the work.")
            ordinal = len(self._outputs)
            output_id = self._derive_id(ordinal)
            message = Message(
                body=body,
                type=name,
                message_id=str(output_id),
                correlation_id=correlation_id or self._correlation_id(),
                headers=own_headers,
                timestamp=self._now,
                **properties,
            )
            if self._wire is not None and kind is not OutputKind.EFFECT:
                message = self._wire(message)
            self._outputs.append(
                Output(
                    id=output_id,
                    ordinal=ordinal,
                    kind=kind,
                    exchange=exchange,
                    routing_key=routing_key,
                    message=message,
                    mandatory=mandatory,
                    delay=delay,
                )
            )
        return output_id

    def emit_returned(self, result: Any, *, replies: bool) -> None:
        """Emit what a handler returned: `None` nothing, a message one output, a list or generator several."""
        if result is None:
            return
        if isinstance(result, list | tuple) or (isinstance(result, Iterable) and hasattr(result, "__next__")):
            for item in result:
                self.emit_returned(item, replies=replies)
            return
        answer = replies and self._cause is not None and self._cause.reply_to is not None
        self.emit(OutputKind.REPLY if answer else OutputKind.PUBLISH, result)

    def close(self) -> list[Output]:
        """No more outputs; those emitted so far."""
        with self._lock:
            self._closed = True
            return list(self._outputs)

    @property
    def outputs(self) -> tuple[Output, ...]:
        """What was emitted so far."""
        with self._lock:
            return tuple(self._outputs)

    def _destination(self, kind: OutputKind, name: str | None, to: str | None) -> tuple[str, str]:
        match kind:
            case OutputKind.PUBLISH:
                return self._exchange, to or name or ""
            case OutputKind.SEND:
                if not to:
                    raise OutputError("send() needs the queue it sends to.", fix='Say to="queue".')
                return "", to
            case OutputKind.EFFECT:
                return "", to or ""
        reply_to = self._cause.reply_to if self._cause is not None else None
        if reply_to and "\ufffd" in reply_to:
            raise OutputError(
                "The message being handled has a reply_to that is not UTF-8: an answer could go to another queue.",
                fix="Have the sender name its queue in UTF-8.",
            )
        if not reply_to:
            raise OutputError(
                "The message being handled has no reply_to, so it can't be answered.",
                fix="Have the sender set reply_to, or use publish() or send().",
            )
        return "", reply_to

    def _correlation_id(self) -> str | None:
        if self._cause is None:
            return self._causation_id
        return self._cause.correlation_id or self._cause.message_id or self._causation_id

    def _headers(self) -> dict[str, Any]:
        passed_on = BAGGAGE_HEADERS if self._trace else TRACE_HEADERS
        headers = {**carried_headers(self._causation_id, self._cause, passed_on), **self._trace}
        if not self._stored:
            headers[UNSTORED_HEADER] = 1
        return headers


def carried_headers(
    causation_id: str | None, cause: Message | None, passed_on: Sequence[str] = TRACE_HEADERS
) -> dict[str, Any]:
    """The headers of every output of a handling: what caused it, after how many others, in which trace.

    Example:
        >>> carried_headers("m-1", Message(body=b"{}", headers={"tracestate": "a=1", "idemp-hops": 2, "tenant": 7}))
        {'idemp-causation-id': 'm-1', 'tracestate': 'a=1', 'idemp-hops': 3}
    """
    headers: dict[str, Any] = {CAUSATION_HEADER: causation_id} if causation_id else {}
    if cause is not None:
        headers.update((name, cause.headers[name]) for name in passed_on if name in cause.headers)
        headers[HOPS_HEADER] = cause.hops + 1
    return headers


def _is_ours(name: object) -> bool:
    return isinstance(name, str) and name.startswith(HEADER_PREFIX) and name != RETURN_CODE_HEADER


def _checked_headers(headers: Mapping[str, Any] | None) -> dict[str, Any]:
    """The user's headers, which come back from the store as they went only if they are JSON values."""
    if not headers:
        return {}
    # Those of idemp tell the story of *one* message: a handler that passes its own message's headers on means the others.
    given = {name: value for name, value in headers.items() if not _is_ours(name)}
    try:
        same = json.loads(json.dumps(given, allow_nan=False)) == given
    except (TypeError, ValueError, RecursionError):
        same = False
    if not same:
        raise OutputError(
            "The headers of an output are no JSON values.",
            fix="Use text, numbers, booleans, None, lists, and dictionaries with text as keys.",
        )
    for name in given:
        _check_names({"name of a header": name})
    return given
