"""What every implementation of the ports for handlings in several databases does: those in SQL, and the simulated ones."""

from __future__ import annotations

import secrets
import time
from itertools import count
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from idemp.twophase import BranchId, Ended, Prepared
from idemp.twophase.ending import patiently
from idemp.twophase.port import TOKEN_BYTES

if TYPE_CHECKING:
    from idemp.inbox.port import Store
    from idemp.twophase import Branch, Database, Decisions

_ROWS = count(1_000_000)


class DatabaseCases:
    """The cases of `Database` and `Branch`. A subclass gives the fixture `database`, and the methods that raise here."""

    in_hands = False
    tells_outcomes = True

    def write(self, branch: Branch, row: int) -> None:
        """Insert a row in the branch's transaction."""
        raise NotImplementedError

    def count(self, row: int) -> int:
        """How many such rows are committed."""
        raise NotImplementedError

    def begun(self, database: Database) -> tuple[BranchId, Branch, int]:
        """A branch that has written a row."""
        name, row = BranchId(b"nobody's", 1, uuid4(), secrets.token_bytes(TOKEN_BYTES), 0), next(_ROWS)
        branch = database.begin(name)
        self.write(branch, row)
        return name, branch, row

    def left(self, database: Database) -> tuple[BranchId, Branch, int]:
        """One that is prepared, and whose connection has ended."""
        name, branch, row = self.begun(database)
        branch.prepare()
        branch.leave()
        return name, branch, row

    def lists(self, database: Database, name: BranchId) -> bool:
        return name in [doubt.id for doubt in database.in_doubt()]

    def ended(self, database: Database, name: BranchId, *, commit: bool) -> Ended:
        return patiently(lambda: database.end(name, commit=commit), time.sleep)

    def test_committed_on_its_own_connection(self, database: Any) -> None:
        name, branch, row = self.begun(database)
        assert not self.lists(database, name)
        branch.prepare()
        assert self.lists(database, name)
        assert self.count(row) == 0, "prepared, and not committed"
        assert branch.commit() is Ended.DONE
        branch.leave()
        assert self.count(row) == 1
        assert not self.lists(database, name)
        assert database.end(name, commit=False) is Ended.GONE

    def test_rolled_back_on_its_own_connection(self, database: Any) -> None:
        for prepares in (True, False):
            name, branch, row = self.begun(database)
            if prepares:
                branch.prepare()
            branch.rollback()
            branch.leave()
            assert not self.lists(database, name)
            assert self.count(row) == 0

    def test_not_prepared_is_gone_with_its_connection(self, database: Any) -> None:
        name, branch, row = self.begun(database)
        assert database.end(name, commit=True) is Ended.GONE
        branch.leave()
        assert self.count(row) == 0
        assert not self.lists(database, name)

    def test_not_prepared_can_t_be_committed(self, database: Any) -> None:
        _, branch, row = self.begun(database)
        assert branch.commit() is Ended.GONE
        branch.leave()
        assert self.count(row) == 0

    def test_ended_by_another(self, database: Any) -> None:
        for commit in (True, False):
            name, branch, row = self.left(database)
            assert self.lists(database, name), "it outlives its connection"
            assert self.ended(database, name, commit=commit) is Ended.DONE
            assert self.count(row) == commit
            assert self.ended(database, name, commit=not commit) is Ended.GONE
            assert self.count(row) == commit
            assert database.outcome(branch.prepared) is (commit if self.tells_outcomes else None)

    def test_committed_by_another_when_its_own_connection_is_lost(self, database: Any) -> None:
        _, branch, row = self.left(database)
        assert patiently(branch.commit, time.sleep) is Ended.DONE
        assert self.count(row) == 1

    def test_in_hands_while_its_connection_lives(self, database: Any) -> None:
        name, branch, row = self.begun(database)
        branch.prepare()
        assert database.end(name, commit=True) is (Ended.BUSY if self.in_hands else Ended.DONE)
        assert branch.commit() is (Ended.DONE if self.in_hands else Ended.GONE)
        branch.leave()
        assert self.count(row) == 1

    def test_one_that_never_was(self, database: Any) -> None:
        never = BranchId(b"nobody's", 1, uuid4(), secrets.token_bytes(TOKEN_BYTES), 0)
        assert database.end(never, commit=False) is Ended.GONE
        assert not self.lists(database, never)


class DecisionsCases:
    """The cases of `Decisions`. A subclass gives the fixtures `store` and `decisions`."""

    consumer = "shop"

    def test_noted_if_and_only_if_the_unit_is_committed(self, store: Store, decisions: Decisions) -> None:
        number, branches = decisions.number(self.consumer), [Prepared("ledger", "somewhere", 7)]
        assert decisions.consumer(number) == self.consumer
        assert decisions.inbox() == decisions.inbox()
        for commits in (False, True):
            key, token = uuid4(), secrets.token_bytes(TOKEN_BYTES)
            with store.begin() as unit:
                noted = decisions.note(unit, number, key, token, branches)
                assert decisions.noted(number, key, unit) == noted
                assert decisions.noted(number, key) is None
                if commits:
                    unit.commit()
            found = decisions.noted(number, key)
            assert (found is not None) is commits
            assert (noted in decisions.unfinished()) is commits
        assert found == noted
        assert (found.key, found.token, found.branches) == (key, token, tuple(branches))
        decisions.finished(found)
        decisions.finished(found)
        assert decisions.noted(number, key) is None
        assert noted not in decisions.unfinished()

    def test_another_attempt_s_decision_is_not_forgotten(self, store: Store, decisions: Decisions) -> None:
        number, key = decisions.number(self.consumer), uuid4()
        noted = []
        for _ in range(2):
            with store.begin() as unit:
                noted.append(decisions.note(unit, number, key, secrets.token_bytes(TOKEN_BYTES), []))
                if len(noted) == 1:
                    continue
                unit.commit()
        decisions.finished(noted[0])
        assert decisions.noted(number, key) == noted[1]
        decisions.finished(noted[1])
