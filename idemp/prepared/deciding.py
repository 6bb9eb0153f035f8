"""Decisions about prepared messages: the barrier first, then the home, then the broker."""

from __future__ import annotations

import inspect
import random
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from idemp.dispatch import reason_of
from idemp.errors import AlreadyPassed, BrokerError, PreparedError, StoreError, TransientStoreError, Undecided
from idemp.prepared.port import Answer, Decision, Prepared
from idemp.prepared.refusing import opposite, work_not_done
from idemp.showing import logger, text_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    from idemp.prepared.half import Half
    from idemp.prepared.port import Barrier, Home
    from idemp.prepared.publishing import Publishers

log = logger("idemp.prepared")

_TRIES: Final = 3
_PAUSE_SECONDS: Final = 0.02


def about(consumer: str, prepared: Prepared) -> dict[str, str | None]:
    """Which message a log line is about."""
    return {"consumer": consumer, "message_id": str(prepared.id), "message_type": prepared.message.type}


def _do(work: Callable[[Any], object], session: Any) -> None:
    """A coroutine or a generator would pass for work that is done, and none of it would be."""
    result = work(session)
    if inspect.iscoroutine(result) or inspect.isgenerator(result):
        result.close()
        raise work_not_done(work)


class Deciding:
    """Decides for producers, and settles what is done for the checker, too.

    Args:
        consumer: the app's name.
        home: where the messages wait.
        barrier: tells the fate of local work, where there is one.
        publishers: of the app's broker.
        lease: how long a message is the caller's after its decision.
        timeout: how long a publish waits for its confirm.

    Attributes:
        pause: waits between two tries of local work, seconds.
    """

    def __init__(
        self,
        consumer: str,
        home: Home,
        barrier: Barrier | None,
        publishers: Publishers,
        *,
        lease: timedelta,
        timeout: timedelta,
    ) -> None:
        self._consumer = consumer
        self._home = home
        self._barrier = barrier
        self._publishers = publishers
        self._lease = lease
        self._timeout = timeout
        self.pause: Callable[[float], object] = time.sleep

    def decide(self, prepared: Prepared, decision: Decision) -> bool:
        """See `PreparedMessages.decide`."""
        if self._barrier is not None:
            self._agree(self._barrier, prepared, decision)
        return self.write(prepared, decision)

    def commit_after(self, barrier: Barrier, prepared: Prepared, work: Callable[[Any], object]) -> None:
        """Do the local work behind the barrier, and commit the message if it is committed; see `submit_after`."""
        for tries in range(1, _TRIES + 1):
            passed = worked = False
            try:
                with barrier.begin() as session:
                    barrier.pass_(session, prepared.id)
                    passed = True
                    _do(work, session)
                    worked = True
                break
            except Exception as error:  # noqa: BLE001 - whatever it was: only the barrier knows what became of the work
                if isinstance(error, AlreadyPassed) and not passed:
                    break
                if not isinstance(error, TransientStoreError) or tries == _TRIES:
                    self._after_error(barrier, prepared, error, worked=worked)
                    return
                self.pause(random.uniform(0.5, 1.5) * _PAUSE_SECONDS * tries)  # noqa: S311 - jitter
        self.write(prepared, Decision.COMMIT)

    def settle(self, prepared: Prepared) -> None:
        """Where copies of it may still turn up on a broker: tell the barrier that there is nothing left to do."""
        if self._barrier is not None and not self._home.decides:
            with suppress(StoreError):  # the checker will find it done
                self._barrier.settle([prepared.id])

    def _agree(self, barrier: Barrier, prepared: Prepared, decision: Decision) -> None:
        try:
            answer = barrier.probe(prepared.id)
        except StoreError as error:
            raise Undecided(f"The barrier of message {prepared.id} can't be asked: {error.message}") from error
        if answer is Answer.UNKNOWN:
            raise Undecided(
                f"The local work of message {prepared.id} is in flight still, so it is not decided.",
                fix="Decide after the work's COMMIT, outside of its transaction; else the checker will decide.",
            )
        if answer.decision is not decision:
            raise opposite(prepared.id, decision, committed="yes" if answer is Answer.COMMIT else "no")

    def write(self, prepared: Prepared, decision: Decision) -> bool:
        """Write a decision that the barrier agrees with; publish what is committed."""
        try:
            to_publish = self._home.decide(prepared, decision, self._lease)
        except (StoreError, BrokerError) as error:
            known = "unknown" if self._barrier is None else "yes" if decision is Decision.COMMIT else "no"
            raise Undecided(
                f"The decision {decision.value!r} about message {prepared.id} could not be written: {error.message}",
                committed=known,  # type: ignore[arg-type]
            ) from error
        if decision is Decision.ROLLBACK:
            self.settle(prepared)
            return False
        return self._publish(prepared) if to_publish else True

    def _publish(self, prepared: Prepared) -> bool:
        (refusal,) = self._publishers.publish([prepared.output], self._timeout)
        if refusal is not None:
            log.warning(
                "prepared message %s is committed and not confirmed: %s; the checker publishes it",
                prepared.id,
                reason_of(refusal),
                extra={"event": "prepared_unconfirmed", **about(self._consumer, prepared), "refusal": refusal.kind},
            )
            return False
        try:
            self._home.published(prepared)
        except (StoreError, BrokerError) as error:
            log.warning(
                "that prepared message %s was published could not be noted, so it is published again: %s",
                prepared.id,
                error,
                extra={"event": "prepared_unrecorded", **about(self._consumer, prepared)},
            )
        self.settle(prepared)
        return True

    def _after_error(self, barrier: Barrier, prepared: Prepared, error: Exception, *, worked: bool) -> None:
        """The local work ended with an error, which says nothing certain about its COMMIT: the barrier does."""
        try:
            answer = barrier.probe(prepared.id)
        except StoreError:
            answer = Answer.UNKNOWN
        if answer.decision is None:
            if worked:
                raise Undecided(
                    f"The COMMIT of message {prepared.id}'s local work has no answer: {text_of(error)}",
                    committed="unknown",
                ) from error
            raise error
        if answer is Answer.COMMIT:
            self.write(prepared, Decision.COMMIT)
            if worked:
                log.warning(
                    "the local work of prepared message %s is committed though its COMMIT failed: %s",
                    prepared.id,
                    error,
                    extra={"event": "prepared_commit_found", **about(self._consumer, prepared)},
                )
                return
        else:
            with suppress(PreparedError):  # if it can't be written the checker does so
                self.write(prepared, Decision.ROLLBACK)
        raise error

    def leave(self, half: Half) -> None:
        """Its producer goes without a word: what the barrier says is written, else the checker decides. Never raises."""
        if half.decided or self._barrier is None:
            return
        try:
            answer = self._barrier.probe(half.id)
            if answer.decision is not None:
                self.write(half.prepared, answer.decision)
                return
            why = "its local work is in flight still"
        except (PreparedError, StoreError) as error:
            why = text_of(error)
        log.warning(
            "prepared message %s is left to the checker: %s",
            half.id,
            why,
            extra={"event": "prepared_left", **about(self._consumer, half.prepared)},
        )
