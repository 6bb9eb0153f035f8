"""What the cleaner deletes, and when."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from idemp import Idempotent, Outcome
from idemp.identity import effective_id
from idemp.inbox.port import Claim, Verdict
from idemp.retention import Cleaner
from tests.house import SELL, House, memory_house, sale, sql_house

if TYPE_CHECKING:
    from collections.abc import Iterator

SHORT, LONG, GONE = "shop.Short", "shop.Long", "shop.Gone"


@pytest.fixture(params=["memory", "sqlite"])
def house(request: pytest.FixtureRequest) -> Iterator[House]:
    if request.param == "memory":
        yield memory_house()
        return
    with sql_house() as made:
        yield made


def consumes(house: House, minutes: int) -> None:
    """Windows count the time in which the consumer was consuming."""
    for _ in range(minutes):
        house.app.store.upkeep.beat("worker", relay=False, consumers=["shop"])
        house.clock.advance(timedelta(minutes=1))
    house.app.store.upkeep.beat("worker", relay=False, consumers=["shop"])


def test_a_type_without_a_handler_is_kept_as_long_as_the_longest_window(house: House) -> None:
    """Its handler may be back with the next release; nobody knows any more which window it had."""
    for name in (SHORT, LONG, GONE):
        house.app.handler(dict, type=name, policy=Idempotent())(lambda message: None)
    messages = {name: sale(name, type=name) for name in (SHORT, LONG, GONE)}
    for message in messages.values():
        house.deliver(message)
    house.restart()
    windows = {SHORT: timedelta(minutes=10), LONG: timedelta(minutes=30)}
    cleaner = Cleaner(house.app.store.upkeep, "shop", windows)
    consumes(house, 20)
    assert cleaner.run() == 1
    again = {name: house.deliver(message) for name, message in messages.items()}
    assert again == {SHORT: Outcome.HANDLED, LONG: Outcome.SKIPPED, GONE: Outcome.SKIPPED}
    house.restart()
    consumes(house, 20)  # and the slack for those who remember where the window started
    assert cleaner.run() == 3


def test_batches_until_nothing_is_left(house: House) -> None:
    house.sells(outputs=0)
    for number in range(5):
        house.deliver(sale(f"sale-{number}"))
    house.restart()
    consumes(house, 20)
    cleaner = Cleaner(house.app.store.upkeep, "shop", {SELL: timedelta(minutes=10)}, batch=2)
    assert cleaner.run() == 5
    assert cleaner.run() == 0


def test_another_consumer_of_the_same_message_keeps_its_claim(house: House) -> None:
    house.sells(outputs=0)
    theirs = Claim(
        consumer="billing",
        id=effective_id("envelope", "sale-1"),
        message_type=SELL,
        fingerprint=None,
        wait=timedelta(milliseconds=1),
    )

    def claimed() -> Verdict:
        with house.store.inner.begin([theirs]) as unit:
            verdict: Verdict = unit.claim(theirs).verdict
            if verdict is Verdict.CLAIMED:
                unit.commit()
        return verdict

    house.deliver(sale("sale-1"))
    assert claimed() is Verdict.CLAIMED
    house.restart()
    consumes(house, 20)
    assert Cleaner(house.app.store.upkeep, "shop", {SELL: timedelta(minutes=10)}).run() == 1
    assert claimed() is Verdict.DUPLICATE


class Stop(threading.Event):
    """Notes how long it was waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append(timeout or 0.0)
        return False


def test_a_cleaner_that_can_be_stopped_gives_way_between_batches(house: House) -> None:
    """Not after the last one."""
    house.sells(outputs=0)
    for number in range(5):
        house.deliver(sale(f"sale-{number}"))
    house.restart()
    consumes(house, 20)
    stop = Stop()
    assert Cleaner(house.app.store.upkeep, "shop", {SELL: timedelta(minutes=10)}, batch=2).run(stop) == 5
    assert len(stop.waits) == 2
    assert min(stop.waits) > 0
