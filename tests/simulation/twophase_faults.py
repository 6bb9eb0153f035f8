"""Seeded faults in all parts of handlings in several databases; a small case that shows each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from idemp.errors import StoreError
from idemp.inbox.memory import InMemoryStore
from idemp.testing.simulation.twophase import DecidingStore, InMemoryXA, TwoPhaseParts
from idemp.testing.simulation.twophase.ports import SESSION_ENDS
from idemp.twophase import Branches, BranchId, Coordinator, Ended
from idemp.twophase.port import in_order
from tests.simulation.mutants import LONG, MINUTE, Mutant
from tests.simulation.twophase import BOTH, case
from tests.twophase.naive import ReadingRecovery, TokenlessRecovery

if TYPE_CHECKING:
    from idemp.inbox.port import Claim, UnitOfWork
    from idemp.twophase import Database, Decision
    from idemp.twophase.ending import Unfinished


def handled_by(kind: type[Branches]) -> TwoPhaseParts:
    class Coordinating(Coordinator):
        def branches(self, claims: Sequence[Claim], names: Sequence[str]) -> Branches:
            return kind(self, claims, names)

    return TwoPhaseParts(coordinator=Coordinating)


# Attempts -------------------------------------------------------------------------------------------------------------


class LooksAfterTheClaim(Branches):
    """What is prepared is listed when the handler asks for the database: a successor's may be among it."""

    def _begun(self, database: Database) -> Any:
        self._look()
        return super()._begun(database)


class DecidesFirst(Branches):
    """The inbox commits, and then the other databases prepare."""

    def prepare(self, unit: UnitOfWork) -> None:
        key, prepared = self._claims[0].id.key, in_order(self._open)
        self._decision = self._coordinator.decisions.note(unit, 1, key, self._token, prepared)

    def decide(self, unit: UnitOfWork) -> None:
        super().decide(unit)
        for branch in self._open.values():
            branch.prepare()


class CommitsOthersFirst(Branches):
    """The other databases commit, and then the inbox decides."""

    def decide(self, unit: UnitOfWork) -> None:
        for branch in self._open.values():
            branch.commit()
        super().decide(unit)


class UnknownIsRolledBack(Branches):
    """A COMMIT without an answer is taken for one that failed."""

    def decide(self, unit: UnitOfWork) -> None:
        try:
            super().decide(unit)
        except Exception:
            self._may_be_made = False
            raise


class DecidesByItself(Branches):
    """The decision is no part of the claim's transaction."""

    def prepare(self, unit: UnitOfWork) -> None:
        with self._coordinator.store.begin() as another:
            super().prepare(another)
            another.commit()


class ForgetsFirst(Branches):
    """The decision is forgotten, and then carried out."""

    def carry_out(self) -> None:
        if self._decision is not None:
            self._coordinator.decisions.finished(self._decision)
        super().carry_out()


class FailedIsDone(Branches):
    """Who can't commit a branch takes it for committed."""

    def carry_out(self) -> None:
        for branch in self._open.values():
            with suppress(StoreError):
                branch.commit()
        if self._decision is not None:
            self._coordinator.ended(self._decision, {})


class EverybodysBranches(Branches):
    """Names are read, and not whose they are."""

    def _look(self) -> None:
        self._earlier = {
            name: [doubt.id for doubt in self._coordinator.databases[name].in_doubt()] for name in self._names
        }


# Coordination ---------------------------------------------------------------------------------------------------------


class AcksUnfinished(Coordinator):
    """A duplicate is a duplicate, whatever the other databases have."""

    def finish(self, claim: Claim) -> None:
        pass


class OneIsEnough(Coordinator):
    """A decision is forgotten once one of its databases has committed."""

    def ended(self, decision: Decision, unfinished: Mapping[str, Unfinished]) -> None:
        super().ended(decision, unfinished if len(unfinished) == len(decision.branches) else {})


class NumbersByName(Coordinator):
    """Branches are looked for under other numbers than they were prepared under."""

    def carry_out(self, decision: Decision) -> None:
        by_name = sorted(decision.branches, key=lambda prepared: prepared.database)
        super().carry_out(replace(decision, branches=tuple(by_name)))


# Databases and inbox --------------------------------------------------------------------------------------------------


class BusyIsGone(InMemoryXA):
    """What is in other hands passes for ended."""

    def end(self, id: BranchId, *, commit: bool) -> Ended:
        ended = super().end(id, commit=commit)
        return Ended.GONE if ended is Ended.BUSY else ended


class PurgesUnfinished(DecidingStore):
    """The cleaner takes claims with decisions that are not carried out."""

    def purge(
        self, consumer: str, retention: Mapping[str, timedelta], limit: int, *, others: timedelta | None = None
    ) -> int:
        gone = InMemoryStore.purge(self, consumer, retention, limit, others=others)
        claimed = {key for _, key in self.content.handlings}
        for key in [key for key in self.content.data if key[0] == "idemp_decision" and key[2] not in claimed]:
            del self.content.data[key]
        return gone


MUTANTS = [
    Mutant("recovery reads instead of inserting", case(recoverers=1, parts=TwoPhaseParts(recovery=ReadingRecovery))),
    Mutant("the key alone decides", case(faults=1, jumps=(MINUTE,), parts=TwoPhaseParts(recovery=TokenlessRecovery))),
    Mutant(
        "branches are listed after the claim",
        case(workers=2, copies=2, faults=1, only=SESSION_ENDS, parts=handled_by(LooksAfterTheClaim)),
    ),
    Mutant("decided before it is prepared", case(parts=handled_by(DecidesFirst))),
    Mutant("others commit before the decision", case(parts=handled_by(CommitsOthersFirst))),
    Mutant("unknown commit, and others roll back", case(faults=1, parts=handled_by(UnknownIsRolledBack))),
    Mutant("decision outside the claim's transaction", case(crashes=1, faults=1, parts=handled_by(DecidesByItself))),
    Mutant(
        "duplicate acked before all have committed", case(crashes=1, parts=TwoPhaseParts(coordinator=AcksUnfinished))
    ),
    Mutant("decision forgotten first", case(crashes=1, parts=handled_by(ForgetsFirst))),
    Mutant("a commit that failed taken for done", case(faults=2, only="commit", parts=handled_by(FailedIsDone))),
    Mutant(
        "one database of two is enough",
        case(crashes=1, parts=TwoPhaseParts(coordinator=OneIsEnough, databases=BOTH.databases)),
    ),
    Mutant(
        "branches under other numbers",
        case(faults=1, parts=TwoPhaseParts(coordinator=NumbersByName, databases=BOTH.databases)),
    ),
    Mutant("other inboxes' branches rolled back", case(parts=handled_by(EverybodysBranches))),
    Mutant("in other hands taken for gone", case(crashes=1, parts=TwoPhaseParts(databases={"books": BusyIsGone}))),
    Mutant(
        "purge of an unfinished decision",
        case(crashes=1, purges=1, jumps=(LONG,), parts=TwoPhaseParts(store=PurgesUnfinished)),
    ),
]
