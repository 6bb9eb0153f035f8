"""Case 24: relays ship what nobody dispatched."""

from __future__ import annotations

import logging
import threading
import time
from datetime import timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from idemp.errors import StoreUnavailable
from idemp.relay import Relay, Round, _backoff
from idemp.testing.store_bench import Background
from tests.faulty import Crash, FaultyPublisher, Script
from tests.house import House, memory_house, sale, sql_house

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.faulty import Answer


@pytest.fixture(params=["memory", "sqlite"])
def house(request: pytest.FixtureRequest) -> Iterator[House]:
    if request.param == "memory":
        yield memory_house()
        return
    with sql_house() as made:
        yield made


def stranded(house: House, messages: int = 3, outputs: int = 2) -> None:
    """Handlings whose outputs were never sent, due now."""
    house.sells(outputs=outputs)
    for number in range(messages):
        house.script.answers = ["closed"] * outputs
        house.deliver(sale(f"sale-{number}"))
    house.clock.advance(timedelta(minutes=1))


def test_nothing_to_do(house: House) -> None:
    assert Relay(house.app.store.upkeep, house.publisher).run_once() == Round()


def test_ships_all_in_emission_order(house: House) -> None:
    stranded(house)
    assert Relay(house.app.store.upkeep, house.publisher).run_once() == Round(6, 6)
    ordinals = [output.ordinal for output in house.publisher.sent]
    assert ordinals == [0, 1] * 3
    assert all(output.message.redispatched for output in house.publisher.sent)
    assert house.pending() == 0


def test_first_send_of_an_initiation_is_no_redispatch(house: House) -> None:
    with house.app.initiate() as unit:
        unit.send({}, to="stock", type="stock.Reserve")
    house.script.answers = ["lose"]
    for _ in range(2):
        house.relay()
    assert [output.message.redispatched for output in house.publisher.sent] == [False, True]


def test_batches(house: House) -> None:
    stranded(house)
    relay = Relay(house.app.store.upkeep, house.publisher, batch=4)
    assert [relay.run_once() for _ in range(3)] == [Round(4, 4), Round(2, 2), Round()]


def test_two_relays_take_disjoint_work(house: House) -> None:
    """One in the middle of its round, the other from the beginning to the end of its own."""
    stranded(house)
    upkeep = house.app.store.upkeep
    taken = upkeep.take_pending(4, timedelta(seconds=60))
    assert Relay(upkeep, house.publisher).run_once() == Round(2, 2)
    assert not {item.output.id for item in taken} & {output.id for output in house.publisher.sent}


def test_dead_relays_work_is_taken_over(house: House) -> None:
    stranded(house)
    house.script.crash_after_outputs = 3
    relay = Relay(house.app.store.upkeep, house.publisher, lease=timedelta(seconds=60))
    with house.crashing():
        relay.run_once()
    assert Relay(house.app.store.upkeep, house.publisher).run_once() == Round()
    house.clock.advance(timedelta(seconds=61))
    assert Relay(house.app.store.upkeep, house.publisher).run_once() == Round(6, 6)
    ids = [id_ for id_, _ in house.sent()]
    assert (len(ids), len(set(ids)), house.pending()) == (9, 6, 0)


@pytest.mark.parametrize("answer", ["nacked", "timeout", "blocked", "closed"])
def test_an_outage_quarantines_nothing(house: House, answer: Answer) -> None:
    """Only what the broker says about an output itself counts against it."""
    stranded(house, 1, 1)
    for _ in range(30):
        house.script.answers = [answer]
        assert house.relay(max_attempts=2) == Round(1, 0, 0)
    assert house.relay() == Round(1, 1, 0)


@pytest.mark.parametrize("answer", ["unsendable", "returned"])
def test_refused_time_and_again(house: House, answer: Answer) -> None:
    stranded(house, 1, 2)
    rounds = []
    for _ in range(3):
        house.script.answers = ["confirm", answer] if not rounds else [answer]
        rounds.append(house.relay(max_attempts=3))
    assert rounds == [Round(2, 1, 0), Round(1, 0, 1), Round()]
    assert house.pending() == 1


def test_a_failed_one_waits(house: House) -> None:
    stranded(house, 1, 1)
    relay = Relay(house.app.store.upkeep, house.publisher)
    house.script.answers = ["nacked"]
    assert [relay.run_once(), relay.run_once()] == [Round(1, 0, 0), Round()]
    house.clock.advance(timedelta(minutes=2))
    assert relay.run_once() == Round(1, 1, 0)


def test_pauses_grow_with_jitter_up_to_a_minute() -> None:
    samples = {attempt: [_backoff(attempt) for _ in range(200)] for attempt in (1, 4, 7, 50)}
    assert [max(found) < min(later) for found, later in pairwise(list(samples.values())[:3])] == [True, True]
    assert all(0.25 <= pause <= 90 for found in samples.values() for pause in found)
    assert len(set(samples[50])) > 1


class Outage:
    """An upkeep that is away, then back, then stops the relay."""

    def __init__(self, inner: Any, stop: threading.Event, failures: int) -> None:
        self._inner, self._stop, self._failures = inner, stop, failures

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def take_pending(self, limit: int, lease: timedelta) -> Any:
        if self._failures:
            self._failures -= 1
            raise StoreUnavailable("away")
        return self._inner.take_pending(limit, lease)

    def wait_for_pending(self, timeout: float) -> bool:
        self._stop.set()
        return False


def test_one_line_per_outage(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("idemp.relay._backoff", lambda attempt: 0.0)
    house = memory_house()
    stranded(house, 1, 1)
    house.script.answers = ["closed"]
    stop = threading.Event()
    upkeep = Outage(house.app.store.upkeep, stop, failures=3)
    with caplog.at_level(logging.INFO, "idemp.relay"):
        Relay(upkeep, house.publisher).run(stop)
    events = [getattr(record, "event", "") for record in caplog.records]
    assert events.count("relay_store_away") == 1
    assert events[-1] == "relay_back"
    assert house.pending() == 0


def test_woken_at_commit() -> None:
    """Long before its interval is over."""
    house = memory_house()
    stop = threading.Event()
    relay = Relay(house.app.store.upkeep, FaultyPublisher(house.broker.publisher(), Script()))
    running = Background(lambda: relay.run(stop, timedelta(seconds=3600)))
    deadline = time.monotonic() + 30
    with house.app.initiate() as unit:
        unit.send({}, to="stock", type="stock.Reserve")
    while house.broker.depth("stock") == 0 and time.monotonic() < deadline:
        house.app.store.announce_pending()
    assert house.broker.depth("stock") == 1
    stop.set()
    while running.running and time.monotonic() < deadline:
        house.app.store.announce_pending()
    running.result(30)


def test_crash_is_not_swallowed(house: House) -> None:
    stranded(house, 1, 1)
    house.script.crash_before = "publish"
    house.script.calls.clear()
    with pytest.raises(Crash):
        Relay(house.app.store.upkeep, house.publisher).run(threading.Event())
