"""Which offsets a micro-batch has, for any source that counts its messages. No Spark in it.

Offsets are those of the next message to read: a micro-batch has all from `start` up to, and without, `end`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from idemp.errors import ConfigurationError, OffsetsLost

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from idemp.columns import Columns

Offsets = dict[str, int]
"""The offset of the next message, by partition."""

EARLIEST: Final = "earliest"
LATEST: Final = "latest"


class Log(Protocol):
    """A source whose messages have offsets, in one or more partitions, and can be read again."""

    def partitions(self) -> Sequence[str]:
        """The partitions that it has now; none ever goes."""
        ...

    def first(self, partition: str) -> int | None:
        """The offset of the oldest message that is kept, `None` where none is."""
        ...

    def end(self, partition: str) -> int | None:
        """The offset after the newest message, `None` where that can't be told because none is kept."""
        ...

    def read(self, partition: str, start: int, end: int) -> Iterator[Columns]:
        """The messages from `start` up to `end`, in order: the same ones each time.

        Raises:
            OffsetsLost: some of them are no longer there.
        """
        ...

    def release(self, offsets: Mapping[str, int]) -> None:
        """All before these offsets is handled for good."""
        ...

    def close(self) -> None:
        """Close all connections."""
        ...


@dataclass(frozen=True, slots=True)
class Slice:
    """What one task reads.

    Attributes:
        partition: where.
        start: the first offset.
        end: the offset after the last one.
    """

    partition: str
    start: int
    end: int


class Plan:
    """What each micro-batch of one query reads from a log.

    Args:
        log: where from.
        starting: where a query without a checkpoint begins: "earliest", "latest", or offsets as a JSON object.
        largest_slice: at most so many offsets for one task, `None` for one task for each partition.

    Raises:
        ConfigurationError: `starting` is nothing of these.
    """

    def __init__(self, log: Log, *, starting: str = EARLIEST, largest_slice: int | None = None) -> None:
        self._log = log
        self._starting = starting_offsets(starting)
        self._largest_slice = largest_slice
        self._ends: Offsets = {}
        self._until: Offsets | None = None

    def initial(self) -> Offsets:
        """Where a query without a checkpoint begins.

        Raises:
            ConfigurationError: offsets were given, and not for all partitions, or for others.
        """
        partitions = self._log.partitions()
        if isinstance(self._starting, dict):
            if set(self._starting) != set(partitions):
                raise ConfigurationError(
                    f"startingOffsets names {', '.join(sorted(self._starting))}; there are {', '.join(sorted(partitions))}.",
                    fix="Name each of them once.",
                )
            return dict(self._starting)
        where = self._log.end if self._starting == LATEST else self._log.first
        return {partition: where(partition) or 0 for partition in sorted(partitions)}

    def stop_at_the_end(self) -> None:
        """No micro-batch shall have what comes after this moment."""
        self._until = self._ask({})

    def latest(self, start: Mapping[str, int], limit: int | None) -> Offsets:
        """Where the micro-batch ends that begins at `start`, at most `limit` offsets further; in a fixed order.

        Spark compares offsets as texts: the same ones in another order would be another micro-batch, with nothing in it,
        and so on for ever. The log is asked only where what is known of it is less than the limit.

        Raises:
            OffsetsLost: the log ends before `start`.
        """
        if self._until is not None:
            ends = self._until
        elif limit is not None and _lag(start, self._ends) >= limit:
            ends = self._ends
        else:
            ends = self._ask(start)
        self._ends = ends
        begins = {partition: self._begin(partition, start) for partition in {*start, *ends}}
        for partition, begin in begins.items():
            if partition in ends and ends[partition] < begin:
                raise OffsetsLost.made_anew(partition, begin, ends[partition])
        found = admitted(begins, {**begins, **ends}, limit)
        return dict(start) if found == start else dict(sorted(found.items()))

    def slices(self, start: Mapping[str, int], end: Mapping[str, int]) -> list[Slice]:
        """What the tasks of a micro-batch read: the same for the same micro-batch."""
        found = []
        for partition in sorted(end):
            begin = self._begin(partition, start)
            size = self._largest_slice or max(1, end[partition] - begin)
            found += [Slice(partition, at, min(at + size, end[partition])) for at in range(begin, end[partition], size)]
        return found

    def _ask(self, start: Mapping[str, int]) -> Offsets:
        ends: Offsets = {}
        for partition in {*self._log.partitions(), *start}:
            end = self._log.end(partition)
            if end is not None:
                ends[partition] = end
        return ends

    def _begin(self, partition: str, start: Mapping[str, int]) -> int:
        """Where to begin with a partition; with one that came later, at its first message."""
        return start[partition] if partition in start else self._log.first(partition) or 0


def starting_offsets(text: str) -> str | Offsets:
    """Where to begin, from what users write.

    Raises:
        ConfigurationError: it is neither "earliest", "latest" nor a JSON object of whole numbers.

    Example:
        >>> starting_offsets('{"orders": 1201}')
        {'orders': 1201}
        >>> starting_offsets("begin")
        Traceback (most recent call last):
        ...
        idemp.errors.ConfigurationError: startingOffsets='begin' is not understood. Write earliest, latest, or ...
    """
    if text in {EARLIEST, LATEST}:
        return text
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if isinstance(value, dict) and value and all(type(each) is int and each >= 0 for each in value.values()):
        return value
    raise ConfigurationError(
        f"startingOffsets={text!r} is not understood.",
        fix='Write earliest, latest, or an offset for each partition: {"orders": 1201}.',
    )


def admitted(start: Mapping[str, int], end: Mapping[str, int], limit: int | None) -> Offsets:
    """Where to end so that there are at most `limit` offsets: each partition gets a share by what it has.

    Example:
        >>> admitted({"a": 0, "b": 0}, {"a": 100, "b": 900}, 100)
        {'a': 10, 'b': 90}
        >>> admitted({"a": 0, "b": 5}, {"a": 3, "b": 5}, None)
        {'a': 3, 'b': 5}
    """
    lag = _lag(start, end)
    if limit is None or lag <= limit:
        return dict(end)
    ends: Offsets = {}
    left = limit
    for partition in sorted(end, key=lambda each: end[each] - start[each]):
        # From the smallest on: what rounding leaves goes to those that have more.
        has = end[partition] - start[partition]
        share = min(left, -(-has * left // lag)) if lag else 0
        ends[partition] = start[partition] + share
        left, lag = left - share, lag - has
    return {partition: ends[partition] for partition in end}


def _lag(start: Mapping[str, int], end: Mapping[str, int]) -> int:
    return sum(max(0, end[partition] - start.get(partition, 0)) for partition in end)
