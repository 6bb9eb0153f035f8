"""Case 24: relays ship what nobody dispatched."""

from __future__ import annotations

import logging
import threading
import time
from datetime import timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from idemp.broker.port import Refusal
from idemp.errors import StoreUnavailable
from idemp.relay import Relay, Round, _pause, backoff
from idemp.testing.faulty import Crash, FaultyPublisher, Script
from idemp.testing.store_bench import Background
from tests.house import House, memory_house, sale, sql_house

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from idemp.messages import Output
    from idemp.testing.faulty import Answer


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


def test_relay_gives_up_waiting_before_its_lease_ends(house: House) -> None:
    """The broker never answers. At the end of the wait no other relay may have taken the same outputs."""
    stranded(house, messages=1)
    upkeep, taken_by_another = house.app.store.upkeep, []

    class Silent:
        """A publisher that waits for confirms as long as it may."""

        def publish(self, outputs: Sequence[Output], timeout: float) -> list[Refusal | None]:
            house.clock.advance(timedelta(seconds=timeout))
            taken_by_another.extend(upkeep.take_pending(10, timedelta(0)))
            return [Refusal("timeout")] * len(outputs)

        def keep_alive(self) -> None: ...

        def close(self) -> None: ...

    assert Relay(upkeep, Silent(), lease=timedelta(seconds=60)).run_once() == Round(2)
    assert taken_by_another == []


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
    assert rounds == [Round(2, 1, 0), Round(1, 0, 0), Round(1, 0, 1)]
    assert house.relay() == Round()
    assert house.pending() == 1


def test_an_outage_does_not_count_as_refusals(house: House, caplog: pytest.LogCaptureFixture) -> None:
    """However often it was tried while the broker was away: what no queue takes then gets all of its attempts."""
    stranded(house, 1, 1)
    for _ in range(12):
        house.script.answers = ["closed"]
        house.relay(max_attempts=2)
    rounds = []
    for _ in range(2):
        house.script.answers = ["returned"]
        rounds.append(house.relay(max_attempts=2))
    assert rounds == [Round(1, 0, 0), Round(1, 0, 1)]
    (given_up,) = (vars(record) for record in caplog.records if getattr(record, "event", "") == "output_quarantined")
    assert f"`idemp inbox redispatch {given_up['output_id']}`" in caplog.text
    assert (given_up["attempts"], given_up["refusals"]) == (15, 2)


def test_a_failed_one_waits(house: House) -> None:
    stranded(house, 1, 1)
    relay = Relay(house.app.store.upkeep, house.publisher)
    house.script.answers = ["nacked"]
    assert [relay.run_once(), relay.run_once()] == [Round(1, 0, 0), Round()]
    house.clock.advance(timedelta(minutes=2))
    assert relay.run_once() == Round(1, 1, 0)


def test_pauses_grow_with_jitter_up_to_a_minute() -> None:
    samples = {attempt: [backoff(attempt) for _ in range(200)] for attempt in (1, 4, 7, 50)}
    assert [max(found) < min(later) for found, later in pairwise(list(samples.values())[:3])] == [True, True]
    assert all(0.25 <= pause <= 90 for found in samples.values() for pause in found)
    assert len(set(samples[50])) > 1


def test_pauses_of_an_outage_grow_up_to_five_seconds() -> None:
    samples = {rounds: [_pause(rounds) for _ in range(200)] for rounds in (1, 3, 5, 10_000)}
    assert [max(found) < min(later) for found, later in pairwise(list(samples.values())[:3])] == [True, True]
    assert max(samples[1]) <= 0.25
    assert all(pause <= 5 for found in samples.values() for pause in found)
    assert min(samples[10_000]) >= 2.5
    assert len(set(samples[10_000])) > 1


class Stop(threading.Event):
    """Pauses take no time here, and are kept; the house's clock goes on during each."""

    def __init__(self, house: House) -> None:
        super().__init__()
        self.house = house
        self.pauses: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.pauses.append(timeout)
        assert len(self.pauses) < 50, "the relay pauses for ever"
        self.house.clock.advance(timedelta(minutes=10))
        return self.is_set()


class Watched:
    """An upkeep that is away at first. Waiting for outputs does the next step; after the last one it stops the relay."""

    def __init__(self, house: House, stop: Stop, steps: Sequence[Callable[[], object]] = (), failures: int = 0) -> None:
        self._inner, self._stop, self._steps, self._failures = house.app.store.upkeep, stop, list(steps), failures
        self.waited: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def take_pending(self, limit: int, lease: timedelta) -> Any:
        if self._failures:
            self._failures -= 1
            raise StoreUnavailable("away")
        return self._inner.take_pending(limit, lease)

    def wait_for_pending(self, timeout: float) -> bool:
        self.waited.append(timeout)
        if not self._steps:
            self._stop.set()
            return False
        self._steps.pop(0)()
        return True


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The relay's lines about servers."""
    found = [vars(record) for record in caplog.records if record.name == "idemp.relay"]
    return [" ".join([each["event"], each.get("server", "")]).rstrip() for each in found]


def test_one_line_per_outage(house: House, caplog: pytest.LogCaptureFixture) -> None:
    stranded(house, 1, 1)
    house.script.answers = ["closed", "blocked", "timeout"]
    stop = Stop(house)
    with caplog.at_level(logging.INFO, "idemp.relay"):
        Relay(Watched(house, stop, failures=3), house.publisher).run(stop)
    assert said(caplog) == ["relay_store_away", "relay_back database", "relay_broker_away", "relay_back broker"]
    assert len(stop.pauses) == 6
    assert house.pending() == 0


def test_database_is_back_though_nothing_is_due(house: House, caplog: pytest.LogCaptureFixture) -> None:
    """Said at once, and waited for wake-ups from then on."""
    stop = Stop(house)
    upkeep = Watched(house, stop, [lambda: None] * 3, failures=2)
    with caplog.at_level(logging.INFO, "idemp.relay"):
        Relay(upkeep, house.publisher).run(stop, timedelta(seconds=7))
    assert said(caplog) == ["relay_store_away", "relay_back database"]
    assert len(stop.pauses) == 2
    assert upkeep.waited == [7] * 4


def test_nothing_due_while_the_broker_is_away(house: House, caplog: pytest.LogCaptureFixture) -> None:
    """Only a round that met the outage is followed by a pause: others listen for wake-ups."""
    stranded(house, 1, 1)
    house.script.answers = ["closed"]
    stop = Stop(house)
    stop.house = memory_house()  # another clock: nothing becomes due in a pause
    upkeep = Watched(house, stop, [lambda: None, lambda: None, lambda: house.clock.advance(timedelta(hours=1))])
    with caplog.at_level(logging.INFO, "idemp.relay"):
        Relay(upkeep, house.publisher).run(stop, timedelta(seconds=7))
    assert len(stop.pauses) == 1
    assert upkeep.waited == [7] * 4
    assert said(caplog) == ["relay_broker_away", "relay_back broker"]
    assert house.pending() == 0


@pytest.mark.parametrize("answer", ["confirm", "nacked", "returned"])
def test_any_answer_ends_the_outage(house: House, caplog: pytest.LogCaptureFixture, answer: Answer) -> None:
    stranded(house, 1, 1)
    house.script.answers = ["closed", "closed", answer]
    stop = Stop(house)
    with caplog.at_level(logging.INFO, "idemp.relay"):
        Relay(Watched(house, stop), house.publisher).run(stop)
    assert said(caplog) == ["relay_broker_away", "relay_back broker"]
    assert len(stop.pauses) == 2


@pytest.mark.parametrize("answer", ["nacked", "returned", "unsendable"])
def test_what_is_about_one_output_slows_nothing(house: House, caplog: pytest.LogCaptureFixture, answer: Answer) -> None:
    """However often it is refused, the relay hears of others at once; and nobody is said to be away."""
    stranded(house, 1, 1)
    house.script.answers = [answer] * 8
    stop = Stop(house)
    upkeep = Watched(house, stop, [lambda: house.clock.advance(timedelta(minutes=10))] * 8)
    with caplog.at_level(logging.INFO, "idemp.relay"):
        Relay(upkeep, house.publisher).run(stop)
    assert (stop.pauses, said(caplog)) == ([], [])
    assert len(upkeep.waited) == 9
    assert house.pending() == 0


def test_refused_ones_do_not_hold_up_what_is_due(house: House) -> None:
    """The next round follows at once, until nothing is due."""
    stranded(house, 4, 1)
    house.script.answers = ["nacked", "unsendable", "returned"]
    stop = Stop(house)
    upkeep = Watched(house, stop)
    Relay(upkeep, house.publisher, batch=1).run(stop)
    assert (stop.pauses, len(upkeep.waited), len(house.sent())) == ([], 1, 1)


def test_some_answers_are_no_outage(house: House, caplog: pytest.LogCaptureFixture) -> None:
    """The link broke in the middle of a round: the next one finds out whether the broker is there."""
    stranded(house, 1, 3)
    house.script.answers = ["nacked", "closed", "timeout"]
    with caplog.at_level(logging.INFO, "idemp.relay"):
        assert Relay(house.app.store.upkeep, house.publisher).run_once() == Round(3, 0, 0)
    assert said(caplog) == []


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
