"""The conformance suite, on the broker in memory."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from idemp.messages import Output
from idemp.testing import BrokerConformance
from idemp.testing.memory import MemoryBroker


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker()


@pytest.fixture
def open_broker(broker: MemoryBroker) -> Callable[[str], MemoryBroker]:
    return lambda worker: broker


@pytest.fixture
def lose(broker: MemoryBroker) -> Callable[[], None]:
    return broker.lose


@pytest.fixture
def outage() -> None:
    pytest.skip("a broker in memory can always be reached")


class TestBroker(BrokerConformance):
    lease = math.inf


def test_a_broker_that_is_not_strict_takes_everything() -> None:
    broker = MemoryBroker(strict=False)
    outputs = [Output("1", "send", "", "stock", {}, b"1"), Output("2", "publish", "idemp.events", "shop.Order", {}, b"2")]
    assert broker.publisher().publish(outputs, 1.0) == [None, None]
    assert [each.body for each in broker.receiver("stock").receive(10, 0.0)] == [b"1"]
