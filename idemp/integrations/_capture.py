"""The context that messages of other libraries are captured into."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from idemp.context import BaseContext
from idemp.events import RUNNING

__all__ = ["capturing", "current"]

_SAID: Final[ContextVar[tuple[BaseContext | None] | None]] = ContextVar("idemp_captured_into", default=None)


def current() -> BaseContext | None:
    """Return the context of the block or handler that runs in this thread or task; None lets messages pass.

    A handler of lists has none, because it does not say for which message it sends.

    Example:
        >>> current() is None
        True
    """
    if (said := _SAID.get()) is not None:
        return said[0]
    running = RUNNING.get()
    return running[0].context if len(running) == 1 else None


@contextmanager
def capturing(context: BaseContext | None) -> Iterator[None]:
    """Capture messages into a context in this block; None lets them pass, as where they are sent after COMMIT.

    Example:
        >>> with capturing(BaseContext("billing", {}, None, None)):
        ...     current().consumer
        'billing'
    """
    token = _SAID.set((context,))
    try:
        yield
    finally:
        _SAID.reset(token)
