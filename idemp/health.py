"""What a process answers to probes such as Kubernetes': is it alive, is it ready, what runs for long."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["Handling", "Health", "Probe"]


@dataclass(frozen=True, slots=True)
class Handling:
    """A handler that has been running for long.

    Attributes:
        consumer: whose handler.
        message_type: of the message, if it says one.
        seconds: for how long.
    """

    consumer: str
    message_type: str | None
    seconds: float


@dataclass(frozen=True, slots=True)
class Health:
    """The state of a process.

    Attributes:
        problems: why it should be restarted; empty while it is alive.
        waiting: why it does no work now; empty while it is ready.
        handling: handlers that have been running for long, whatever is made of it.

    Example:
        >>> Health(waiting=["orders: the database is away"]).alive, Health(waiting=["starting"]).ready
        (True, False)
    """

    problems: list[str] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
    handling: list[Handling] = field(default_factory=list)

    @property
    def alive(self) -> bool:
        """Whether a restart would not help."""
        return not self.problems

    @property
    def ready(self) -> bool:
        """Whether it does its work."""
        return not self.problems and not self.waiting


Probe = Callable[[], Health]
"""Answers a probe; called from other threads."""
