"""Hooks: methods that a worker calls at five points of a delivery. Metrics and traces are built on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from idemp.events import log
from idemp.handling import Handling

__all__ = ["Hooks", "LogDeliveries", "guard"]


class Hooks:
    """Base class with hooks that do nothing. An error of a hook is logged once, and changes nothing else.

    They are called in the thread that consumes, so a slow hook makes a slow worker. Where handlers are `async def`, the first three
    are called on the event loop (for a plain handler, in its thread), and the others in the thread that consumes.

    Example:
        >>> class Count(Hooks):
        ...     duplicates = 0
        ...     def on_duplicate(self, handling: Handling) -> None:
        ...         self.duplicates += 1
        >>> from idemp import App
        >>> app = App("billing", hooks=[Count()])
    """

    def before_handle(self, handling: Handling) -> None:
        """Called when a handler starts; the id of its message is claimed."""

    def after_commit(self, handling: Handling) -> None:
        """Called when effects and outputs are committed.

        In a group on PostgreSQL they may not be on disk: a server that dies in the next milliseconds undoes them, the message is
        handled again, and this is called again. `on_settled` comes when they are on disk.
        """

    def on_duplicate(self, handling: Handling) -> None:
        """Called when a message was handled before, and its handler is skipped."""

    def on_hold(self, reason: str) -> None:
        """Called when consumption pauses, because the database takes no work."""

    def on_settled(self, handling: Handling) -> None:
        """Called when a delivery is done: acknowledged, a retry or a dead letter; see `handling.decision`."""


class LogDeliveries(Hooks):
    """Logs each delivery at DEBUG; `idemp worker -v` has it.

    Example:
        >>> from idemp import App
        >>> app = App("billing", hooks=[LogDeliveries()])
    """

    def on_settled(self, handling: Handling) -> None:
        """Log the type, the ids, the verdict of the claim and the outcome."""
        properties = {
            name: value[:200] if isinstance(value, str) else value for name, value in handling.delivery.properties.items()
        }
        log(
            "delivery.settled",
            type=handling.handler.type if handling.handler else properties.get("type"),
            id=properties.get("message_id"),
            claim=handling.claim.original[:200] if handling.claim else None,
            verdict=handling.verdict.value if handling.verdict else "not claimed",
            outcome=handling.outcome,
            outputs=len(handling.outputs),
        )


def guard(hooks: Sequence[Hooks]) -> Callable[..., None]:
    """Return a function that calls a hook by its name, on each of several.

    Example:
        >>> class Broken(Hooks):
        ...     def on_hold(self, reason: str) -> None:
        ...         raise ValueError
        >>> guard([Broken()])("on_hold", "the disk is full")
    """
    failed: set[tuple[int, str]] = set()

    def call(name: str, *arguments: Any) -> None:
        for number, hook in enumerate(hooks):
            try:
                getattr(hook, name)(*arguments)
            except Exception as error:  # noqa: BLE001 - of a hook
                if (number, name) not in failed:
                    failed.add((number, name))
                    log("hook.failed", hook=f"{type(hook).__name__}.{name}", error=error)

    return call
