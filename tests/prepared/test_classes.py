"""Messages of five fates on the SQL home: plain, with producers killed at every step, with the broker restarted."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from idemp.inbox.sql import create_engine_safely
from idemp.prepared.sql import SqlHome
from idemp.testing.store_bench import Background
from tests.inbox.sql.kept import make_tables
from tests.prepared.classes import KILLS, PATIENCE, Place, Scene, kills

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow


def sql_home(url: str) -> SqlHome:
    return SqlHome(create_engine_safely(url))


@pytest.fixture
def place(postgresql: Any, own_rabbitmq: Any, unique_name: str) -> Iterator[Place]:
    """Three databases: messages, local work, inbox."""
    names = [f"{unique_name}_{part}" for part in ("home", "business", "inbox")]
    home, business, inbox = map(postgresql.create_database, names)
    engine = create_engine_safely(home)
    make_tables(engine)
    engine.dispose()
    yield Place(partial(sql_home, home), business, inbox, own_rabbitmq.url)
    for name in names:
        postgresql.drop_database(name)


def test_plain(place: Place) -> None:
    with Scene(place) as scene:
        scene.produce()
        scene.check_all()
        scene.assert_kept()


def test_producers_killed_at_every_step(place: Place) -> None:
    with Scene(place) as scene:
        scene.produce(kills())
        assert scene.deaths == len(KILLS)
        scene.check_all()
        scene.assert_kept()


def test_broker_restarted(place: Place, own_rabbitmq: Any) -> None:
    """What is committed while the broker is away is published when it is back; it is away in the middle of the work."""
    with Scene(place) as scene:
        scene.produce(last=scene.messages // 2)
        restarting = Background(own_rabbitmq.restart)
        scene.produce(first=scene.messages // 2)
        restarting.result(PATIENCE)
        scene.check_all()
        scene.assert_kept()
