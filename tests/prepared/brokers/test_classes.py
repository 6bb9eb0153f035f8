"""Whatever becomes of its producer and its broker, a message is published if and only if its work was committed.

`IDEMP_TEST_PREPARED=1000` makes it a thousand messages.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from idemp.prepared.rabbitmq import RabbitMQHome
from idemp.prepared.sqs import SqsHome
from idemp.testing.proxy import FaultProxy
from idemp.testing.store_bench import Background
from tests.prepared.brokers.scene import STEPS, Scene
from tests.servers.documents import Moto, session
from tests.servers.process import wait_until
from tests.servers.rabbitmq import RabbitMQ

COUNT = int(os.environ.get("IDEMP_TEST_PREPARED", "100"))
EACH_STEP = 5 * len(STEPS)
"""Messages by which each class but the last is killed at each step."""
DELAY = timedelta(seconds=1)


@pytest.fixture(params=["RabbitMQ", "SQS"])
def scene(request: pytest.FixtureRequest, postgresql_url: str, rabbitmq_url: str, tmp_path: Path) -> Scene:
    """A home on each broker; final messages go through RabbitMQ."""

    def rabbitmq_home() -> RabbitMQHome:
        return RabbitMQHome(rabbitmq_url, "orders", check_after=DELAY)

    if request.param == "RabbitMQ":
        return Scene(postgresql_url, rabbitmq_url, rabbitmq_home, tmp_path, COUNT)
    url, name = request.getfixturevalue("moto").url, request.getfixturevalue("unique_name")
    return Scene(postgresql_url, rabbitmq_url, lambda: sqs_home(url, name), tmp_path, COUNT)


def test_by_five(scene: Scene) -> None:
    scene.play(scene.produce_all)


def test_by_five_with_the_producer_killed_at_every_step(scene: Scene) -> None:
    scene = replace(scene, count=max(COUNT // 2, EACH_STEP))
    killed: Counter[str] = Counter()
    scene.play(lambda: killed.update(scene.produce_killed()))
    assert killed.keys() == set(STEPS)


def test_by_five_with_rabbitmq_killed(own_rabbitmq: RabbitMQ, postgresql_url: str, tmp_path: Path) -> None:
    """The home, and what final messages go through: both are away, with what they have on disk."""
    url = own_rabbitmq.url

    def produce() -> None:
        running = Background(scene.produce_all)
        wait_until(scene.worked, "work began")
        own_rabbitmq.kill()
        own_rabbitmq.start()
        running.result(60)

    scene = Scene(postgresql_url, url, lambda: RabbitMQHome(url, "orders", check_after=DELAY), tmp_path, COUNT // 2)
    scene.play(produce)


def test_by_five_with_sqs_cut_off(
    moto: Moto, unique_name: str, postgresql_url: str, rabbitmq_url: str, tmp_path: Path
) -> None:
    """Moto forgets all when it ends, so that only its clients lose it, at any moment, again and again."""
    host, port = moto.url.removeprefix("http://").split(":")
    with FaultProxy(host, int(port)) as proxy:
        url = f"http://{proxy.host}:{proxy.port}"

        def produce() -> None:
            running = Background(scene.produce_all)
            cuts = 0
            while running.running:
                cuts += proxy.cut_after(5000).wait_triggered(1)
            running.result(60)
            assert cuts > 5

        scene = Scene(postgresql_url, rabbitmq_url, lambda: sqs_home(url, unique_name), tmp_path, COUNT // 2)
        scene.play(produce)


def sqs_home(url: str, name: str) -> SqsHome:
    return SqsHome(name, endpoint=url, session=session(), wait=timedelta(0), timeout=timedelta(seconds=2))
