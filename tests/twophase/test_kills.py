"""SIGKILL at each step of the protocol, and at any moment; then recovery, by one process or by two at once."""

from __future__ import annotations

import os
import random
import signal
from typing import TYPE_CHECKING, Any

import pytest

from idemp import Outcome
from idemp.twophase import Recovery, State
from tests.servers.forked import forking
from tests.twophase.killed import DECIDED, POINTS, handle, recover
from tests.twophase.world import World, world

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

SOON = 30.0
ROUNDS = int(os.environ.get("IDEMP_TEST_TWOPHASE", "0"))
"""Kills on each pair of databases; 0 for a few."""
PAIRS = {
    "two PostgreSQL": ("postgresql", {"ledger": "postgresql"}),
    "PostgreSQL and MariaDB": ("postgresql", {"ledger": "mariadb"}),
    "MariaDB and PostgreSQL": ("mariadb", {"ledger": "postgresql"}),
    "three": ("postgresql", {"ledger": "postgresql", "stock": "mariadb"}),
}


@pytest.fixture(scope="module")
def fork() -> Any:
    return forking("tests.twophase.killed", "pymysql", "sqlalchemy.dialects.mysql")


@pytest.fixture(scope="module", params=PAIRS)
def shop(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    inbox, others = PAIRS[request.param]
    with world(request, tmp_path_factory.mktemp("twophase"), inbox, **others) as made:
        yield made


def killed(fork: Any, shop: World, point: str, n: int) -> None:
    process = fork.Process(target=handle, args=(shop.place, point, n))
    process.start()
    process.join(SOON)
    assert process.exitcode == -signal.SIGKILL


def recovered(fork: Any, shop: World, *, processes: int) -> None:
    """By this process, or by others at once."""
    if processes == 1:
        found = Recovery(shop.consumer.coordinator).run_once()
        assert not found.left, found
        assert not found.away
        return
    begin = fork.Event()
    both = [fork.Process(target=recover, args=(shop.place, begin)) for _ in range(processes)]
    for each in both:
        each.start()
    begin.set()
    for each in both:
        each.join(SOON)
        assert each.exitcode == 0


def agreed(shop: World, n: int) -> bool:
    """All databases say the same, and nothing is in doubt; whether it was committed."""
    effects = shop.effects(n)
    assert effects in ([0] * len(effects), [1] * len(effects)), "the databases agree"
    assert shop.in_doubt() == []
    assert shop.others_are_untouched()
    return effects[0] == 1


def killed_and_recovered(fork: Any, shop: World, point: str, n: int, *, processes: int) -> None:
    killed(fork, shop, point, n)
    if processes:
        recovered(fork, shop, processes=processes)
        assert agreed(shop, n) == (point in DECIDED)
    outcome = shop.consumer.deliver(n)
    assert outcome is (Outcome.REDISPATCHED if point in DECIDED else Outcome.HANDLED)
    if not processes:  # the redelivery has done it all
        assert agreed(shop, n)
    shop.all_is_well(n)


@pytest.mark.parametrize("number", range(len(POINTS)), ids=list(POINTS))
def test_killed(fork: Any, shop: World, number: int) -> None:
    """After the kill comes a recovery, a redelivery, or two recoveries at once."""
    killed_and_recovered(fork, shop, list(POINTS)[number], 1000 + number, processes=number % 3)


@pytest.mark.timeout(3600)
def test_killed_many_times(fork: Any, shop: World) -> None:
    points = list(POINTS)
    for number in range(ROUNDS or 3):
        processes = 2 if number % 10 == 0 else number % 2
        killed_and_recovered(fork, shop, points[number % len(points)], 10_000 + number, processes=processes)


@pytest.mark.timeout(3600)
def test_killed_at_any_moment(fork: Any, shop: World) -> None:
    chance = random.Random(ROUNDS)
    committed = 0
    rounds = max(2, ROUNDS // 5)
    for number in range(rounds):
        n, ready = 100_000 + number, fork.Event()
        process = fork.Process(target=handle, args=(shop.place, None, n, ready))
        process.start()
        assert ready.wait(SOON)
        process.join(chance.uniform(0, 0.012))
        process.kill()
        process.join(SOON)
        recovered(fork, shop, processes=1)
        before = agreed(shop, n)
        committed += before
        shop.consumer.deliver(n)
        shop.all_is_well(n)
    assert ROUNDS == 0 or 0 < committed < rounds, "some before the decision, some after it"


def test_what_is_decided_is_told(fork: Any, shop: World) -> None:
    for point, state in (("before COMMIT", State.ROLLED_BACK), ("after COMMIT", State.COMMITTED)):
        n = 2000 + POINTS[point][3] + len(point)
        killed(fork, shop, point, n)
        recovery = Recovery(shop.consumer.coordinator)
        assert {each.state for each in recovery.look().found} == {State.IN_DOUBT}
        assert {each.state for each in recovery.run_once().found} == {state}
        assert recovery.look().found == []
        shop.consumer.deliver(n)
        shop.all_is_well(n)
