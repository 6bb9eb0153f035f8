"""Turns: suspects run alone, and nobody waits for ever."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager

import pytest

from idemp.suspects import Turns
from tests.servers.process import wait_until


class Runner:
    """A thread that takes a turn and keeps it until it is told to go."""

    def __init__(self, turn: AbstractContextManager[None]) -> None:
        self.has_it = threading.Event()
        self._go = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(turn,), daemon=True)
        self._thread.start()

    def _run(self, turn: AbstractContextManager[None]) -> None:
        with turn:
            self.has_it.set()
            self._go.wait(30)

    def goes(self) -> None:
        self._go.set()
        self._thread.join(10)
        assert not self._thread.is_alive()


def nobody() -> None:
    raise AssertionError("it was alone all the time")


def test_a_suspect_waits_for_all_and_all_wait_for_it() -> None:
    turns = Turns()
    first, second = Runner(turns.shared()), Runner(turns.shared())
    assert first.has_it.wait(10)
    assert second.has_it.wait(10)
    suspect = Runner(turns.alone(nobody))
    wait_until(lambda: turns._loners == 1, "the suspect waits")
    late = Runner(turns.shared())
    first.goes()
    assert not suspect.has_it.is_set()
    second.goes()
    assert suspect.has_it.wait(10)
    assert not late.has_it.is_set()
    assert turns.running == 1
    suspect.goes()
    assert late.has_it.wait(10)
    late.goes()
    assert turns.running == 0


def test_two_suspects_one_after_the_other() -> None:
    turns = Turns()
    suspects = [Runner(turns.alone(nobody)), Runner(turns.alone(nobody))]
    wait_until(lambda: any(suspect.has_it.is_set() for suspect in suspects), "one has its turn")
    first, second = sorted(suspects, key=lambda suspect: not suspect.has_it.is_set())
    assert not second.has_it.is_set()
    first.goes()
    assert second.has_it.wait(10)
    second.goes()


def test_a_handler_without_end_holds_up_nobody_for_longer_than_the_wait() -> None:
    turns = Turns(longest_wait=0.05)
    told: list[str] = []
    slow = Runner(turns.shared())
    assert slow.has_it.wait(10)
    suspect = Runner(turns.alone(lambda: told.append("suspect")))
    assert suspect.has_it.wait(10)
    other = Runner(turns.shared())
    assert other.has_it.wait(10)
    for runner in (slow, suspect, other):
        runner.goes()
    assert (turns.running, told) == (0, ["suspect"]), "its death would not be its own"


def test_whoever_runs_alone_is_told_when_others_will_not_wait_any_longer() -> None:
    turns = Turns(longest_wait=0.05)
    told: list[str] = []
    loner = Runner(turns.alone(lambda: told.append("loner")))
    assert loner.has_it.wait(10)
    assert told == []
    second = Runner(turns.alone(lambda: told.append("second")))
    assert second.has_it.wait(10)
    assert told == ["loner", "second"]
    others = [Runner(turns.shared()) for _ in range(2)]
    assert all(other.has_it.wait(10) for other in others)
    assert told == ["loner", "second"], "each is told once"
    for runner in (loner, second, *others):
        runner.goes()
    with turns.alone(nobody):
        assert turns.running == 1


def test_a_turn_ends_with_an_error() -> None:
    turns = Turns()
    for turn in (turns.alone(nobody), turns.shared()):
        with pytest.raises(ZeroDivisionError), turn:
            _ = 1 / turns.running // 0
        assert turns.running == 0
    with turns.alone(nobody):
        assert turns.running == 1
