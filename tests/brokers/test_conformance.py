"""The conformance suite, on RabbitMQ."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest

from idemp.brokers.rabbitmq import RabbitBroker
from idemp.testing import BrokerConformance
from tests.servers import ask


class Recording(RabbitBroker):
    """Remembers what is to be closed after a test."""

    opened: ClassVar[list[Any]] = []

    def receiver(self, queue: str, prefetch: int = 40) -> Any:
        self.opened.append(super().receiver(queue, prefetch))
        return self.opened[-1]

    def publisher(self) -> Any:
        self.opened.append(super().publisher())
        return self.opened[-1]


@pytest.fixture
def open_broker(vhost: str) -> Iterator[Callable[[str], RabbitBroker]]:
    yield lambda worker: Recording(vhost)
    while Recording.opened:
        Recording.opened.pop().close()


@pytest.fixture
def lose(vhost: str) -> Callable[[], None]:
    def lose() -> None:
        ask("rabbitmq", "close_connections", vhost)

    return lose


class TestBroker(BrokerConformance):
    flags_returned = True
