"""A broker with a queue, and what hangs on it."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from idemp.broker.kombu import ConfirmingPublisher, KombuBroker, KombuReceiver
from idemp.broker.port import Topology
from idemp.testing import FaultProxy

if TYPE_CHECKING:
    from collections.abc import Iterator

DELAYS = (0.3, 0.9)


@pytest.fixture
def broker(rabbitmq_url: str) -> KombuBroker:
    """A broker where queue `work` is declared, with two delay tiers."""
    broker = KombuBroker(rabbitmq_url)
    broker.declare(Topology(exchange="shop", queues=("work",), delays=DELAYS))
    return broker


@pytest.fixture
def publisher(broker: KombuBroker) -> Iterator[ConfirmingPublisher]:
    """A publisher of that broker."""
    with closing(broker.publisher()) as publisher:
        yield publisher


@pytest.fixture
def receiver(broker: KombuBroker) -> Iterator[KombuReceiver]:
    """A receiver of `work`."""
    with closing(broker.receiver(["work"], prefetch=10)) as receiver:
        yield receiver


@pytest.fixture
def proxy(rabbitmq_url: str) -> Iterator[FaultProxy]:
    """A way to the broker that can be cut, for whoever goes through it."""
    host, port = rabbitmq_url.partition("@")[2].partition("/")[0].split(":")
    with FaultProxy(host, int(port)) as proxy:
        yield proxy
