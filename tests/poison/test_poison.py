"""Each message runs as often as it fails, the others are not held up, and what can't be handled is kept as it came."""

from __future__ import annotations

import random
from collections import Counter
from datetime import datetime
from typing import TYPE_CHECKING

import pytest

from idemp.broker.kombu import KombuBroker
from idemp.broker.local import LocalBroker
from idemp.broker.memory import InMemoryBroker
from tests.lanes import mostly_slow
from tests.poison.mill import ALWAYS, FINE, ONCE, QUEUE, Mill
from tests.servers.process import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from idemp.broker.port import Broker

EACH = 100
DELAY = 0.2


@pytest.fixture(params=mostly_slow(["rabbitmq", "memory", "redis", "local"], first=2))
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Broker:
    """Every broker that there is."""
    if request.param == "rabbitmq":
        return KombuBroker(request.getfixturevalue("rabbitmq_url"))
    if request.param == "redis":
        return KombuBroker(request.getfixturevalue("redis_url"), allow_at_most_once=True)
    return LocalBroker(tmp_path / "queues.db") if request.param == "local" else InMemoryBroker()


@pytest.fixture
def database(request: pytest.FixtureRequest, broker: Broker, tmp_path: Path) -> str:
    """PostgreSQL beside brokers that are servers, SQLite beside those that are not."""
    if isinstance(broker, KombuBroker):
        return str(request.getfixturevalue("postgresql_url"))
    return f"sqlite:///{tmp_path}/mill.db"


@pytest.fixture
def mill(database: str, broker: Broker) -> Iterator[Callable[..., Mill]]:
    """Makes a mill."""
    made: list[Mill] = []

    def make(**options: object) -> Mill:
        made.append(Mill(database, broker, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_three_attempts_of_three_hundred_messages(mill: Callable[..., Mill]) -> None:
    """100 fine, 100 that fail once, 100 that fail always: 100, 200 and 300 runs, 100 dead letters, none lost."""
    shop = mill(retry_delays=[DELAY])
    kinds = [FINE, ONCE, ALWAYS] * EACH
    random.Random(7).shuffle(kinds)
    sent = shop.send(kinds)
    ids = {kind: {str(message.message_id) for message in messages} for kind, messages in sent.items()}
    with shop.working(threads=2):
        wait_until(
            lambda: len(shop.runs) >= 6 * EACH and shop.depth(f"{QUEUE}.dead") >= EACH,
            "all are handled or parked",
            seconds=60,
        )
    runs = Counter(item for item, _ in shop.runs)
    assert Counter(runs[item] for item in ids[FINE]) == {1: EACH}
    assert Counter(runs[item] for item in ids[ONCE]) == {2: EACH}
    assert Counter(runs[item] for item in ids[ALWAYS]) == {3: EACH}
    assert runs.total() == 6 * EACH

    handled = Counter(ids[FINE] | ids[ONCE])
    assert shop.effects() == handled
    assert shop.outputs() == handled
    assert (shop.depth(QUEUE), shop.depth(f"{QUEUE}.dead")) == (0, EACH)

    originals = {message.message_id: message for message in sent[ALWAYS]}
    for dead in shop.broker.browse(f"{QUEUE}.dead", 2 * EACH):
        original = originals.pop(dead.message_id)
        assert (dead.body, dead.type, dead.content_type) == (original.body, original.type, original.content_type)
        assert (dead.correlation_id, dead.headers["tenant"]) == (original.correlation_id, original.headers["tenant"])
        story = {name.removeprefix("idemp-dead-"): value for name, value in dead.headers.items()}
        assert (story["reason"], story["attempts"], story["queue"]) == ("Jammed", 3, QUEUE)
        assert story["error"] == f"{dead.message_id} at its run 3"
        assert "in grind" in story["stack"]
        times = [datetime.fromisoformat(story[name]) for name in ("first-at", "last-at")]
        assert (times[1] - times[0]).total_seconds() >= 2 * DELAY, "the first failure's time is kept"
    assert not originals

    last_fine = max(number for number, (item, _) in enumerate(shop.runs) if item in ids[FINE])
    last_retry = max(number for number, (_, run) in enumerate(shop.runs) if run > 1)
    assert last_fine < last_retry


def test_healthy_messages_behind_poison_are_not_held_up(mill: Callable[..., Mill]) -> None:
    """As much poison in front as three times the prefetch, waiting for longer than the test: the healthy are handled."""
    shop = mill(retry_delays=["10m"], settings={"prefetch": 5})
    sent = shop.send([ALWAYS] * 15 + [FINE] * 15)
    fine = {str(message.message_id) for message in sent[FINE]}
    with shop.working(threads=1):
        wait_until(lambda: shop.outputs().keys() == fine, "the healthy are handled")
    assert Counter(run for _, run in shop.runs) == {1: 30}
    assert shop.effects() == Counter(fine)
    assert (shop.depth(QUEUE), shop.depth(f"{QUEUE}.dead")) == (0, 0), "the poison waits for its time"
