"""Prepared messages whose home is RabbitMQ alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from typing import ClassVar

import pytest

from idemp.prepared.rabbitmq import RabbitMQHome
from idemp.testing.prepared_conformance import PreparedHomeConformance
from tests.servers.given import GivenRabbitMQ
from tests.servers.rabbitmq import RabbitMQ

DELAY = timedelta(seconds=0.2)


@pytest.fixture(scope="module")
def url(rabbitmq: RabbitMQ | GivenRabbitMQ) -> Iterator[str]:
    """A vhost for all of this file; each test has queues of its own."""
    name = "idemp_test_prepared"
    yield rabbitmq.create_vhost(name)
    rabbitmq.delete_vhost(name)


class TestConformance(PreparedHomeConformance):
    soon: ClassVar[timedelta] = DELAY
    later: ClassVar[timedelta] = DELAY

    @pytest.fixture
    def home(self, url: str, unique_name: str) -> Iterator[RabbitMQHome]:
        self.opened: list[RabbitMQHome] = []
        self.open = lambda: RabbitMQHome(url, unique_name, check_after=DELAY)
        with closing(self.open()) as home:
            yield home
        for other in self.opened:
            other.close()

    def reopen(self, home: RabbitMQHome) -> RabbitMQHome:
        self.opened.append(self.open())
        return self.opened[-1]
