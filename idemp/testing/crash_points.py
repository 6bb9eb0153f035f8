"""Crash points: a process may die before and after each call of a port."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NoReturn

from sqlalchemy.exc import TimeoutError as NoConnection

from idemp.errors import Unavailable
from idemp.ports import Broker, Finding
from idemp.process import Adapters

__all__ = ["Crash", "CrashPoints", "outage"]

CALLS: Final[Mapping[str, frozenset[str]]] = {
    "store": frozenset({"connect", "claim", "finish", "read_back"}),
    "scheduler": frozenset({"confirm", "refuse", "settle", "lease_messages", "lease_suspect", "lease_outputs"}),
    "publisher": frozenset({"send", "publish"}),
    "receiver": frozenset({"receive", "ack"}),
}


class Crash(BaseException):
    """The process died, as far as the code under test can tell.

    Example:
        >>> issubclass(Crash, Exception)
        False
    """


class CrashPoints:
    """Counts the calls of wrapped ports, and crashes before or after one of them.

    Args:
        at: Number of the point to crash at, from 0; None only counts.
        crash: Called at that point; raises `Crash` by default.

    Attributes:
        names: Points that were reached, such as `"store.finish after"`.

    Example:
        >>> class Store:
        ...     def claim(self) -> str:
        ...         return "claimed"
        >>> points = CrashPoints(at=1)
        >>> points.wrap("store", Store()).claim()
        Traceback (most recent call last):
        idemp.testing.crash_points.Crash: store.claim after
        >>> points.names
        ['store.claim before', 'store.claim after']
    """

    def __init__(self, at: int | None = None, crash: Callable[[str], None] | None = None) -> None:
        self._at, self._crash = at, crash or _raise
        self.names: list[str] = []

    def wrap(self, role: str, port: Any) -> Any:
        """Return a port whose calls are points.

        Args:
            role: `store`, `scheduler`, `publisher` or `receiver`.
            port: The port.
        """
        return _Wrapped(self, role, port)

    def wrap_adapters(self, adapters: Adapters) -> Adapters:
        """Return the adapters of a process with every call a point."""
        broker: Any = _Broker(self, adapters.broker)
        store, scheduler = self.wrap("store", adapters.store), self.wrap("scheduler", adapters.scheduler)
        return replace(
            adapters,
            store=store,
            scheduler=scheduler,
            broker=broker,
            open_async=lambda: self.wrap("store", adapters.open_async()),
        )

    def arm(self, count: int, crash: Callable[[str], None] | None = None) -> None:
        """Crash at a point that is still to come.

        Args:
            count: Points that are passed before, from 0.
            crash: Called there; raises `Crash` by default.
        """
        self._at, self._crash = len(self.names) + count, crash or _raise

    def disarm(self) -> None:
        """Pass all points."""
        self._at = None

    def reached(self, name: str) -> None:
        """Note a point, and crash if it is the one."""
        self.names.append(name)
        if len(self.names) - 1 == self._at:
            self._crash(name)


class _Wrapped:
    def __init__(self, points: CrashPoints, role: str, port: Any) -> None:
        self._points, self._role, self.port = points, role, port

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.port, name)
        if name not in CALLS[self._role]:
            return value

        def call(*args: Any, **options: Any) -> Any:
            self._points.reached(f"{self._role}.{name} before")
            result = value(*args, **options)
            self._points.reached(f"{self._role}.{name} after")
            return result

        return call


class _Broker:
    def __init__(self, points: CrashPoints, broker: Broker) -> None:
        self._points, self._broker = points, broker

    def declare(self, queue: str, types: Sequence[str]) -> Sequence[Finding]:
        return self._broker.declare(queue, types)

    def receiver(self, queue: str, prefetch: int = 40) -> Any:
        return self._points.wrap("receiver", self._broker.receiver(queue, prefetch))

    def publisher(self) -> Any:
        return self._points.wrap("publisher", self._broker.publisher())


def outage(name: str) -> NoReturn:
    """Fail as a port does whose server is away: in place of a crash, so that the store, publisher or receiver is a faulty one.

    Example:
        >>> points = CrashPoints(at=0, crash=outage)
        >>> points.reached("publisher.publish before")
        Traceback (most recent call last):
        idemp.errors.Unavailable: publisher.publish before
    """
    if name.startswith(("store", "scheduler")):
        raise NoConnection(name)
    raise Unavailable(name)


def _raise(name: str) -> NoReturn:
    raise Crash(name)
