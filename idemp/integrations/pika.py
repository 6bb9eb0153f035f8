"""Callback of a channel of pika's `BlockingConnection`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from idemp.integrations._settling import BlockingCallbacks, properties_of

__all__ = ["PikaCallbacks", "PikaMessage"]


@dataclass
class PikaMessage:
    """A message that pika has delivered, for the function for dead letters.

    Attributes:
        channel: `pika.adapters.blocking_connection.BlockingChannel`.
        method: `pika.spec.Basic.Deliver`.
        properties: `pika.BasicProperties`.
        acknowledged: Whether the message was acknowledged or rejected.

    Example:
        >>> PikaMessage(None, None, None, b"{}").acknowledged
        False
    """

    channel: Any
    method: Any
    properties: Any
    body: bytes
    acknowledged: bool = field(default=False, init=False)

    def ack(self) -> None:
        """Acknowledge the message.

        Example:
            >>> def dead(message: PikaMessage, error: Exception) -> None:
            ...     message.ack()
        """
        self.channel.basic_ack(self.method.delivery_tag)
        self.acknowledged = True

    def reject(self, *, requeue: bool = False) -> None:
        """Reject the message: requeue it, or leave it to the dead-letter exchange of its queue.

        Example:
            >>> def dead(message: PikaMessage, error: Exception) -> None:
            ...     message.reject()
        """
        self.channel.basic_reject(self.method.delivery_tag, requeue=requeue)
        self.acknowledged = True


class PikaCallbacks(BlockingCallbacks):
    """`on_message` of a `BlockingChannel`: it runs a wrapped handler and settles each message.

    While it waits, the connection processes its events, so heartbeats go on.

    Args:
        handle: Function returned by `Inbox.wrap`.
        dead: Function of a `PikaMessage` that cannot succeed on another run, and of its error. If it returns, the message is
            acknowledged, unless it has settled the message itself. If it raises, the message is requeued.
        pause: Time before a message is requeued.

    Raises:
        ConfigurationError: `handle` or `dead` is `async def`, or `pause` is not a duration.

    Example:
        >>> from idemp.integrations import reject
        >>> def consume(channel, handle) -> None:
        ...     channel.basic_consume("payments", PikaCallbacks(handle, dead=reject).on_message)
        ...     channel.start_consuming()
    """

    def on_message(self, channel: Any, method: Any, properties: Any, body: bytes) -> None:
        """Handle and settle a message.

        Raises:
            Exception: An error of the connection, on which the message cannot be settled: the broker delivers it again.

        Example:
            >>> from types import SimpleNamespace as Stub
            >>> def handle(body, properties, redelivered=False):
            ...     print("handled", body, properties)
            >>> channel = Stub(basic_ack=lambda tag: print("acknowledged", tag), connection=Stub(sleep=None))
            >>> method, properties = Stub(delivery_tag=1, redelivered=False), Stub(message_id="7", type=None)
            >>> PikaCallbacks(handle, dead=print).on_message(channel, method, properties, b"{}")
            handled b'{}' {'message_id': '7'}
            acknowledged 1
        """
        known = properties_of(properties)
        self.settle(
            PikaMessage(channel, method, properties, body),
            known.get("message_id"),
            lambda again: self.handle(body, known, redelivered=again or bool(method.redelivered)),
            channel.connection.sleep,
        )
