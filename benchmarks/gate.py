"""Deliveries are held back until all of them wait in the queue: so a block is measured from one moment to another."""

from __future__ import annotations

import threading
import time
from multiprocessing.sharedctypes import RawArray
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from idemp.broker.port import Broker, Delivery, Publisher, Receiver, Settlement

_SECONDS: Final = 50.0  # connections that nobody services in that time are still alive
_LOOK_SECONDS: Final = 0.5
_IDLE_SECONDS: Final = 5.0


class Gate:
    """Hands out until so many deliveries are settled; shared by threads, or by processes.

    Args:
        kit: where its events and its lock come from: `threading`, or a context of `multiprocessing`.
    """

    def __init__(self, kit: Any = threading) -> None:
        self.opened, self.stopped = kit.Event(), kit.Event()
        self._done, self._lock = kit.Event(), kit.Lock()
        self._counts: Any = RawArray("q", 2)  # settled, and how many are to be

    def let(self, count: int, watch: Callable[[], None] = lambda: None) -> float:
        """Hand out until so many are settled; the seconds it took. `watch` is called while it waits."""
        self._done.clear()
        self._counts[1] += count
        began = time.perf_counter()
        self.opened.set()
        while not self._done.wait(_LOOK_SECONDS):
            watch()
            if time.perf_counter() - began > _SECONDS:
                raise TimeoutError(f"{self._counts[1] - self._counts[0]} of {count} deliveries are not settled")
        seconds = time.perf_counter() - began
        self.opened.clear()
        return seconds

    def settled(self) -> None:
        """One more."""
        with self._lock:
            self._counts[0] += 1  # perhaps of the next block already: a receiver may be waiting when the gate closes
            if self._counts[0] == self._counts[1]:
                self._done.set()


class GatedBroker:
    """A broker whose receivers hand nothing out until they are let.

    Args:
        inner: the broker.
        gate: what lets them.
        waits: whether each confirm is waited for before the next delivery is handled.
    """

    def __init__(self, inner: Broker, gate: Gate, *, waits: bool = False) -> None:
        self._inner = inner
        self._gate = gate
        self._waits = waits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def receiver(self, queues: Sequence[str], *, prefetch: int) -> Any:
        """A receiver behind the gate."""
        return _GatedReceiver(self._inner.receiver(queues, prefetch=prefetch), self._gate)

    def publisher(self) -> Any:
        """A publisher that need not be waited for, or has to be."""
        publisher = self._inner.publisher()
        return _Waiting(publisher) if self._waits else publisher


class _GatedReceiver:
    def __init__(self, inner: Receiver, gate: Gate) -> None:
        self._inner = inner
        self._gate = gate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def receive(self, timeout: float) -> Delivery | None:
        opened = self._gate.opened
        # It waits longer than it is asked to: while others are measured it shall take no CPU time.
        if opened.is_set() or (timeout and opened.wait(max(timeout, _IDLE_SECONDS))):
            return self._inner.receive(timeout)
        return None

    def settle(self, delivery: Delivery, settlement: Settlement) -> None:
        self._inner.settle(delivery, settlement)
        self._gate.settled()


class _Waiting:
    """A publisher that can't but wait."""

    def __init__(self, inner: Publisher) -> None:
        self.publish = inner.publish
        self.keep_alive = inner.keep_alive
        self.close = inner.close
