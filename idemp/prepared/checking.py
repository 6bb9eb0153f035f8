"""The checker: decides what its producer left undecided, and publishes what is committed and was not confirmed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from idemp.dispatch import reason_of
from idemp.errors import BrokerError, OppositeDecision, StoreError, UnknownPrepared
from idemp.plurals import counted
from idemp.prepared.deciding import about
from idemp.prepared.port import Answer, Decision, State, Taken
from idemp.relay import Outage, backoff
from idemp.showing import described, logger, text_of

if TYPE_CHECKING:
    import threading
    from collections.abc import Sequence

    from idemp.prepared.producing import PreparedMessages

log = logger("idemp.prepared")

_PURGED_AT_ONCE: Final = 1000
_PURGE_SECONDS: Final = 60.0
_NO_ANSWER: Final = {"closed", "blocked", "timeout"}


@dataclass(frozen=True, slots=True)
class Round:
    """What one round of the checker achieved.

    Attributes:
        taken: messages that were due.
        committed: of those that were undecided, how many are decided for commit.
        rolled_back: likewise for rollback.
        unknown: how many the checker knows nothing of yet.
        parked: how many were parked, since it was asked too often.
        unasked: how many it could not be asked about; they don't count as checked.
        published: how many of those that are committed the broker confirmed.
        refused: how many it did not.
    """

    taken: int = 0
    committed: int = 0
    rolled_back: int = 0
    unknown: int = 0
    parked: int = 0
    unasked: int = 0
    published: int = 0
    refused: int = 0


class Checking:
    """Rounds of one checker. Any number of them may run on one home.

    Args:
        messages: whose.
    """

    def __init__(self, messages: PreparedMessages) -> None:
        self._messages = messages
        self._consumer = messages.app.name
        self._home = messages.home
        self._barrier = messages.barrier
        self._home_away = Outage()
        self._barrier_away = Outage()
        self._broker_away = Outage()
        self._purge_at = 0.0

    def run_once(self, limit: int) -> Round:
        """One round; raises what the home raises."""
        taken = self._home.take(limit, self._messages.lease)
        counts = {"taken": len(taken)}
        committed: list[Taken] = []
        for each in taken:
            outcome = "committed" if each.state is State.COMMITTED else self._check(each, away="unasked" in counts)
            if outcome == "committed":
                committed.append(replace(each, state=State.COMMITTED))
            if outcome and each.state is State.PREPARED:
                counts[outcome] = counts.get(outcome, 0) + 1
        published = self._publish(committed)
        return Round(**counts, published=published, refused=len(committed) - published)

    def run(self, stop: threading.Event, interval: timedelta) -> None:
        """Rounds until `stop`."""
        while not stop.is_set():
            try:
                done = self.run_once(50)
                self._purge_if_due(stop)
            except (StoreError, BrokerError) as error:
                if self._home_away.met():
                    log.warning(
                        "prepared messages: their home is away: %s", error, extra={"event": "prepared_home_away"}
                    )
                stop.wait(self._home_away.pause())
                continue
            if self._home_away.over():
                log.info("prepared messages: their home is back", extra={"event": "prepared_home_back"})
            if done.refused and not done.published and self._broker_away.rounds:
                stop.wait(self._broker_away.pause())
            elif done.taken == 0:
                stop.wait(interval.total_seconds())

    # One message ----------------------------------------------------------------------------------------------------

    def _check(self, taken: Taken, *, away: bool) -> str | None:
        """Ask, decide, postpone or park; what became of it, `None` where somebody else was faster.

        Args:
            taken: the message.
            away: somebody who could not be asked in this round is not asked again: each time may take until a timeout.
        """
        if away:
            return self._unasked(taken, "the barrier can't be asked")
        try:
            answer, why = self._ask(taken)
        except StoreError as error:
            if self._barrier_away.met():
                log.warning("prepared messages: the barrier can't be asked: %s", error, extra={"event": "barrier_away"})
            return self._unasked(taken, text_of(error))
        if self._barrier_away.over():
            log.info("prepared messages: the barrier answers again", extra={"event": "barrier_back"})
        if answer.decision is None:
            return self._unknown(taken, why)
        return self._decide(taken, answer.decision)

    def _ask(self, taken: Taken) -> tuple[Answer, str]:
        if self._barrier is not None:
            answer = self._barrier.probe(taken.id)
            return answer, "the local work is in flight"
        checker = self._messages.needed_checker()
        try:
            said: Any = checker(taken)
            return (
                (Answer.UNKNOWN, "the checker said nothing")
                if said is None
                else (Answer(said), "the checker does not know")
            )
        except Exception as error:  # noqa: BLE001 - the user's: whatever it is, it is no answer
            said_instead = described(error)
            log.warning(
                "the checker of prepared message %s raised %s: unknown",
                taken.id,
                said_instead,
                extra={"event": "prepared_check_failed", **about(self._consumer, taken), "error": said_instead},
            )
            return Answer.UNKNOWN, f"the checker raised {said_instead}"

    def _unasked(self, taken: Taken, why: str) -> str:
        """It does not count: else an outage would park what it lasts for."""
        self._home.postpone(taken, why, timedelta(seconds=backoff(self._barrier_away.rounds)), checked=False)
        return "unasked"

    def _unknown(self, taken: Taken, why: str) -> str | None:
        checks = taken.checks + 1
        if checks < self._messages.max_checks:
            self._home.postpone(taken, why, self._messages.check_after, checked=True)
            return "unknown"
        if not self._home.park(taken, f"{counted(checks, 'check')}: {why}"):
            return None
        log.error(
            "prepared message %s is parked after %s checks: %s; `idemp prepared resume` has it checked again",
            taken.id,
            checks,
            why,
            extra={
                "event": "prepared_parked",
                **about(self._consumer, taken),
                "checks": checks,
                "reason": why,
            },
        )
        return "parked"

    def _decide(self, taken: Taken, decision: Decision) -> str | None:
        try:
            to_publish = self._home.decide(taken, decision, self._messages.lease)
        except OppositeDecision as error:
            # The producer decided while the checker was asked: without a barrier the two may disagree.
            log.warning(
                "the checker disagrees: %s",
                error,
                extra={
                    "event": "prepared_opposite",
                    **about(self._consumer, taken),
                    "decision": decision.value,
                },
            )
            return None
        except UnknownPrepared:
            return None  # decided, done and forgotten meanwhile
        log.info(
            "prepared message %s: the checker decided %s",
            taken.id,
            decision.value,
            extra={
                "event": "prepared_decided",
                **about(self._consumer, taken),
                "decision": decision.value,
                "checks": taken.checks,
            },
        )
        if decision is Decision.ROLLBACK:
            self._messages.deciding.settle(taken)
            return "rolled_back"
        if to_publish and not self._is_done(taken):
            return "committed"
        self._home.published(taken)
        return None

    def _is_done(self, taken: Taken) -> bool:
        """Whether a broker brings a copy of what was published before."""
        return self._barrier is not None and not self._home.decides and self._barrier.is_settled(taken.id)

    # All of them ----------------------------------------------------------------------------------------------------

    def _publish(self, committed: Sequence[Taken]) -> int:
        """How many the broker confirmed."""
        if not committed:
            return 0
        answers = self._messages.publishers.publish([each.output for each in committed], self._messages.timeout)
        published = 0
        for taken, refusal in zip(committed, answers, strict=True):
            if refusal is None:
                self._home.published(taken)
                self._messages.deciding.settle(taken)
                published += 1
                continue
            if refusal.kind not in _NO_ANSWER or self._broker_away.met():
                log.warning(
                    "prepared message %s is committed and not confirmed: %s; it is tried again",
                    taken.id,
                    reason_of(refusal),
                    extra={
                        "event": "prepared_unconfirmed",
                        **about(self._consumer, taken),
                        "refusal": refusal.kind,
                    },
                )
            self._home.postpone(taken, reason_of(refusal), timedelta(seconds=backoff(taken.attempts)), checked=False)
        if published or any(refusal is not None and refusal.kind not in _NO_ANSWER for refusal in answers):
            self._broker_away.over()
        return published

    def _purge_if_due(self, stop: threading.Event) -> None:
        now = self._messages.app.clock.monotonic()
        if now < self._purge_at:
            return
        try:
            while self._messages.purge(_PURGED_AT_ONCE) == _PURGED_AT_ONCE and not stop.is_set():
                pass
        except (StoreError, BrokerError) as error:  # no reason to check and publish any later
            log.warning(
                "prepared messages: what is old stays for a minute more: %s",
                error,
                extra={"event": "prepared_not_purged"},
            )
        self._purge_at = now + _PURGE_SECONDS
