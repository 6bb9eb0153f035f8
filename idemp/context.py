"""What a handler sees: its message's properties, the claim's transaction, and the ways to emit outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from idemp.emitting import Emitter
from idemp.errors import HandlerError, OutputError
from idemp.messages import (
    RETURN_CODE_HEADER,
    Message,
    Output,
    OutputKind,
)

if TYPE_CHECKING:
    from uuid import UUID

    from sqlalchemy import Connection
    from sqlalchemy.orm import Session

    from idemp.twophase import Databases, Transaction


class Context:
    """What a handler gets beside its message.

    Attributes:
        message: the message with its properties, as it arrived.
        message_id: the id that the inbox counts by, as text.
        attempt: 1 for the first run of the handler on this message, 2 after its first failure, and so on.
        headers: the message's headers.

    Example:
        >>> from idemp.testing import context
        >>> ctx = context(message_id="m-1")
        >>> _ = ctx.send({"sku": "A-1"}, to="stock", type="stock.Reserve")
        >>> ctx.outputs[0].routing_key, ctx.outputs[0].message.causation_id
        ('stock', 'm-1')
    """

    def __init__(
        self,
        *,
        message: Message,
        message_id: str | None,
        attempt: int,
        unit: Any,
        emitter: Emitter,
        databases: Databases | None = None,
    ) -> None:
        self.message = message
        self.message_id = message_id
        self.attempt = attempt
        self.headers: Mapping[str, Any] = message.headers
        self._unit = unit
        self._emitter = emitter
        self._databases = databases

    @property
    def session(self) -> Session:
        """An ORM session in the claim's own transaction; commit and rollback are refused."""
        session: Session = self._unit.session
        return session

    @property
    def connection(self) -> Connection:
        """The claim's own connection; commit, rollback and autocommit are refused."""
        connection: Connection = self._unit.connection
        return connection

    def database(self, name: str) -> Transaction:
        """Another database, whose transaction begins with the first call and commits if and only if the claim's does.

        Its `session` and `connection` are as those of the context: commit and rollback are refused.

        Args:
            name: one of those that the type's policy names, `TwoPhase("ledger")`.

        Raises:
            HandlerError: the policy does not name it.
            BranchUnavailable: it can't be reached; let it out, and the delivery comes again.
        """
        if self._databases is None:
            raise HandlerError(
                f"The handler asks for the database {name!r}, and its type's policy names none.",
                fix=f'Say policy=TwoPhase("{name}", …), and register it: App(…, databases={{"{name}": …}}).',
            )
        return self._databases.open(name)

    @property
    def outputs(self) -> tuple[Output, ...]:
        """What this handling emitted so far."""
        return self._emitter.outputs

    def publish(
        self,
        message: Any,
        *,
        type: str | None = None,
        headers: Mapping[str, Any] | None = None,
        correlation_id: str | None = None,
        ttl: float | None = None,
        delay: float = 0.0,
        priority: int | None = None,
        mandatory: bool = True,
    ) -> UUID:
        """Publish to whoever subscribed to the message's type, after COMMIT.

        Args:
            message: a pydantic model, a dataclass, or a dict with `type`.
            type: message type name, where the class does not say it.
            headers: application headers; values are JSON values.
            correlation_id: default that of the message being handled.
            ttl: seconds after which the broker may drop it; on RabbitMQ of no effect beside `delay`.
            delay: seconds that the broker holds it back. RabbitMQ confirms it when it begins to wait: if no queue takes
                it afterwards, it is not returned, but stays in its delay tier until a queue takes it.
            priority: 0 to 255.
            mandatory: `False` if it is fine that no queue takes it.

        Returns:
            The output's id, which its consumers see as message id.

        Raises:
            OutputError: no message, too large, or the handling has ended.
        """
        return self._emitter.emit(
            OutputKind.PUBLISH,
            message,
            type=type,
            headers=headers,
            correlation_id=correlation_id,
            ttl=ttl,
            delay=delay,
            priority=priority,
            mandatory=mandatory,
        )

    def send(
        self,
        message: Any,
        *,
        to: str,
        type: str | None = None,
        headers: Mapping[str, Any] | None = None,
        correlation_id: str | None = None,
        reply_to: str | None = None,
        ttl: float | None = None,
        delay: float = 0.0,
        priority: int | None = None,
    ) -> UUID:
        """Send to the queue `to`, after COMMIT. Other arguments, result and errors as in `publish`."""
        return self._emitter.emit(
            OutputKind.SEND,
            message,
            to=to,
            type=type,
            headers=headers,
            correlation_id=correlation_id,
            reply_to=reply_to,
            ttl=ttl,
            delay=delay,
            priority=priority,
        )

    def reply(
        self,
        message: Any,
        *,
        type: str | None = None,
        headers: Mapping[str, Any] | None = None,
    ) -> UUID:
        """Answer to `reply_to` of the message being handled, under its correlation id.

        Raises:
            OutputError: it has no `reply_to`; otherwise as in `publish`.
        """
        return self._emitter.emit(OutputKind.REPLY, message, type=type, headers=headers)

    def effect(self, name: str, value: Any) -> UUID:
        """Have something done outside the database after COMMIT, at least once: a mail, an HTTP call.

        Args:
            name: what a function is registered as: `@app.effect(name)`.
            value: what it takes; stored as JSON, so leave secrets out.

        Returns:
            The output's id, which the function gets as `run.id`: its idempotency key.

        Raises:
            OutputError: no such effect is registered, it takes another value, or the message's type is not opted in.

        Example:
            >>> from idemp.testing import context
            >>> ctx = context(message_id="m-1")
            >>> _ = ctx.effect("mail.receipt", {"to": "ann@example.org"})
            >>> ctx.outputs[0].kind.value, ctx.outputs[0].routing_key, ctx.outputs[0].message.body
            ('effect', 'mail.receipt', b'{"to":"ann@example.org"}')
        """
        return self._emitter.emit_effect(name, value)

    def emit_encoded(
        self, body: bytes, *, type: str, to: str | None = None, headers: Mapping[str, Any] | None = None
    ) -> UUID:
        """Send to the queue `to`, or publish without one, what is JSON already, byte for byte.

        Raises:
            OutputError: it is no JSON; otherwise as in `publish`.

        Example:
            >>> from idemp.testing import context
            >>> ctx = context(message_id="m-1")
            >>> _ = ctx.emit_encoded(b'{"n": 1.10}', type="stock.Counted")
            >>> ctx.outputs[0].message.body
            b'{"n": 1.10}'
        """
        return self._emitter.emit_encoded(type, body, to=to, headers=headers)

    def return_(self, code: int) -> UUID:
        """Answer with a status code only.

        Raises:
            OutputError: the message being handled has no `reply_to`.
        """
        return self._emitter.emit(OutputKind.RETURN, None, headers={RETURN_CODE_HEADER: code})


class BatchContext:
    """What a batch handler gets beside its messages.

    Attributes:
        each: the context of each message, in their order: its id, its headers, and what it emits.

    Example:
        >>> from idemp.testing import batch_context
        >>> ctx = batch_context("m-1", "m-2")
        >>> for one in ctx.each:
        ...     _ = one.send({"sku": "A-1"}, to="stock", type="stock.Reserve")
        >>> [one.outputs[0].message.causation_id for one in ctx.each]
        ['m-1', 'm-2']
    """

    def __init__(self, each: Sequence[Context]) -> None:
        self.each = tuple(each)

    @property
    def session(self) -> Session:
        """As `Context.session`; there is one for all messages."""
        return self.each[0].session

    @property
    def connection(self) -> Connection:
        """As `Context.connection`."""
        return self.each[0].connection

    def split(self, result: Any) -> Sequence[Any]:
        """What a batch handler returned, for each message.

        Raises:
            OutputError: it is neither `None` nor a list with one entry for each message.
        """
        if result is None:
            return [None] * len(self.each)
        if not isinstance(result, list | tuple) or len(result) != len(self.each):
            said = f"{len(result)} entries" if isinstance(result, list | tuple) else f"a {type(result).__name__}"
            raise OutputError(
                f"A batch handler returned {said} for {len(self.each)} messages.",
                fix="Return a list with one entry for each message (None, a message or several), or nothing.",
            )
        return result
