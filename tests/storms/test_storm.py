"""The storm at the suite's size."""

from __future__ import annotations

import json

import pytest

from tests.servers.activemq import ActiveMQ
from tests.servers.fixtures import pooler
from tests.servers.postgresql import PostgreSQL
from tests.servers.rabbitmq import RabbitMQ
from tests.storms.storm import Storm, as_json


@pytest.mark.timeout(300)
def test_effects_once_and_outputs_under_one_id_while_workers_and_servers_die(
    own_postgresql: PostgreSQL, own_rabbitmq: RabbitMQ
) -> None:
    """Workers that handle message by message beside such as share transactions."""
    rage(Storm(own_postgresql, own_rabbitmq, messages=400, seed=7, batches=[1, 20]))


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_the_same_behind_pgbouncer(own_postgresql: PostgreSQL, own_rabbitmq: RabbitMQ) -> None:
    """Workers share four server connections, which outlive their deaths."""
    with pooler(own_postgresql.url) as front:
        rage(
            Storm(own_postgresql, own_rabbitmq, messages=200, seed=11, batches=[1, 20], through=front.through), kills=8
        )


@pytest.mark.timeout(300)
def test_the_same_on_activemq(own_postgresql: PostgreSQL, own_activemq: ActiveMQ) -> None:
    """There the broker gets a SIGKILL, too."""
    rage(Storm(own_postgresql, own_activemq, messages=400, seed=7, batches=[1, 20]))


def rage(storm: Storm, *, kills: int = 16) -> None:
    """At the suite's size."""
    report = storm.run(kills=kills, database_restarts=1, broker_restarts=1)
    print(json.dumps(as_json(report), indent=2))
    assert report.promises_held, as_json(report)
    assert report.kills == kills
