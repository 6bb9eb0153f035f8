"""What stands in the results was measured as it is said, and nothing that was lost or repeated stands there."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import delete, insert

from benchmarks.catalogue import VARIANTS
from benchmarks.rates import Pair
from benchmarks.servers import Servers
from benchmarks.shows import SHOWS, Show
from benchmarks.variants import Block

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.work import Place

pytestmark = pytest.mark.slow


@pytest.fixture
def pair() -> Iterator[Pair]:
    with Servers() as servers, closing(Pair(servers, "sqlite", "local", ["bare", "naive", "window"])) as made:
        yield made


def place_of(pair: Pair, name: str) -> Place:
    return pair._variants[name].place


def test_variants_do_the_same_work(pair: Pair) -> None:
    found = pair.measure(rounds=2, messages=5)
    assert list(found["variants"]) == ["bare", "naive", "window"]
    assert found["failed"] == {}
    assert found["variants"]["bare"]["median"] == 1.0
    assert all(figure["cpu_microseconds"] > 0 for figure in found["variants"].values())
    assert {show["name"] for show in found["shows"]} >= {"window / bare", "window / naive"}


@pytest.mark.parametrize("fault", ["lost effect", "second effect", "lost output", "left in the queue"])
def test_what_is_not_conserved_has_no_figures(pair: Pair, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, count = place_of(pair, "naive"), pair._count  # it takes nothing while nobody asks it to

    def spoilt() -> None:
        with place.engine.begin() as connection:
            if fault == "lost effect":
                connection.execute(delete(place.effects).where(place.effects.c.id == 1))
            elif fault == "second effect":
                connection.execute(insert(place.effects), {"order_id": next(iter(place._sent))})
        if fault == "lost output":
            with place.broker.take(place.out, None, 1) as taken:
                taken.accept(0)
        elif fault == "left in the queue":
            place.send(1)
        count()

    monkeypatch.setattr(pair, "_count", spoilt)
    found = pair.measure(rounds=2, messages=5)
    assert list(found["variants"]) == ["bare", "window"]
    assert "its figures are void: naive: " in found["failed"]["naive"]


def test_one_that_fails_does_not_end_the_others(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(count: int) -> Block:
        raise TimeoutError(f"{count} did not come")

    monkeypatch.setattr(pair._variants["naive"], "run", fail)
    found = pair.measure(rounds=2, messages=5)
    assert list(found["variants"]) == ["bare", "window"]
    assert found["failed"] == {"naive": "TimeoutError: 5 did not come"}


def blocks(*seconds: float) -> list[Block]:
    return [Block(each, each) for each in seconds]


def test_a_ratio_pairs_the_blocks_of_one_round() -> None:
    """Medians divided would be 2 / 2: each round has another speed."""
    told = Show("quick", "slow", target=3.0).told(
        {"quick": blocks(1.0, 2.0, 8.0), "slow": blocks(3.0, 8.0, 2.0)}, has_goals=True
    )
    assert told["median"] == 3.0
    assert (told["lower_bound"], told["target_verdict"]) == (0.25, "by the median only")


def test_what_luck_alone_would_not_pass_is_reached() -> None:
    told = Show("quick", "slow", target=2.0).told(
        {"quick": blocks(*[1.0] * 9), "slow": blocks(*[2.1] * 9)}, has_goals=True
    )
    assert told["target_verdict"] == "reached"


def test_cpu_time_is_to_be_little() -> None:
    found = {"ours": blocks(*[150e-6] * 5), "theirs": blocks(*[100e-6] * 5)}
    verdicts = {
        target: Show("ours", "theirs", target=target, measure="cpu").told(found, has_goals=True)["target_verdict"]
        for target in (60.0, 40.0)
    }
    assert verdicts == {60.0: "reached", 40.0: "not reached"}


def test_shows_are_about_variants_that_there_are() -> None:
    assert {name for show in SHOWS for name in (show.variant, show.than)} <= set(VARIANTS)
