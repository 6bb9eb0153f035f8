"""Decisions about several databases, of which one has lost its part: what of the others, and what is said."""

from __future__ import annotations

from uuid import UUID

import pytest

from idemp.cli.recover import _given_up
from idemp.errors import BranchUnfinished
from idemp.testing.simulation.twophase import DecidingStore, InMemoryDatabase, InMemoryDecisions, InMemoryXA
from idemp.twophase import BranchId, Coordinator, Recovery, State

KEY, TOKEN = UUID(int=1), b"attempt1"


class Decided:
    """A handling that is committed in the inbox's database, and prepared in two others, of which one loses it."""

    def __init__(self) -> None:
        self.store, self.ledger, self.books = DecidingStore(), InMemoryDatabase("ledger"), InMemoryXA("books")
        decisions = InMemoryDecisions(self.store, "shop")
        self.coordinator = Coordinator(self.store, decisions, {"ledger": self.ledger, "books": self.books})
        self.coordinator.pause = lambda _: None
        names = [BranchId(decisions.inbox(), 1, KEY, TOKEN, number) for number in range(2)]
        self.branches = [database.begin(name) for database, name in zip((self.ledger, self.books), names, strict=True)]
        for branch in self.branches:
            branch.session.insert("sale")
            branch.prepare()
        with self.store.begin() as unit:
            decisions.note(unit, 1, KEY, TOKEN, [branch.prepared for branch in self.branches])
            unit.commit()
        self.ledger.end(names[0], commit=False)  # by hand

    def left(self) -> BranchUnfinished:
        """Why the decision can't be carried out."""
        (decision,) = self.store.decisions()
        with pytest.raises(BranchUnfinished) as told:
            self.coordinator.carry_out(decision)
        return told.value


def test_one_is_lost_and_the_other_in_other_hands() -> None:
    """Nothing is given up while a part can still be committed; what is lost is said all the same."""
    decided = Decided()
    told = decided.left()
    assert not told.is_lost
    assert "Nothing is lost" not in told.fix
    assert "'ledger'" in told.fix
    (found,) = Recovery(decided.coordinator).forget("shop", [KEY])
    assert (found.state, len(list(decided.store.decisions()))) == (State.LEFT, 1)


def test_one_is_lost_and_the_other_prepared_still() -> None:
    """What can be committed is, before the decision is given up."""
    decided = Decided()
    decided.branches[1].leave()
    (found,) = Recovery(decided.coordinator).forget("shop", [KEY])
    assert (found.state, list(decided.store.decisions())) == (State.FORGOTTEN, [])
    assert (decided.ledger.rows["sale"], decided.books.rows["sale"]) == (0, 1)


def test_somebody_else_gave_it_up_meanwhile() -> None:
    """While a person was asked, say: nothing is told to be left."""
    decided = Decided()
    decided.branches[1].leave()
    recovery = Recovery(decided.coordinator)
    done = recovery.run_once()
    Recovery(decided.coordinator).forget("shop", [KEY])
    told = _given_up(recovery, done, ["shop"], [KEY], ask=False)
    assert ([each.state for each in told.found if not each.branch], told.left) == ([State.GONE], [])
