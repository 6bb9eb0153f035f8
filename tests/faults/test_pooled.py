"""Processes are killed in and after their COMMIT, behind PgBouncer: what they had open on the server goes with them."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import pytest

from tests.faults import test_crash_points as points
from tests.faults.shop import STOCK, Shop, a_shop

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.faults.processes import Processes
    from tests.servers.given import GivenRabbitMQ
    from tests.servers.pgbouncer import PgBouncer
    from tests.servers.rabbitmq import RabbitMQ


@pytest.fixture(scope="module")
def lasting_shop(pgbouncer: PgBouncer, rabbitmq: RabbitMQ | GivenRabbitMQ) -> Iterator[Shop]:
    name = f"idemp_test_{uuid.uuid4().hex[:12]}"
    with a_shop(pgbouncer.create_database(name), rabbitmq.create_vhost(name)) as made:
        yield made
    pgbouncer.drop_database(name)
    rabbitmq.delete_vhost(name)


@pytest.fixture
def sold(shop: Shop) -> Shop:
    """One message waits."""
    shop.sell("sale", to=[STOCK] * points.OUTPUTS)
    return shop


@pytest.mark.parametrize("point", ["after COMMIT before dispatch", "all confirmed, not acked"])
def test_process_killed(sold: Shop, processes: Processes, point: str) -> None:
    points.test_process_killed(sold, processes, point)


@pytest.mark.parametrize("committed", [False, True], ids=["not committed", "committed"])
def test_process_killed_in_its_commit(sold: Shop, processes: Processes, committed: bool) -> None:
    points.test_process_killed_in_its_commit(sold, processes, committed)
