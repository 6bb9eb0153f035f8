"""ActiveMQ keeps to the broker port."""

from __future__ import annotations

from typing import Any

import pytest

from idemp.broker.stomp import StompBroker
from idemp.testing.broker_conformance import BrokerConformance

pytestmark = pytest.mark.slow


class TestActiveMQ(BrokerConformance):
    """Over STOMP. Each case has queues of its own."""

    delay = 0.3

    @pytest.fixture
    def broker(self, activemq_url: str) -> StompBroker:
        """On the run's broker."""
        return StompBroker(activemq_url)

    def reopen(self, broker: Any) -> StompBroker:
        """With connections of its own."""
        return StompBroker(broker._url)
