"""Settling of messages that a wrapped handler has taken: one table of errors, for blocking clients and for event loops."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from enum import Enum
from typing import Any, Final

from idemp.errors import (
    ConfigurationError,
    InFlight,
    MessageError,
    TransactionEnded,
    TransactionRolledBack,
    Unavailable,
)
from idemp.events import log
from idemp.policy import Duration, seconds

__all__ = ["FIRST_PAUSE", "LONGEST_PAUSE", "BlockingCallbacks", "Callbacks", "Fate", "fate", "properties_of"]

FIRST_PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 5.0
PROPERTIES: Final = (
    "message_id", "type", "timestamp", "correlation_id", "reply_to", "content_type", "content_encoding", "headers"
)  # fmt: skip


class Fate(Enum):
    """Fate of a message whose handling raised an error."""

    DEAD = "dead letter"
    HOLD = "hold"
    REQUEUE = "requeue"


def fate(error: Exception) -> Fate:
    """Return the fate of a message whose handling raised an error.

    Example:
        >>> fate(Unavailable()), fate(ValueError())
        (<Fate.HOLD: 'hold'>, <Fate.REQUEUE: 'requeue'>)
    """
    if isinstance(error, InFlight | Unavailable | ConfigurationError):
        return Fate.HOLD  # not the message's fault, so it must not use up its delivery limit
    if isinstance(error, MessageError):
        return Fate.DEAD
    if isinstance(error, TransactionEnded) and not isinstance(error, TransactionRolledBack):
        return Fate.DEAD  # if its effects are committed, a redelivery would be a duplicate without outputs
    return Fate.REQUEUE


def properties_of(source: Any) -> dict[str, Any]:
    """Return the message properties among the attributes of an object."""
    return {name: value for name in PROPERTIES if (value := getattr(source, name, None)) is not None}


class Callbacks:
    """Options of all callbacks."""

    asynchronous = False

    def __init__(self, handle: Callable[..., Any], *, dead: Callable[[Any, Exception], Any], pause: Duration = "1s") -> None:
        if inspect.iscoroutinefunction(handle) is not self.asynchronous:
            needed = "an AsyncInbox" if self.asynchronous else "an Inbox"
            raise ConfigurationError(f"{type(self).__name__} needs a handler that {needed} has wrapped")
        if inspect.iscoroutinefunction(dead) and not self.asynchronous:
            raise ConfigurationError(f"{type(self).__name__} cannot await dead: pass a plain function")
        self.handle, self.dead, self.pause = handle, dead, seconds(pause, "pause")


class BlockingCallbacks(Callbacks):
    """Settles messages of a blocking client: kombu's, or those of pika."""

    def settle(self, message: Any, id: str | None, run: Callable[[bool], object], wait: Callable[[float], None]) -> None:
        """Run the handler, then acknowledge the message, requeue it, or give it to `dead`.

        Args:
            message: Message with `ack`, `reject` and `acknowledged`.
            id: Message id, for the log.
            run: Function that runs the handler; its argument says whether the message was tried before.
            wait: Function that waits for some seconds.
        """
        error = self._run(id, run, wait)
        if error is not None and fate(error) is Fate.DEAD:
            error = self._bury(message, id, error)
        if message.acknowledged:  # by `dead`
            return
        if error is None:
            message.ack()
            return
        log("wrapped.failed", id=id, pause=self.pause, error=error)
        wait(self.pause)
        message.reject(requeue=True)

    def _run(self, id: str | None, run: Callable[[bool], object], wait: Callable[[float], None]) -> Exception | None:
        """Run the handler until it returns, or raises an error that is not resolved by waiting."""
        pause, again = FIRST_PAUSE, False
        while True:
            try:
                run(again)
            except Exception as error:  # noqa: BLE001 - a handler may raise anything
                if fate(error) is not Fate.HOLD:
                    return error
                if not again:
                    log("wrapped.paused", id=id, error=error)
            else:
                if again:
                    log("wrapped.resumed", id=id)
                return None
            wait(pause)
            pause, again = min(2 * pause, LONGEST_PAUSE), True

    def _bury(self, message: Any, id: str | None, error: Exception) -> Exception | None:
        try:
            self.dead(message, error)
        except Exception as failure:  # noqa: BLE001 - any error requeues the message
            return failure
        log("wrapped.dead", id=id, error=error)
        return None
