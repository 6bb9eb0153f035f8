"""An app with a broker in memory whose messages are prepared, over ports in memory."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from idemp import App
from idemp.broker.memory import InMemoryBroker
from idemp.broker.port import Topology
from idemp.inbox.memory import InMemoryStore
from idemp.prepared import InMemoryBarrier, InMemoryHome, PreparedMessages
from idemp.testing.clock import FakeClock

if TYPE_CHECKING:
    from collections.abc import Callable

MINUTE = timedelta(minutes=1)


@dataclass
class Shop:
    """A producer: its app, its prepared messages, and what they are made of."""

    app: App
    prepared: PreparedMessages
    broker: InMemoryBroker
    clock: FakeClock

    @property
    def barrier(self) -> Any:
        return self.prepared.barrier

    @property
    def home(self) -> Any:
        return self.prepared.home

    def arrived(self) -> list[str]:
        """The ids of what consumers of `stock` see, copies included."""
        return [message.message_id or "" for message in self.broker.browse("stock", 1000)]

    def later(self, by: timedelta = 2 * MINUTE) -> Any:
        """A round of the checker when everything that waits is due."""
        self.clock.advance(by)
        return self.prepared.run_once()


@pytest.fixture
def open_shop() -> Callable[..., Shop]:
    """Makes one; options as of `PreparedMessages`, with `checker=` it has no barrier."""

    def make(**options: Any) -> Shop:
        clock = FakeClock()
        broker = InMemoryBroker(clock)
        broker.declare(Topology(exchange="idemp", queues=("stock",)))
        app = App("orders", store=InMemoryStore(), broker=broker, clock=clock)
        if "checker" not in options:
            options.setdefault("barrier", InMemoryBarrier(clock))
        home = options.pop("home", InMemoryHome)(clock)
        return Shop(app, PreparedMessages(app, home, **options), broker, clock)

    return make


@pytest.fixture
def shop(open_shop: Callable[..., Shop]) -> Shop:
    """One with a barrier."""
    return open_shop()
