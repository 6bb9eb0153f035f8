"""Databases, branches, decisions and units of work as one process has them: each call is a step, and may go wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

from idemp.errors import BranchUnavailable, CommitUnknown, StoreUnavailable, TransientStoreError
from idemp.inbox.port import Verdict
from idemp.testing.simulation.inboxes import TableInbox
from idemp.testing.simulation.ports import COMMIT_FAILED, COMMIT_LOST, SteppedStore, SteppedUnit
from idemp.twophase import Ended

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta
    from types import TracebackType
    from uuid import UUID

    from idemp.inbox.port import Claim, Claimed
    from idemp.messages import Output
    from idemp.testing.simulation.stage import Actor
    from idemp.testing.simulation.twophase.databases import InMemoryBranch, InMemoryDatabase, InMemoryDecisions
    from idemp.testing.simulation.twophase.world import TwoPhaseWorld
    from idemp.testing.simulation.world import World
    from idemp.twophase import BranchId, Decision, InDoubt, Prepared

LOST: Final = "its answer is lost"
AWAY: Final = "it never arrives"
SLOW: Final = "it is slow"
GIVES_UP: Final = "waited long enough"
SESSION_ENDS: Final = "its session in the inbox ends, unnoticed"
COMMIT_SLOW: Final = f"commit, {SLOW}"
COMMIT_REFUSED: Final = "commit, it meets a deadlock"


def _faults(call: str, *kinds: str) -> tuple[str, ...]:
    return tuple(f"{call}, {kind}" for kind in kinds)


class TwoPhaseUnit(SteppedUnit):
    """A unit of work of one actor, which the database may end while the actor does something elsewhere."""

    _world: TwoPhaseWorld
    is_lost = False
    decision: Decision | None = None
    _is_under_way = False

    def _claim(self, claim: Claim, chosen: str = "claim") -> Claimed:
        claimed = super()._claim(claim, chosen)
        self._world.messages.setdefault(claim.id.key, claim.id.text)
        if claimed.verdict is Verdict.CLAIMED:
            self._world.claimed[self._actor.name] = self
        return claimed

    def lose(self) -> None:
        """The database ends it, and its client does not know."""
        self.is_lost = True
        self._world.ends += 1
        self.inner.__exit__(None, None, None)

    def needed(self, call: str) -> None:
        """A statement finds out.

        Raises:
            StoreUnavailable: it is lost.
        """
        if self.is_lost:
            self._actor.tell(call, "the session has ended")
            raise StoreUnavailable("The simulation ended the session.")

    def store_all(self, handled: Sequence[tuple[Claim, Sequence[Output]]], relay_after: timedelta | None) -> None:
        """As the port says."""
        self.needed("store")
        super().store_all(handled, relay_after)

    def commit(self) -> None:
        """Commit; or not, or not know, or let go of what is committed later."""
        chosen = self._world.point(
            self._actor, "commit", faults=(COMMIT_LOST, COMMIT_FAILED, COMMIT_SLOW, COMMIT_REFUSED)
        )
        committed = "rolled back"
        if self.is_lost:
            committed = "the session has ended"
        elif chosen == COMMIT_SLOW:
            self._is_under_way = True
            token = self.decision.token if self.decision is not None else b""
            what = f"COMMIT of {self._actor.name} arrives, {numbered(token)}"
            self._world.arrives_later(what, token, self.arrives, self.held())
            committed = ""
        elif chosen in {"commit", COMMIT_LOST}:
            self.arrives()
            committed = "committed"
        self._actor.tell(chosen, committed)
        if chosen == COMMIT_REFUSED and not self.is_lost:
            raise TransientStoreError("The simulation says: a deadlock.")
        if chosen != "commit" or self.is_lost:
            raise CommitUnknown("The simulation took the answer of COMMIT away.")

    def arrives(self) -> None:
        """COMMIT takes place."""
        self.inner.commit()
        self._world.ends += 1
        for message, outputs in self._handled:
            self._world.witness.commits(message, outputs)
        if self.decision is not None:
            self._world.decides(self.decision)

    def held(self) -> object:
        """What it does when its COMMIT arrives."""
        return ("commits", tuple(message for message, _ in self._handled), self.decision)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._world.claimed.pop(self._actor.name, None)
        if not self.is_lost and not self._is_under_way:
            super().__exit__(kind, error, trace)


class TwoPhaseStore(SteppedStore):
    """The store as one actor has it."""

    unit_kind: ClassVar[type[SteppedUnit]] = TwoPhaseUnit


class TwoPhaseInbox(TableInbox):
    """An inbox whose transactions may end while their clients do something elsewhere."""

    has_outages = False

    def of(self, world: World, actor: Actor) -> TwoPhaseStore:
        """The store, stepped."""
        return TwoPhaseStore(self.store, world, actor)


class SteppedDecisions:
    """The decisions as one process has them."""

    def __init__(self, inner: InMemoryDecisions, world: TwoPhaseWorld, actor: Actor) -> None:
        self._inner = inner
        self._world = world
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def note(
        self, unit: TwoPhaseUnit, consumer: int, key: UUID, token: bytes, branches: Sequence[Prepared]
    ) -> Decision:
        """As the port says."""
        call = "note the decision"
        self._world.point(self._actor, call)
        unit.needed(call)
        unit.decision = self._inner.note(unit.inner, consumer, key, token, branches)
        self._actor.tell(call, numbered(token))
        return unit.decision

    def noted(self, consumer: int, key: UUID, unit: TwoPhaseUnit | None = None) -> Decision | None:
        """As the port says."""
        call = "read the decision"
        self._asked(call)
        if unit is not None:
            unit.needed(call)
        found = self._inner.noted(consumer, key, unit and unit.inner)
        self._world.knows(self._actor, [found.token] if found is not None else [])
        self._actor.tell(call, numbered(found.token) if found is not None else "there is none")
        return found

    def unfinished(self) -> Sequence[Decision]:
        """As the port says."""
        call = "list decisions"
        self._asked(call)
        found = self._inner.unfinished()
        tokens = [decision.token for decision in found]
        self._world.knows(self._actor, tokens)
        self._actor.tell(call, ", ".join(map(numbered, tokens)) or "none")
        return found

    def finished(self, decision: Decision) -> None:
        """As the port says."""
        call = "forget the decision"
        chosen = self._asked(call, LOST)
        self._inner.finished(decision)
        self._actor.tell(chosen, numbered(decision.token))
        if chosen != call:
            raise StoreUnavailable("The simulation took the answer away.")

    def _asked(self, call: str, *faults: str) -> str:
        chosen = self._world.point(self._actor, call, faults=_faults(call, AWAY, *faults))
        if chosen.endswith(AWAY):
            self._actor.tell(chosen)
            raise StoreUnavailable("The simulation says: away.")
        return chosen


class SteppedDatabase:
    """Another database as one process has it."""

    def __init__(self, inner: InMemoryDatabase, world: TwoPhaseWorld, actor: Actor) -> None:
        self.inner = inner
        self.name = inner.name
        self.place = inner.place
        self._world = world
        self._actor = actor
        self._busy: tuple[BranchId, int] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def in_doubt(self) -> Sequence[InDoubt]:
        """As the port says."""
        call = f"list what is prepared in {self.name}"
        chosen = self._world.point(self._actor, call, faults=_faults(call, AWAY))
        if chosen != call:
            self._actor.tell(chosen)
            raise BranchUnavailable("The simulation says: away.")
        found = self.inner.in_doubt()
        ours = [doubt.id for doubt in found if self._world.is_ours(doubt.id)]
        self._world.knows(self._actor, [branch.token for branch in ours])
        told = ", ".join(f"{numbered(branch.token)} of {self._world.messages[branch.key]}" for branch in ours)
        self._actor.tell(call, told or "nothing of ours")
        return found

    def begin(self, id: BranchId) -> SteppedBranch:
        """As the port says."""
        call = f"begin in {self.name}"
        self._actor.point(call)
        branch = self.inner.begin(id)
        self._world.begins(self._actor, self.inner, branch)
        self._actor.tell(call, numbered(id.token))
        return SteppedBranch(branch, self, self._world, self._actor)

    def end(self, id: BranchId, *, commit: bool) -> Ended:
        """As the port says; or it is not heard, or takes place at any time after it was given up.

        Whoever is told that it is in other hands waits for anything to change, or gives up.
        """
        if self._busy == (id, self._world.ends):
            return Ended.BUSY
        call = f"{'commit' if commit else 'roll back'} {numbered(id.token)} in {self.name}"
        chosen = self._world.point(self._actor, call, faults=_faults(call, AWAY, LOST, SLOW))
        if chosen != call:
            self._actor.tell(chosen)
            if chosen.endswith(LOST):
                self.arrives(id, commit=commit)
            elif chosen.endswith(SLOW):
                what = f"a request of {self._actor.name} arrives: {call}"
                self._world.arrives_later(what, id.token, lambda: self.arrives(id, commit=commit), (call, id.text))
            raise BranchUnavailable("The simulation took the answer away.")
        while (ended := self.arrives(id, commit=commit)) is Ended.BUSY:
            tried = self._world.ends
            self._actor.tell(call, "is in other hands")
            chosen = self._world.point(
                self._actor,
                call,
                ready=lambda tried=tried: self._world.ends > tried,  # type: ignore[misc]
                always=_faults(call, GIVES_UP),
            )
            if chosen != call:
                self._busy = (id, self._world.ends)
                break
        self._actor.tell(chosen, ended.value)
        return ended

    def outcome(self, prepared: Prepared) -> bool | None:
        """As the port says; of what has ended it never changes, so that it is no step."""
        told = self.inner.outcome(prepared)
        self._actor.memory = hash((self._actor.memory, told))
        return told

    def arrives(self, id: BranchId, *, commit: bool) -> Ended:
        """A request to end a branch reaches the server."""
        ended = self.inner.end(id, commit=commit)
        if ended is Ended.DONE:
            self._world.ends += 1
            self._world.seen.ends(self.name, id, commit=commit)
        return ended


class SteppedBranch:
    """A branch as the process has it that works on it; its `session` writes rows."""

    broken = None

    def __init__(self, inner: InMemoryBranch, database: SteppedDatabase, world: TwoPhaseWorld, actor: Actor) -> None:
        self._inner = inner
        self._database = database
        self._world = world
        self._actor = actor
        self.session = self.connection = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def insert(self, row: str) -> None:
        """Write a row."""
        call = f"insert in {self._database.name}"
        self._actor.point(call)
        self._actor.tell(call)
        self._inner.insert(row)

    def update(self, row: str) -> None:
        """Write a row; while somebody else has it, wait for it, or give up."""
        call, server, id_ = f"update in {self._database.name}", self._database.inner, self._inner.id
        chosen = self._actor.point(call)
        while server.is_locked(row, id_):
            self._actor.tell(call, "waits for a lock")
            chosen = self._actor.point(
                call, ready=lambda: not server.is_locked(row, id_), always=_faults(call, GIVES_UP)
            )
            if chosen != call:
                break
        self._actor.tell(chosen)
        self._inner.update(row)

    def prepare(self) -> None:
        """As the port says; or the connection is lost before, after, or while the server is at it."""
        call = f"prepare in {self._database.name}"
        chosen = self._world.point(self._actor, call, faults=_faults(call, AWAY, LOST, SLOW))
        self._actor.tell(chosen)
        if chosen in {call, f"{call}, {LOST}"}:
            self._inner.prepare()
        if chosen == call:
            return
        if chosen.endswith(SLOW):
            self._world.prepares_later(self._actor, self._database.inner, self._inner)
        self._inner.lose()
        raise BranchUnavailable("The simulation cut the connection.")

    def commit(self) -> Ended:
        """As the port says; or the connection is lost before, or after."""
        call = f"commit its own in {self._database.name}"
        if self._inner.is_over or not self._inner.usable():
            return self._database.end(self._inner.id, commit=True)
        chosen = self._world.point(self._actor, call, faults=_faults(call, AWAY, LOST))
        if not chosen.endswith(AWAY):
            ended = self._ends(commit=True)
            self._actor.tell(chosen, ended.value)
            if chosen == call:
                return ended
        else:
            self._actor.tell(chosen)
        self._inner.lose()
        self._leave()
        return self._database.end(self._inner.id, commit=True)

    def rollback(self) -> None:
        """As the port says."""
        if self._actor.dead or self._inner.is_over or not self._inner.usable():
            return
        call = f"roll back its own in {self._database.name}"
        chosen = self._world.point(self._actor, call, faults=_faults(call, AWAY, LOST))
        if not chosen.endswith(AWAY):
            self._ends(commit=False)
        self._actor.tell(chosen)
        if chosen != call:
            self._inner.lose()

    def _ends(self, *, commit: bool) -> Ended:
        was_prepared = self._inner.id.text in self._database.inner.prepared
        ended = self._inner.commit() if commit else Ended.DONE
        if not commit:
            self._inner.rollback()
        self._world.ends += 1
        if was_prepared:
            self._world.seen.ends(self._database.name, self._inner.id, commit=commit)
        return ended

    def leave(self) -> None:
        """As the port says. The server sees the end of a connection when it does, as that of a process."""
        if not self._actor.dead and not self._inner.is_over:
            self._leave()

    def _leave(self) -> None:
        self._world.disconnects(self._actor, self._database.inner, self._inner)


def numbered(token: bytes) -> str:
    """An attempt in words."""
    return f"#{int.from_bytes(token)}"
