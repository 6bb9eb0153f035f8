"""Callback of aio-pika's queues."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

from idemp.events import log
from idemp.integrations._settling import FIRST_PAUSE, LONGEST_PAUSE, Callbacks, Fate, fate, properties_of

__all__ = ["AioPikaCallbacks"]


class AioPikaCallbacks(Callbacks):
    """`on_message` of an `aio_pika.Queue`: it runs a wrapped handler and settles each message.

    Args:
        handle: Function returned by `AsyncInbox.wrap`.
        dead: Function of a message that cannot succeed on another run, and of its error; an awaitable result is awaited. If it
            returns, the message is acknowledged, unless it has settled the message itself. If it raises, the message is requeued.
        pause: Time before a message is requeued.

    Raises:
        ConfigurationError: `handle` is not `async def`, or `pause` is not a duration.

    Example:
        >>> from idemp.integrations import reject
        >>> async def consume(queue, handle) -> None:
        ...     await queue.consume(AioPikaCallbacks(handle, dead=reject).on_message)
    """

    asynchronous = True

    async def on_message(self, message: Any) -> None:
        """Handle and settle an `aio_pika.IncomingMessage`. A task that is cancelled leaves the message unsettled.

        Raises:
            Exception: An error of the connection, on which the message cannot be settled: the broker delivers it again.

        Example:
            >>> from types import SimpleNamespace as Stub
            >>> async def handle(body, properties, redelivered=False):
            ...     print("handled", body, properties)
            >>> async def ack():
            ...     print("acknowledged")
            >>> message = Stub(body=b"{}", message_id="7", redelivered=False, processed=False, ack=ack)
            >>> asyncio.run(AioPikaCallbacks(handle, dead=print).on_message(message))
            handled b'{}' {'message_id': '7'}
            acknowledged
        """
        error = await self._run(message)
        if error is not None and fate(error) is Fate.DEAD:
            error = await self._bury(message, error)
        if message.processed:  # by `dead`
            return
        if error is None:
            await message.ack()
            return
        log("wrapped.failed", id=message.message_id, pause=self.pause, error=error)
        await asyncio.sleep(self.pause)
        await message.reject(requeue=True)

    async def _run(self, message: Any) -> Exception | None:
        """Run the handler until it returns, or raises an error that is not resolved by waiting."""
        pause, again, properties = FIRST_PAUSE, False, properties_of(message)
        while True:
            try:
                await self.handle(message.body, properties, redelivered=again or bool(message.redelivered))
            except Exception as error:  # noqa: BLE001 - a handler may raise anything
                if fate(error) is not Fate.HOLD:
                    return error
                if not again:
                    log("wrapped.paused", id=message.message_id, error=error)
            else:
                if again:
                    log("wrapped.resumed", id=message.message_id)
                return None
            await asyncio.sleep(pause)
            pause, again = min(2 * pause, LONGEST_PAUSE), True

    async def _bury(self, message: Any, error: Exception) -> Exception | None:
        try:
            result = self.dead(message, error)
            if inspect.isawaitable(result):
                await result
        except Exception as failure:  # noqa: BLE001 - any error requeues the message
            return failure
        log("wrapped.dead", id=message.message_id, error=error)
        return None
