"""The context that messages of other libraries are captured into."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from idemp.context import BaseContext

__all__ = ["capturing", "current"]

current: Final[ContextVar[BaseContext | None]] = ContextVar("idemp_captured_into", default=None)
"""The context of the handler or block that runs in this thread or task; None lets messages pass."""


@contextmanager
def capturing(context: BaseContext | None) -> Iterator[None]:
    """Capture messages into a context in this block; None lets them pass, as where they are sent after COMMIT.

    Example:
        >>> with capturing(BaseContext("billing", {}, None, None)):
        ...     current.get().consumer
        'billing'
    """
    token = current.set(context)
    try:
        yield
    finally:
        current.reset(token)
