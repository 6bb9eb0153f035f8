"""The context that messages of other libraries are captured into."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from idemp.context import BaseContext
from idemp.events import RUNNING
from idemp.ports import Outlet

__all__ = ["captured_into", "capturing", "current"]

_SAID: Final[ContextVar[tuple[BaseContext | None, Outlet | None] | None]] = ContextVar("idemp_captured_into", default=None)


def current(broker: Outlet | None = None) -> BaseContext | None:
    """Return the context of the block or handler that runs in this thread or task; None lets messages pass.

    A handler of lists has none, because it does not say for which message it sends. What is sent behind a handling is no part of it.

    Args:
        broker: Takes the messages that are to be captured: a context whose outputs go to another broker does not count.

    Example:
        >>> current() is None
        True
    """
    context = captured_into(broker)
    return None if context is None or context.closed else context


def captured_into(broker: Outlet | None = None) -> BaseContext | None:
    """Return the context as `current` does, also one whose handling is over: it refuses what a part of it sends too late.

    Example:
        >>> captured_into() is None
        True
    """
    if (said := _SAID.get()) is not None:
        context, outlet = said
        return context if None in (broker, outlet) or outlet is broker else None
    running = RUNNING.get()
    return running[0].context if len(running) == 1 else None


@contextmanager
def capturing(context: BaseContext | None, broker: Outlet | None = None) -> Iterator[None]:
    """Capture messages into a context in this block; None lets them pass, as where they are sent after COMMIT.

    Args:
        context: Stores the messages.
        broker: Takes its outputs; None for any.

    Example:
        >>> with capturing(BaseContext("billing", {}, None, None)):
        ...     current().consumer
        'billing'
    """
    token = _SAID.set((context, broker))
    try:
        yield
    finally:
        _SAID.reset(token)
