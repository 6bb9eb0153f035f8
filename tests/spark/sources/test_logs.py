"""What every source must do, asked of its log without Spark."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from itertools import islice

import pytest

from idemp.columns import Columns
from idemp.errors import OffsetsLost
from idemp.spark.sources.planning import Log, Plan
from tests.servers.process import wait_until
from tests.spark.sources.grounds import MOMENT, Ground, messages

pytestmark = pytest.mark.slow


@pytest.fixture
def log(ground: Ground) -> Iterator[Log]:
    with closing(ground.open()) as log:
        yield log


def ids(rows: Iterator[Columns]) -> list[str | None]:
    return [row.id for row in rows]


def test_empty_source_begins_where_it_ends(ground: Ground, log: Log) -> None:
    assert list(log.partitions())[:1] == [ground.partition]
    first, end = log.first(ground.partition), log.end(ground.partition)
    assert (first or 0, end or 0) == (0, 0)


def test_row_has_what_the_message_has(ground: Ground, log: Log) -> None:
    ground.put(messages(1))
    (row,) = log.read(ground.partition, 0, 1)
    assert row[:3] == ("m-0", "shop.Order", b'{"number": 0}')
    assert json.loads(row.headers or "")["tenant"] == "north"
    assert row.time == MOMENT
    assert row.position == f"{ground.partition}#0"


def test_all_that_was_put_is_there_at_once(ground: Ground, log: Log) -> None:
    """What the producer knows to be stored is before the end, however often one asks."""
    for count in (1, 2, 300):
        start = log.end(ground.partition) or 0
        ground.put(messages(count, first=start))
        with closing(ground.open()) as fresh:
            assert fresh.end(ground.partition) == start + count
        assert ids(log.read(ground.partition, start, start + count)) == [f"m-{start + each}" for each in range(count)]
        until_end(log, ground.partition, start + count)


def until_end(log: Log, partition: str, end: int) -> None:
    """A log that stays open may learn of new messages a moment later."""
    wait_until(lambda: log.end(partition) == end, f"the end to be {end}")


def test_any_part_can_be_read_and_read_again(ground: Ground, log: Log) -> None:
    ground.put(messages(700))
    for start, end in ((0, 700), (0, 1), (699, 700), (123, 456), (123, 456), (5, 5)):
        rows = list(log.read(ground.partition, start, end))
        assert [row.id for row in rows] == [f"m-{each}" for each in range(start, end)]
        assert [row.position for row in rows] == [f"{ground.partition}#{each}" for each in range(start, end)]


def test_reading_that_stops_half_way_leaves_nothing_behind(ground: Ground, log: Log) -> None:
    ground.put(messages(50))
    reading = log.read(ground.partition, 0, 50)
    assert ids(islice(reading, 7)) == [f"m-{each}" for each in range(7)]
    reading.close()  # type: ignore[attr-defined]
    assert len(list(log.read(ground.partition, 0, 50))) == 50


def test_what_is_gone_raises_and_is_never_skipped(ground: Ground, log: Log) -> None:
    ground.put(messages(3))
    ground.trim()
    end = log.end(ground.partition)
    assert end is not None
    with pytest.raises(OffsetsLost, match=r"offset 0 is next.*startingOffsets=earliest"):
        list(log.read(ground.partition, 0, end))
    first = log.first(ground.partition)
    assert first is not None
    assert first > 0
    assert next(iter(log.read(ground.partition, first, end))).position == f"{ground.partition}#{first}"


def test_source_made_anew_raises(ground: Ground, log: Log) -> None:
    ground.put(messages(3))
    with pytest.raises(OffsetsLost, match="ends at offset 3, and offset 700 is next"):
        Plan(log).latest({ground.partition: 700}, None)
