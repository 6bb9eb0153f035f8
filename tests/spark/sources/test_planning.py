"""Which offsets a micro-batch has: any log, any limit, any number of micro-batches and restarts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from idemp.columns import Columns
from idemp.errors import ConfigurationError, OffsetsLost
from idemp.spark.sources.options import Options
from idemp.spark.sources.planning import LATEST, Plan, admitted, starting_offsets

pytestmark = pytest.mark.slow

PARTITIONS = ("a", "b", "c")
offsets = st.dictionaries(st.sampled_from(PARTITIONS), st.integers(0, 50), min_size=1)


class Counted:
    """A log in memory that counts how often it is asked for its ends."""

    def __init__(self, ends: Mapping[str, int], firsts: Mapping[str, int] | None = None) -> None:
        self.ends = dict(ends)
        self.firsts = dict(firsts or {})
        self.asked = 0

    def partitions(self) -> Sequence[str]:
        return sorted(self.ends)

    def first(self, partition: str) -> int | None:
        return self.firsts.get(partition, 0)

    def end(self, partition: str) -> int | None:
        self.asked += 1
        return self.ends[partition]

    def read(self, partition: str, start: int, end: int) -> Iterator[Columns]:
        for place in range(start, end):
            yield Columns(None, None, b"", None, None, f"{partition}#{place}")

    def release(self, offsets: Mapping[str, int]) -> None:
        raise AssertionError("nothing was handled")

    def close(self) -> None:
        pass


@given(start=offsets, more=offsets, limit=st.none() | st.integers(1, 60))
def test_admitted_keeps_the_limit_and_wastes_none_of_it(
    start: dict[str, int], more: dict[str, int], limit: int | None
) -> None:
    begin = {partition: start.get(partition, 0) for partition in PARTITIONS}
    end = {partition: begin[partition] + more.get(partition, 0) for partition in PARTITIONS}
    found = admitted(begin, end, limit)
    assert all(begin[each] <= found[each] <= end[each] for each in PARTITIONS)
    there = sum(more.values())
    assert sum(found.values()) - sum(begin.values()) == (there if limit is None else min(limit, there))


@given(
    ends=offsets,
    limit=st.integers(1, 20),
    largest=st.none() | st.integers(1, 7),
    restarts=st.sets(st.integers(0, 150)),
)
def test_every_offset_is_in_one_micro_batch(
    ends: dict[str, int], limit: int, largest: int | None, restarts: set[int]
) -> None:
    """With restarts between: a plan of its own goes on from the offsets alone, and ends."""
    log = Counted(ends)
    plan = Plan(log, largest_slice=largest)
    plan.stop_at_the_end()
    log.ends = {partition: end + 5 for partition, end in log.ends.items()}  # what comes later is for the next run
    at, seen, number = plan.initial(), [], 0
    while (until := plan.latest(at, limit)) != at:
        slices = plan.slices(at, until)
        assert sum(each.end - each.start for each in slices) <= limit
        assert all(largest is None or each.end - each.start <= largest for each in slices)
        seen += [row.position for each in slices for row in log.read(each.partition, each.start, each.end)]
        at, number = until, number + 1
        if number in restarts:
            plan = Plan(log, largest_slice=largest)
            log.ends = dict(ends)
    assert sorted(seen) == sorted(f"{partition}#{place}" for partition in ends for place in range(ends[partition]))


@pytest.mark.parametrize("stops", [False, True])
def test_offsets_have_one_order(stops: bool) -> None:
    """Spark compares them as texts: in another order they would be a micro-batch of nothing, and so on for ever."""
    names = [f"orders/{number}" for number in range(12)]
    plan = Plan(Counted(dict.fromkeys(names, 3)))
    if stops:
        plan.stop_at_the_end()
    for behind in (names, names[::-1], names[5:] + names[:5]):
        begin = dict.fromkeys(behind, 1)
        end = plan.latest(begin, None)
        assert list(end) == sorted(names)
        assert json.dumps(plan.latest(end, None)) == json.dumps(end)
        former = dict.fromkeys(behind, 3)
        assert json.dumps(plan.latest(former, None)) == json.dumps(former), "a checkpoint that has another order"


def test_backlog_is_not_asked_for_again() -> None:
    """A log that has more than a micro-batch takes is asked once, and again when what is known of it runs out."""
    log = Counted({"a": 100})
    plan = Plan(log)
    at = plan.initial()
    for _ in range(10):
        at = plan.latest(at, 10)
    assert (at, log.asked) == ({"a": 100}, 1)
    assert plan.latest(at, 10) == at
    assert log.asked == 2


def test_partition_that_came_later_begins_at_its_first_message() -> None:
    log = Counted({"a": 10, "b": 30}, {"b": 20})
    plan = Plan(log)
    end = plan.latest({"a": 10}, None)
    assert end == {"a": 10, "b": 30}
    assert [(each.partition, each.start, each.end) for each in plan.slices({"a": 10}, end)] == [("b", 20, 30)]


def test_log_that_ends_before_the_checkpoint_raises() -> None:
    with pytest.raises(OffsetsLost, match="made anew"):
        Plan(Counted({"a": 3})).latest({"a": 700}, 10)


@pytest.mark.parametrize(("starting", "found"), [("earliest", {"a": 2}), (LATEST, {"a": 9}), ('{"a": 5}', {"a": 5})])
def test_beginnings(starting: str, found: dict[str, int]) -> None:
    assert Plan(Counted({"a": 9}, {"a": 2}), starting=starting).initial() == found


@pytest.mark.parametrize("wrong", ["", "first", "{}", '{"a": -1}', '{"a": true}', '{"a": "1"}', "[1]", "1"])
def test_beginnings_that_are_none(wrong: str) -> None:
    with pytest.raises(ConfigurationError, match="startingOffsets"):
        starting_offsets(wrong)


def test_beginning_names_each_partition() -> None:
    with pytest.raises(ConfigurationError, match=r"startingOffsets names b; there are a\."):
        Plan(Counted({"a": 9}), starting='{"b": 1}').initial()


@pytest.mark.parametrize("value", ["0", "-1", "many", "1.5", ""])
def test_numbers_that_are_none(value: str) -> None:
    with pytest.raises(ConfigurationError, match="no whole number above 0"):
        Options("x", {"maxOffsetsPerTrigger": value}, ()).number("maxOffsetsPerTrigger")


def test_secrets_are_no_options() -> None:
    with pytest.raises(ConfigurationError, match=r"unknown option 'brokerUrl'.*sources\.register"):
        Options("x", {"brokerUrl": "pyamqp://guest:guest@broker"}, ())


@pytest.mark.parametrize("value", ["", " , ", "a,b,a"])
def test_lists_that_are_none(value: str) -> None:
    with pytest.raises(ConfigurationError):
        Options("x", {"queues": value}, ["queues"]).texts("queues")
