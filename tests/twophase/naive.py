"""Recoveries with one mistake each. For tests only: `tests/twophase/test_races.py` shows that each breaks the promise."""

from __future__ import annotations

from typing import TYPE_CHECKING

from idemp.identity import EffectiveId
from idemp.inbox.port import Claim, Verdict
from idemp.twophase import Recovery, State

if TYPE_CHECKING:
    from idemp.twophase import BranchId, Database, InDoubt


class NaiveRecovery(Recovery):
    """Ends a branch as `committed` says."""

    def committed(self, branch: BranchId) -> bool:
        raise NotImplementedError

    def _decided(self, database: Database, doubt: InDoubt) -> tuple[State, str]:
        committed = self.committed(doubt.id)
        database.end(doubt.id, commit=committed)
        return (State.COMMITTED if committed else State.ROLLED_BACK), ""


class ReadingRecovery(NaiveRecovery):
    """Reads the decision: work in flight has not committed it yet, and will."""

    def committed(self, branch: BranchId) -> bool:
        decision = self._coordinator.decisions.noted(branch.consumer, branch.key)
        return decision is not None and decision.token == branch.token


class TokenlessRecovery(NaiveRecovery):
    """Inserts the key, and takes the conflict for the decision, whichever attempt it was that committed."""

    def committed(self, branch: BranchId) -> bool:
        consumer = self._coordinator.decisions.consumer(branch.consumer)
        id = EffectiveId(branch.key, str(branch.key))  # noqa: A001
        claim = Claim(consumer=consumer, id=id, message_type="naive", fingerprint=None, wait=self._wait)
        with self._coordinator.store.begin([claim]) as unit:
            return unit.claim(claim).verdict is not Verdict.CLAIMED
