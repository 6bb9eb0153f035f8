"""How long a worker goes by the start of a window that it has read, and that cleaners know it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from idemp.errors import TransientStoreError
from idemp.inbox.port import HORIZON_SLACK
from idemp.inbox.sql.horizons import Horizons
from idemp.testing.clock import FakeClock

WINDOW = timedelta(days=7)


class Read:
    """Says the present moment less a window, and how often it was asked."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock
        self.times = 0

    def __call__(self, consumer: str, window: timedelta) -> datetime:
        self.times += 1
        return self._clock.now() - window


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def read(clock: FakeClock) -> Read:
    return Read(clock)


@pytest.fixture
def horizons(clock: FakeClock, read: Read) -> Horizons:
    made = Horizons(read, clock)
    made.read("orders", [WINDOW])
    return made


def test_nothing_is_late_where_nobody_read(horizons: Horizons) -> None:
    assert horizons.late_before("billing", WINDOW) == datetime.min.replace(tzinfo=UTC)


def test_it_is_remembered(horizons: Horizons, clock: FakeClock, read: Read) -> None:
    start = horizons.late_before("orders", WINDOW)
    clock.advance(HORIZON_SLACK)
    assert horizons.late_before("orders", WINDOW) == start
    assert read.times == 1


def test_not_for_longer_than_cleaners_expect(horizons: Horizons, clock: FakeClock) -> None:
    clock.advance(HORIZON_SLACK + timedelta(seconds=1))
    with pytest.raises(TransientStoreError):
        horizons.late_before("orders", WINDOW)


def test_before_that_a_transaction_begins_by_reading_it(horizons: Horizons, clock: FakeClock, read: Read) -> None:
    horizons.read_if_due()
    assert read.times == 1
    clock.advance(HORIZON_SLACK / 2 + timedelta(seconds=1))
    horizons.read_if_due()
    assert read.times == 2
    assert horizons.late_before("orders", WINDOW) == clock.now() - WINDOW
