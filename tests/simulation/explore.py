"""Depth first over all orders; equal states are explored once."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.simulation import processes
from tests.simulation.model import Call, State, abort, apply, die, disconnect, let_pass
from tests.simulation.processes import LOST, Program

PROGRAMS: tuple[tuple[str, Program], ...] = (
    ("worker 1", processes.worker), ("worker 2", processes.worker), ("relay", processes.relay)
)  # fmt: skip
ROUNDS = 8  # of recovery
SAFE = frozenset({"rollback"})  # calls that cannot fail
LOSES = {"claim": abort, "finish": abort, "receive": disconnect, "ack": disconnect}
"""What a connection takes along, if a call of it fails."""


class Moment(NamedTuple):
    """A state, and where each process stands in it: a process is what it was answered so far.

    Attributes:
        state: Number of a state.
        histories: Numbers of the answers of each process.
        lives: How often each process has died.
        faulty: Whether a fault has happened.
        times: How often time may still pass.
    """

    state: int
    histories: tuple[int, ...]
    lives: tuple[int, ...]
    faulty: bool
    times: int


class Numbers(dict[Any, int]):
    """Numbers values in the order in which they come; equal ones have one number."""

    def __init__(self) -> None:
        self.values_by_number: list[Any] = []

    def __missing__(self, value: Any) -> int:
        self.values_by_number.append(value)
        self[value] = len(self)
        return self[value]


class Explorer:
    """Counts the orders of a world, and judges each.

    Args:
        messages: What is in the queue.
        faults: Whether a fault may happen, at most one in an order.
        times: How often time may pass, so that the relay and retries get work.

    Attributes:
        orders: How many orders lead from a moment to the end.
    """

    def __init__(self, messages: tuple[int, ...], *, faults: bool = True, times: int = 1) -> None:
        self.messages, self._faults, self._times = messages, faults, times
        self.orders: dict[Moment, int] = {}
        self._path: list[str] = []
        self._states, self._histories = Numbers(), Numbers()
        self._next: dict[int, Call | None] = {}
        self._judged: set[State] = set()

    def explore(self) -> int:
        """Return the number of orders; each one was judged, or is equal to one that was from some moment on."""
        sys.setrecursionlimit(10_000)
        begin = self._states[State(tuple((message, False) for message in self.messages))]
        histories = tuple(self._histories[program, ()] for _, program in PROGRAMS)
        return self._count(Moment(begin, histories, (0,) * len(PROGRAMS), not self._faults, self._times))

    def _count(self, moment: Moment) -> int:
        found = self.orders.get(moment)
        if found is None:
            found = 0
            for step, following in self._steps(moment):
                self._path.append(step)
                found += self._count(following)
                self._path.pop()
            if all(self._next_call(history) is None for history in moment.histories):
                self._judge(self._state(moment))
            self.orders[moment] = found = found or 1
        return found

    def _state(self, moment: Moment) -> State:
        state: State = self._states.values_by_number[moment.state]
        return state

    def _next_call(self, history: int) -> Call | None:
        if history not in self._next:
            self._next[history] = processes.next_call(*self._histories.values_by_number[history])
        return self._next[history]

    def _steps(self, moment: Moment) -> Iterator[tuple[str, Moment]]:
        state = self._state(moment)
        if moment.times:
            alive = tuple(f"{name}.{life}" for (name, _), life in zip(PROGRAMS, moment.lives, strict=True))
            if (later := let_pass(state, alive)) != state:
                yield "time passes", moment._replace(state=self._states[later], times=moment.times - 1)
        for number, history in enumerate(moment.histories):
            call = self._next_call(history)
            if call is not None:
                yield from self._step(moment, state, number, call)

    def _step(self, moment: Moment, state: State, number: int, call: Call) -> Iterator[tuple[str, Moment]]:
        """Play a call of a process, and all that can happen to it."""
        name, process = PROGRAMS[number][0], f"{PROGRAMS[number][0]}.{moment.lives[number]}"
        step = f"{name}: {call[0]} {', '.join(map(str, call[1:]))}".rstrip()
        after, answer = self._apply(state, process, step, call)
        yield step, self._go_on(moment, number, after, answer)
        if moment.faulty or call[0] in SAFE:
            return
        for words, left in (("which fails", state), ("whose answer is lost", after)):
            lost = LOSES.get(call[0], lambda left, _: left)(left, process)
            yield f"{step}, {words}", self._go_on(moment, number, lost, LOST, faulty=True)
        for words, left in (("dies before", state), ("dies after", after)):
            yield f"{name} {words} {call[0]}", self._begin_again(moment, number, die(left, process))

    def _apply(self, state: State, process: str, step: str, call: Call) -> tuple[State, Any]:
        try:
            return apply(state, process, call)
        except AssertionError as error:
            raise self._broken(f"{error}", step) from None

    def _go_on(self, moment: Moment, number: int, state: State, answer: Any, *, faulty: bool = False) -> Moment:
        program, answers = self._histories.values_by_number[moment.histories[number]]
        histories = _with(moment.histories, number, self._histories[program, (*answers, answer)])
        return moment._replace(state=self._states[state], histories=histories, faulty=moment.faulty or faulty)

    def _begin_again(self, moment: Moment, number: int, state: State) -> Moment:
        histories = _with(moment.histories, number, self._histories[PROGRAMS[number][1], ()])
        lives = _with(moment.lives, number, moment.lives[number] + 1)
        return Moment(self._states[state], histories, lives, faulty=True, times=moment.times)

    def _judge(self, state: State) -> None:
        """Let others do the rest, and look at what there is."""
        if state in self._judged:
            return
        self._judged.add(state)
        for number in range(len(PROGRAMS)):
            for life in range(2):
                state = die(state, f"{PROGRAMS[number][0]}.{life}")
        for number in range(ROUNDS):
            state, answers, process = let_pass(state), (), f"recovery {number}"
            while (call := processes.next_call(processes.recovery, answers)) is not None:
                state, answer = self._apply(state, process, f"{process}: {call}", call)
                answers = (*answers, answer)
            state = die(state, process)
        wanted = tuple(int(message in self.messages) for message in range(2))
        for what, right in (
            ("an effect is missing", state.effects == wanted),
            ("an output is lost", all(sent >= due for sent, due in zip(state.sent, wanted, strict=True))),
            ("a pending output is left", not state.pending),
            ("a delivery is left", not (state.queue or state.taken or state.rows)),
        ):
            if not right:
                raise self._broken(what, f"at rest: {state}")

    def _broken(self, what: str, step: str) -> AssertionError:
        return AssertionError("\n".join([what, *self._path, step]))


def _with(values: tuple[int, ...], number: int, value: int) -> tuple[int, ...]:
    return (*values[:number], value, *values[number + 1 :])
