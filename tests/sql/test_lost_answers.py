"""A COMMIT whose answer is lost: the connection ends right before the server gets it, or right behind it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest
from sqlalchemy import make_url

from tests.servers.proxy import Cut, Proxy
from tests.world import World

CUTS = 100


class Commits:
    """Cuts COMMITs of handlings at random, but lets the one behind a cut pass: a lost connection counts, sooner or later."""

    def __init__(self) -> None:
        self.chance, self.cuts = random.Random(7), Counter[Cut]()
        self.handling, self.last = False, ""

    def __call__(self, data: bytes) -> Cut:
        self.handling |= b"INSERT INTO effect" in data
        if not (self.handling and b"COMMIT" in data):
            return ""
        self.handling = False
        self.last = "" if self.last else self.chance.choice(["before", "after"])
        self.cuts[self.last] += 1
        return self.last


@pytest.fixture
def commits(url: str) -> Iterator[tuple[Commits, str]]:
    commits = Commits()
    with Proxy(make_url(url).port or 5432, commits) as proxy:
        yield commits, make_url(url).set(port=proxy.port).render_as_string(hide_password=False)


@pytest.mark.parametrize("kind", ["postgresql", pytest.param("mariadb", marks=pytest.mark.slow)], indirect=True)
def test_lost_answers_lose_and_double_nothing(url: str, commits: tuple[Commits, str]) -> None:
    outside = World(url)
    counted, address = commits
    world = World(address)
    worker = world.worker()
    sent: list[str] = []
    while counted.cuts["before"] + counted.cuts["after"] < CUTS:
        sent += [str(len(sent) + number) for number in range(20)]
        outside.send(*sent[-20:])
        world.work(worker, relay=False)
    assert min(counted.cuts["before"], counted.cuts["after"]) > CUTS / 3
    assert outside.effects() == dict.fromkeys(sent, 1)
    found = outside.sent()
    assert set(found) == {(id, part) for id in sent for part in (0, 1)}  # no relay: a duplicate has found its own outputs
    assert all(len(variants) == 1 for variants in found.values())
    assert (outside.dead(), outside.pending()) == ([], len(sent))  # the delayed ones
    world.close()
    outside.close()
