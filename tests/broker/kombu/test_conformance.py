"""RabbitMQ keeps to the broker port."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import pytest

from idemp.broker.kombu import KombuBroker
from idemp.testing.broker_conformance import BrokerConformance

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.servers.given import GivenRabbitMQ
    from tests.servers.rabbitmq import RabbitMQ


@pytest.fixture(scope="module")
def vhost_url(rabbitmq: RabbitMQ | GivenRabbitMQ) -> Iterator[str]:
    """One vhost for all cases: each has names of its own, and making a vhost takes longer than most cases."""
    name = f"idemp_test_{uuid.uuid4().hex[:12]}"
    yield rabbitmq.create_vhost(name)
    rabbitmq.delete_vhost(name)


class TestRabbitMQ(BrokerConformance):
    """Over pyamqp."""

    delay = 0.3

    @pytest.fixture
    def broker(self, vhost_url: str) -> KombuBroker:
        """Nobody else uses its vhost."""
        return KombuBroker(vhost_url)

    def reopen(self, broker: Any) -> KombuBroker:
        """With connections of its own."""
        return KombuBroker(broker._url)
