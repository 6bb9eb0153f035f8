"""The conformance suite, on RabbitMQ."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import pytest

from idemp.brokers.rabbitmq import RabbitBroker
from idemp.brokers.rabbitmq.link import addresses
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
def brokers() -> list[RabbitBroker]:
    return []


@pytest.fixture
def open_broker(vhost: str, brokers: list[RabbitBroker]) -> Iterator[Callable[[str], RabbitBroker]]:
    def open_broker(worker: str) -> RabbitBroker:
        brokers.append(Recording(vhost))
        return brokers[-1]

    yield open_broker
    while Recording.opened:
        Recording.opened.pop().close()


@pytest.fixture
def lose(vhost: str) -> Callable[[], None]:
    def lose() -> None:
        ask("rabbitmq", "close_connections", vhost)

    return lose


@pytest.fixture
def outage(
    brokers: list[RabbitBroker], lose: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> Callable[[], AbstractContextManager[None]]:
    @contextmanager
    def outage() -> Iterator[None]:
        with monkeypatch.context() as patch:
            for each in brokers:
                patch.setattr(each, "_hosts", addresses("amqp://127.0.0.1:1"))
            lose()
            yield

    return outage


class TestBroker(BrokerConformance):
    lease = math.inf
    flags_returned = True
