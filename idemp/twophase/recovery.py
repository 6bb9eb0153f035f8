"""Recovery: ends what processes that died, or lost a connection, left prepared. Several may run at once."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from idemp.errors import BranchUnfinished, IdempError, StoreError
from idemp.identity import EffectiveId
from idemp.inbox.port import Claim, Verdict
from idemp.showing import logger
from idemp.twophase.ending import patiently
from idemp.twophase.port import Ended

if TYPE_CHECKING:
    import threading
    from collections.abc import Collection
    from datetime import datetime
    from uuid import UUID

    from idemp.twophase.coordinator import Coordinator
    from idemp.twophase.port import Database, Decision, InDoubt

log = logger("idemp.twophase")

WAIT: Final = timedelta(seconds=2)
_TYPE: Final = "idemp.recovery"  # of claims that are never committed


class State(enum.Enum):
    """What became of a branch, or of a decision, that was found.

    Example:
        >>> State.LEFT.value
        'left'
    """

    COMMITTED = "committed"
    ROLLED_BACK = "rolled back"
    IN_DOUBT = "in doubt"  #: only looked at
    GONE = "gone"  #: somebody else was faster
    FORGOTTEN = "forgotten"  #: nobody could commit it any more, and a person gave it up
    LEFT = "left"  #: see the reason


@dataclass(frozen=True, slots=True)
class Recovered:
    """A branch, or a decision with what is left of its branches.

    Attributes:
        databases: where it is, by their names in the app.
        consumer: whose handling it belongs to.
        key: what that claimed.
        branch: its name on its server; empty for a decision.
        state: what became of it.
        since: since when it was prepared, or decided; `None` where that is not known.
        reason: why it was left.
        is_lost: whether nobody can end it as it was decided.
    """

    databases: tuple[str, ...]
    consumer: str
    key: UUID
    branch: str
    state: State
    since: datetime | None = None
    reason: str = ""
    is_lost: bool = False


@dataclass(frozen=True, slots=True)
class Round:
    """One look at all databases.

    Attributes:
        found: everything of this inbox.
        away: databases that could not be asked, each with the reason.
    """

    found: list[Recovered] = field(default_factory=list)
    away: dict[str, str] = field(default_factory=dict)

    @property
    def left(self) -> list[Recovered]:
        """What is still in doubt."""
        return [each for each in self.found if each.state in {State.LEFT, State.IN_DOUBT}]


class Recovery:
    """Ends what is in doubt. One per process or thread.

    Args:
        coordinator: knows inbox and databases.
        wait: how long to wait for work in flight on a key, before its branches are left to the next round.

    Example:
        >>> from idemp.inbox.memory import InMemoryStore
        >>> from idemp.twophase.coordinator import Coordinator
        >>> recovery = Recovery(Coordinator(InMemoryStore(), None, {}))  # .run_once()
    """

    def __init__(self, coordinator: Coordinator, *, wait: timedelta = WAIT) -> None:
        self._coordinator = coordinator
        self._wait = wait
        self._seen: set[object] = set()
        self._before: Collection[object] | None = None  # what the round before has seen; `None` before the first
        self._is_away = False

    def look(self) -> Round:
        """What is in doubt now; changes nothing, and some of it may be in work.

        Raises:
            StoreError: the inbox's database can't say what is its own.
        """
        return self._round(act=False)

    def run_once(self) -> Round:
        """End everything of this inbox that is in doubt, waiting a moment for work that is in flight.

        Raises:
            StoreError: the inbox's database is away: without it nothing is decided.
        """
        return self._round(act=True)

    def forget(self, consumer: str, keys: Collection[UUID]) -> list[Recovered]:
        """Give up a consumer's decisions that nobody can carry out any more; one that somebody can is carried out, or stays.

        Their messages are taken for handled, everywhere. What is not committed in the other databases is a person's to mend.

        Args:
            consumer: whose; other apps on the same inbox may have databases that are not registered here.
            keys: what their handlings claimed.

        Returns:
            What became of each; those that are not unfinished are left out.

        Raises:
            StoreError: the inbox's database is away.
        """
        decisions = self._coordinator.decisions
        number = decisions.number(consumer)
        found = []
        for key in keys:
            decision = decisions.noted(number, key)
            if decision is None:
                continue
            done = self._carried_out(decision, act=True)
            if done.is_lost:
                decisions.finished(decision)
                done = replace(done, state=State.FORGOTTEN)
                log.warning(
                    "a decision was given up: %s",
                    done.reason,
                    extra={
                        "event": "decision_forgotten",
                        "consumer": done.consumer,
                        "message_key": str(done.key),
                        "databases": list(done.databases),
                    },
                )
            found.append(done)
        return found

    def keep_up(self) -> None:
        """A worker's round: never raises, and logs what it did.

        The first one ends everything, later ones only what the round before has seen already: what lives ends by itself,
        most of it within milliseconds.
        """
        self._seen = set()
        try:
            self._tell(self._round(act=True, only=self._before))
            self._before = self._seen
        except StoreError as error:
            self._tell(Round(away={"the inbox": error.message}))

    def run(self, stop: threading.Event, interval: timedelta) -> None:
        """`keep_up` after each `interval`, until `stop`."""
        while not stop.wait(interval.total_seconds()):
            self.keep_up()

    def _round(self, *, act: bool, only: Collection[object] | None = None) -> Round:
        done = Round()
        for decision in self._coordinator.decisions.unfinished():
            thing = (decision.key, decision.token)
            self._seen.add(thing)
            if only is None or thing in only:
                done.found.append(self._carried_out(decision, act=act))
        inbox = self._coordinator.decisions.inbox()
        for name, database in self._coordinator.databases.items():
            try:
                doubts = [doubt for doubt in database.in_doubt() if doubt.id.inbox == inbox]
            except StoreError as error:
                done.away[name] = error.message
                continue
            self._seen.update(doubt.id for doubt in doubts)
            done.found.extend(
                self._resolved(database, doubt, act=act) for doubt in doubts if only is None or doubt.id in only
            )
        return done

    def _carried_out(self, decision: Decision, *, act: bool) -> Recovered:
        state, reason, is_lost = State.IN_DOUBT, "", False
        if act:
            try:
                self._coordinator.carry_out(decision)
                state = State.COMMITTED
            except StoreError as error:
                state, reason = State.LEFT, error.message
                is_lost = isinstance(error, BranchUnfinished) and error.is_lost
        return Recovered(
            tuple(prepared.database for prepared in decision.branches),
            self._consumer(decision.consumer),
            decision.key,
            "",
            state,
            decision.decided_at,
            reason,
            is_lost,
        )

    def _resolved(self, database: Database, doubt: InDoubt, *, act: bool) -> Recovered:
        branch = doubt.id
        state, reason = State.IN_DOUBT, ""
        if act:
            try:
                state, reason = self._decided(database, doubt)
            except IdempError as error:
                state, reason = State.LEFT, error.message
        return Recovered(
            (database.name,), self._consumer(branch.consumer), branch.key, branch.text, state, doubt.since, reason
        )

    def _decided(self, database: Database, doubt: InDoubt) -> tuple[State, str]:
        """By inserting the key, and never by reading it: who is at work on it holds it, and is waited for."""
        branch, decisions = doubt.id, self._coordinator.decisions
        try:
            consumer = decisions.consumer(branch.consumer)
        except KeyError:
            return State.LEFT, "this inbox has no such consumer: it was restored from before the handling"
        claim = Claim(
            consumer=consumer,
            id=EffectiveId(branch.key, str(branch.key)),
            message_type=_TYPE,
            fingerprint=None,
            wait=self._wait,
        )
        with self._coordinator.store.begin([claim]) as unit:
            verdict = unit.claim(claim).verdict
            if verdict is Verdict.IN_FLIGHT:
                return State.LEFT, "the handling is in work"
            # Whoever held the key has ended, and nobody commits it before the end of this transaction. Only an attempt that
            # was committed has a decision with its token, be its claim still there or deleted by hand since. Without a
            # decision nobody committed it, or all branches of the attempt that did have ended.
            decision = decisions.noted(branch.consumer, branch.key, unit)
            commit = decision is not None and decision.token == branch.token
            ended = patiently(lambda: database.end(branch, commit=commit), self._coordinator.pause)
        if ended is Ended.BUSY:
            return State.LEFT, "it is in another connection's hands"
        if ended is Ended.GONE:
            return State.GONE, ""
        return (State.COMMITTED if commit else State.ROLLED_BACK), ""

    def _consumer(self, number: int) -> str:
        try:
            return self._coordinator.decisions.consumer(number)
        except (KeyError, StoreError):
            return f"#{number}"

    def _tell(self, done: Round) -> None:
        for each in done.found:
            if each.state is State.LEFT:
                log.warning(
                    "left in doubt in %s: %s",
                    ", ".join(each.databases),
                    each.reason,
                    extra={
                        "event": "branch_left",
                        "consumer": each.consumer,
                        "message_key": str(each.key),
                        "databases": list(each.databases),
                    },
                )
            else:
                log.info(
                    "recovered in %s: %s",
                    ", ".join(each.databases),
                    each.state.value,
                    extra={
                        "event": "branch_recovered",
                        "consumer": each.consumer,
                        "message_key": str(each.key),
                        "databases": list(each.databases),
                        "decision": each.state.value,
                    },
                )
        if done.away and not self._is_away:
            why = "; ".join(f"{name}: {reason}" for name, reason in done.away.items())
            log.warning(
                "what is in doubt there is left so: %s",
                why,
                extra={"event": "recovery_waits", "databases": sorted(done.away)},
            )
        self._is_away = bool(done.away)
