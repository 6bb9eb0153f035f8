"""A stream as a handler sees it: its commits, its events, and the state that follows from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

from idemp.inbox.sameness import is_same

if TYPE_CHECKING:
    from idemp.inbox.stream.port import Commit, Event

S = TypeVar("S")


class Folded(NamedTuple):
    """The state that a function made of the first commits of a stream.

    Attributes:
        initial: the state before the first event, in a tuple.
        number: of the last commit that counted.
        state: the state after it, in a tuple.
    """

    initial: tuple[Any]
    number: int
    state: tuple[Any]


Folds: TypeAlias = dict[Callable[..., Any], Folded]


@dataclass(frozen=True)
class Stream:
    """A stream as it was when it was read.

    Attributes:
        name: its name: the entity that it is about.
        commits: what handlings appended, in order.
        folds: the states that earlier handlings of this process folded, by function.

    Example:
        >>> Stream("order-7").version
        0
    """

    name: str
    commits: Sequence[Commit] = ()
    folds: Folds = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """All events, in order."""
        return tuple(event for commit in self.commits for event in commit.events)

    @property
    def version(self) -> int:
        """The version of the last event; 0 of a stream without events."""
        return self.next_version - 1

    @property
    def number(self) -> int:
        """The number of the last commit; 0 of a stream that does not exist."""
        return self.commits[-1].number if self.commits else 0

    @property
    def next_version(self) -> int:
        """The version that the next event gets."""
        return self.commits[-1].next_version if self.commits else 1

    def fold(self, function: Callable[[S, Event], S], initial: S) -> S:
        """The state that follows from the events: `function(state, event)` for each in turn, from `initial` on.

        The state must follow from the arguments of `function` alone. If `function` is defined at the top level of a module,
        the process keeps a copy of the state, and the next call for this stream begins with it: it sees new events alone.
        Lambdas and nested functions see all events at each call.

        Example:
            >>> Stream("order-7").fold(lambda count, event: count + 1, 0)
            0
        """
        if not _is_of_a_module(function):
            return self._folded(function, initial, 0)
        before, known = _copied(initial), self.folds.get(function)
        start = None
        if known is not None and known.number <= self.number and _equal(known.initial, before):
            start = _copied(known.state[0])
        if known is None or start is None:
            state = self._folded(function, initial, 0)
        else:
            state = self._folded(function, start[0], known.number)
        after = _copied(state)
        if before is not None and after is not None and (known is None or known.number < self.number):
            self.folds[function] = Folded(before, self.number, after)
        return state

    def _folded(self, function: Callable[[S, Event], S], state: S, after: int) -> S:
        for commit in self.commits[after:]:
            for event in commit.events:
                state = function(state, event)
        return state


def _is_of_a_module(function: object) -> bool:
    """Whether a function is the same one at each call: no lambda, no closure, no method."""
    return isinstance(function, FunctionType) and function.__qualname__ == function.__name__ != "<lambda>"


def _copied(value: S) -> tuple[S] | None:
    """A copy, in a tuple; `None` of what can't be copied."""
    try:
        return (deepcopy(value),)
    except Exception:  # noqa: BLE001 - of whatever its class
        return None


def _equal(one: tuple[Any], other: tuple[Any] | None) -> bool:
    """Whether two states are the same one; what can't be compared is not."""
    try:
        return other is not None and is_same(one[0], other[0])
    except Exception:  # noqa: BLE001 - of whatever their class
        return False
