"""Shops for the tests of this folder."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import pytest

from tests.faults.processes import Processes
from tests.faults.shop import Shop, a_shop

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.servers.given import GivenPostgreSQL, GivenRabbitMQ
    from tests.servers.postgresql import PostgreSQL
    from tests.servers.rabbitmq import RabbitMQ


@pytest.fixture(scope="session")
def lasting_shop(postgresql: PostgreSQL | GivenPostgreSQL, rabbitmq: RabbitMQ | GivenRabbitMQ) -> Iterator[Shop]:
    """One for many tests: tables, queues and proxies take a second."""
    name = f"idemp_test_{uuid.uuid4().hex[:12]}"
    with a_shop(postgresql.create_database(name), rabbitmq.create_vhost(name)) as made:
        yield made
    postgresql.drop_database(name)
    rabbitmq.delete_vhost(name)


@pytest.fixture
def shop(lasting_shop: Shop) -> Shop:
    """A shop on the run's servers, empty, with a clock that stands still."""
    lasting_shop.anew()
    return lasting_shop


@pytest.fixture(scope="session")
def processes() -> Processes:
    """Makes consumers that can be killed."""
    return Processes()
