"""Every order of two workers and a relay keeps the promises, and planted faults break them."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from idemp import dispatcher, executor, protocol, settler
from idemp.ports import Verdict
from tests.simulation import model, processes
from tests.simulation.explore import Explorer

Patch = pytest.MonkeyPatch


@pytest.mark.parametrize(
    ("messages", "turns", "moments", "orders"),
    [
        ((0, 0), 2, 34_000, 10**9),
        pytest.param((0, 0, 1), 2, 400_000, 10**12, marks=pytest.mark.slow),
        *([((0, 0, 1), 3, 1_000_000, 10**14)] if "IDEMP_TEST_EVERY" in os.environ else []),
    ],
)
def test_the_promises_hold_in_all_orders(
    monkeypatch: Patch, messages: tuple[int, ...], turns: int, moments: int, orders: int
) -> None:
    """Time passes once, and one fault happens, anywhere."""
    monkeypatch.setattr(processes, "TURNS", turns)
    explorer = Explorer(messages)
    seen = explorer.explore()
    print(f"{seen:,} orders of {len(explorer.orders):,} moments")
    assert (len(explorer.orders) > moments, seen > orders) == (True, True)


def acks_before_commit(patch: Patch) -> None:
    handle = protocol.Protocol.handle

    def early(self: Any, group: Any, **options: Any) -> Any:
        self.settler._ack([handling.delivery for handling in group if handling.delivery.row is None])
        return handle(self, group, **options)

    patch.setattr(protocol.Protocol, "handle", early)


def sends_before_commit(patch: Patch) -> None:
    run = executor.Executor._run_handler

    def eager(self: Any, *arguments: Any) -> Any:
        handled = run(self, *arguments)
        for each in handled:
            for output in each.outputs:
                processes.OUTPUTS[output.id] = each.claim.key.int - 1, output
            dispatcher.publish(self.store, each.outputs, 1.0)
        return handled

    patch.setattr(executor.Executor, "_run_handler", eager)


def takes_no_answer_for_a_confirm(patch: Patch) -> None:
    publish = dispatcher.publish

    def confident(*arguments: Any) -> Any:
        publish(*arguments)
        return {}

    patch.setattr(dispatcher, "publish", confident)


def takes_a_lost_commit_for_one(patch: Patch) -> None:
    finish = processes.Ports.finish

    def confident(self: Any, tx: Any, handled: Any, *, lazy: bool) -> None:
        with suppress(processes.Lost):
            finish(self, tx, handled, lazy=lazy)

    patch.setattr(processes.Ports, "finish", confident)


def acks_what_it_could_not_set_aside(patch: Patch) -> None:
    patch.setattr(settler.Settler, "_settle_rows", lambda self, entries: [])


def looks_before_it_claims(patch: Patch) -> None:
    claim = model.claim

    def blind(state: model.State, process: str, messages: Any) -> Any:
        others = frozenset(each for each in state.opened if each[1] != process)
        after, answer = claim(replace(state, opened=state.opened - others), process, messages)
        return replace(after, opened=after.opened | others), answer

    patch.setitem(model.CALLS, "claim", blind)


def forgets_the_outputs_of_a_duplicate(patch: Patch) -> None:
    """A duplicate that brings outputs confirms them without sending."""
    send = dispatcher.Dispatcher.send

    def silent(self: Any, handlings: Any) -> Any:
        sent = send(self, handlings)
        if any(handling.verdict is Verdict.DUPLICATE for handling in handlings):
            self.scheduler.confirm(sent.stored)
        return sent

    patch.setattr(dispatcher.Dispatcher, "send", silent)


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (acks_before_commit, "is acknowledged before a commit"),
        (sends_before_commit, "is sent without a commit"),
        (takes_no_answer_for_a_confirm, "counts as sent without the broker's word"),
        (takes_a_lost_commit_for_one, "is sent without a commit"),
        (acks_what_it_could_not_set_aside, "is acknowledged before a commit"),
        (looks_before_it_claims, "an effect is committed twice"),
        (forgets_the_outputs_of_a_duplicate, "counts as sent without the broker's word"),
    ],
)
def test_a_planted_fault_breaks_a_promise(monkeypatch: Patch, plant: Any, words: str) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=words) as raised:
        Explorer((0, 0, 1)).explore()
    assert len(f"{raised.value}".splitlines()) > 3  # the order, step by step
