"""Commits that this process has read already: commits never change, so that a handling reads those that came since."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Final, NamedTuple, overload

from idemp.forking import renewed_in_child
from idemp.inbox.stream.stream import Folds, Stream
from idemp.inbox.watching import Warned

if TYPE_CHECKING:
    from collections.abc import Callable

    from idemp.inbox.stream.port import Commit, Streams

MOST: Final = 20_000
"""Commits that a process keeps, of all streams together; the stream that was read last is kept in any case."""


class KnownCommits:
    """The commits of streams, read once. Safe to share between threads.

    A stream of which nothing is known costs one read of its last commit, and one of all commits if somebody asks for them. A
    stream that is known costs one read of what came since.

    Args:
        streams: where they are.
        most: commits to keep, of all streams together.

    Attributes:
        warned: what this process has warned of.

    Example:
        >>> from idemp.inbox.stream import InMemoryStreams
        >>> KnownCommits(InMemoryStreams()).read("order-7").version
        0
    """

    def __init__(self, streams: Streams, most: int = MOST) -> None:
        self.warned = Warned()
        self._streams = streams
        self._most = most
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._number = 0
        self._lock = renewed_in_child(threading.Lock())

    def read(self, name: str) -> Stream:
        """A stream as it is now; its commits before the last one may be read later, when they are asked for."""
        with self._lock:
            known = self._kept.get(name)
        if known is not None:
            newer = self._streams.load(name, known.commits[-1].number - 1)
            if newer and _same(newer[0], known.commits[-1]):
                kept = known._replace(commits=known.commits + tuple(newer[1:]))
                self._keep(name, kept)
                return Stream(name, *kept)
            self._keep(name, _Kept((), {}))  # another database: restored, or emptied
        last = self._streams.last(name)
        if last is None:
            return Stream(name)
        folds: Folds = {}
        return Stream(name, _Unread(last, partial(self._read_until, last, folds)), folds)

    def _read_until(self, last: Commit, folds: Folds) -> tuple[Commit, ...]:
        kept = _Kept(tuple(self._streams.load(last.stream)), folds)
        self._keep(last.stream, kept)
        return kept.commits[: last.number]

    def _keep(self, name: str, kept: _Kept) -> None:
        with self._lock:
            former = self._kept.pop(name, None)
            self._number += len(kept.commits) - (len(former.commits) if former is not None else 0)
            if kept.commits:
                self._kept[name] = kept
            while self._number > self._most and len(self._kept) > 1:
                _, forgotten = self._kept.popitem(last=False)
                self._number -= len(forgotten.commits)


class _Kept(NamedTuple):
    commits: tuple[Commit, ...]
    folds: Folds


class _Unread(Sequence["Commit"]):
    """The commits of a stream of which the last one is known. The others are read when they are asked for."""

    def __init__(self, last: Commit, read: Callable[[], tuple[Commit, ...]]) -> None:
        self._last = last
        self._read = read

    def __len__(self) -> int:
        return self._last.number

    @overload
    def __getitem__(self, index: int) -> Commit: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Commit]: ...

    def __getitem__(self, index: int | slice) -> Commit | Sequence[Commit]:
        return self._last if index == -1 else self._all[index]

    @cached_property
    def _all(self) -> tuple[Commit, ...]:
        return self._read()


def _same(one: Commit, other: Commit) -> bool:
    return (one.claim.consumer, one.claim.id.key, one.committed_at) == (
        other.claim.consumer,
        other.claim.id.key,
        other.committed_at,
    )
