"""Messages of five fates on homes that are brokers: plain, with producers killed at every step, with the broker cut off.

Final messages go through RabbitMQ.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from sqlalchemy import func, select

from idemp.errors import IdempError
from idemp.prepared import State
from idemp.prepared.rabbitmq import RabbitMQHome
from idemp.prepared.sqs import SqsHome
from idemp.testing.proxy import FaultProxy
from idemp.testing.store_bench import Background
from tests.prepared.classes import KILLS, MESSAGES, PATIENCE, Fate, Place, Producer, Scene, kills
from tests.servers.documents import Moto, session
from tests.servers.process import wait_until
from tests.servers.rabbitmq import RabbitMQ

pytestmark = pytest.mark.slow

FEW = MESSAGES if MESSAGES > 100 else 30
LOOKS_APART = MESSAGES / 300
DELAY = timedelta(seconds=0.2)
BRIEF = timedelta(seconds=1)


class BrokerScene(Scene):
    """Where nobody sees all that waits: the barrier tells what is done."""

    _look_at = 0.0

    def produce_stubbornly(self) -> None:
        """In this process; what is refused is tried again under the same key."""
        producer = Producer(self.place)
        for number in range(self.messages):
            wait_until(partial(done, partial(producer.produce, number)), f"{number} is produced", seconds=PATIENCE)
        producer.close()

    def _undecided(self) -> bool:
        table = self.checker.prepared.needed_barrier().tables.barrier
        with self.business.connect() as connection:
            settled = connection.scalar(select(func.count()).where(table.c.settled_at.is_not(None)))
        if settled < self.messages - len(self.numbers(Fate.UNKNOWN)):
            return True
        if time.monotonic() < self._look_at:
            return True  # what is looked at is kept from the checker meanwhile
        home = self.checker.prepared.home
        try:
            parked = len(home.browse(State.PARKED, 10 * self.messages))
            return settled + parked < self.messages or len(home.browse(State.PREPARED, self.messages)) > 0
        except IdempError:
            return True
        finally:
            self._look_at = time.monotonic() + LOOKS_APART


def done(call: Callable[[], object]) -> bool:
    with suppress(IdempError):
        call()
        return True
    return False


def rabbitmq_home(url: str, name: str) -> RabbitMQHome:
    return RabbitMQHome(url, name, check_after=DELAY)


def sqs_home(url: str, name: str) -> SqsHome:
    home = SqsHome(name, endpoint=url, session=session(), wait=timedelta(0), timeout=BRIEF)
    home.verify()
    return home


@pytest.fixture
def databases(postgresql: Any, unique_name: str) -> Iterator[tuple[str, str]]:
    """Of the local work, and of the consumers."""
    names = [f"{unique_name}_{part}" for part in ("business", "inbox")]
    yield tuple(map(postgresql.create_database, names))  # type: ignore[misc]
    for name in names:
        postgresql.drop_database(name)


@pytest.fixture(params=["RabbitMQ", "SQS"])
def place(request: Any, databases: tuple[str, str], rabbitmq_url: str, unique_name: str) -> Place:
    if request.param == "RabbitMQ":
        return Place(partial(rabbitmq_home, rabbitmq_url, "orders"), *databases, rabbitmq_url, DELAY)
    return Place(partial(sqs_home, request.getfixturevalue("moto").url, unique_name), *databases, rabbitmq_url)


def test_plain(place: Place) -> None:
    with BrokerScene(place, FEW) as scene:
        scene.produce()
        scene.check_all()
        scene.assert_kept()


def test_producers_killed_at_every_step(place: Place) -> None:
    messages = max(FEW, len(Fate) * len(KILLS))
    with BrokerScene(place, messages) as scene:
        scene.produce(kills(messages))
        assert scene.deaths == len(KILLS)
        scene.check_all()
        scene.assert_kept()


def test_rabbitmq_killed(own_rabbitmq: RabbitMQ, databases: tuple[str, str]) -> None:
    """The home, and what final messages go through, while messages are prepared, and with all that they have on disk."""
    url = own_rabbitmq.url
    with BrokerScene(Place(partial(rabbitmq_home, url, "orders"), *databases, url, DELAY), max(FEW, 60)) as scene:
        # RabbitMQ 3.10 does not start a quorum queue again that was made seconds before a SIGKILL.
        own_rabbitmq.evaluate("lists:foreach(fun dets:sync/1, dets:all())")
        producing = Background(scene.produce_stubbornly)
        wait_until(lambda: scene.rows(scene.business, "business"), "work is done")
        assert producing.running
        own_rabbitmq.kill()
        own_rabbitmq.start()
        producing.result(PATIENCE)
        scene.check_all()
        scene.assert_kept()


def test_sqs_cut_off(moto: Moto, unique_name: str, rabbitmq_url: str, databases: tuple[str, str]) -> None:
    """Moto forgets all when it ends: only its clients lose it, at any moment, again and again."""
    host, port = moto.url.removeprefix("http://").split(":")
    with FaultProxy(host, int(port)) as proxy:
        home = partial(sqs_home, f"http://{proxy.host}:{proxy.port}", unique_name)
        with BrokerScene(Place(home, *databases, rabbitmq_url), FEW) as scene:
            for run, most in ((scene.produce_stubbornly, 1000), (scene.check_all, 5)):
                running, cuts = Background(run), 0
                while running.running and cuts < most:
                    cuts += proxy.cut_after(5000).wait_triggered(0.5)
                running.result(2 * PATIENCE)
                assert cuts > 1
            scene.assert_kept()
