"""RabbitMQ keeps to the broker port."""

from __future__ import annotations

import pytest

from idemp.broker.kombu import KombuBroker
from idemp.testing.broker_conformance import BrokerConformance


class TestRabbitMQ(BrokerConformance):
    """Over pyamqp, in a vhost of the test's own."""

    @pytest.fixture
    def broker(self, rabbitmq_url: str) -> KombuBroker:
        """Nobody else uses it."""
        return KombuBroker(rabbitmq_url)
