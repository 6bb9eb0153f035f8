"""The relay: ships stored outputs that nobody dispatched, so that a crash after COMMIT never strands them."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from idemp.dispatch import reason_of, watch_of, watched_publish
from idemp.errors import StoreError, StoreReplaced, StoreUnavailable
from idemp.health import Health
from idemp.showing import logger
from idemp.telemetry import SILENT, Telemetry

if TYPE_CHECKING:
    import threading
    from collections.abc import Sequence
    from uuid import UUID

    from idemp.broker.port import Publisher, Refusal
    from idemp.inbox.port import PendingOutput, Upkeep

log = logger("idemp.relay")

# Refusals that say something about one output, which trying again does not mend by itself: they count towards its
# quarantine. All others pass: a queue is full until its consumer is back, a broker away until it is started.
_ABOUT_THE_OUTPUT: Final = {"unsendable", "returned"}
# No answer at all. Whatever the broker does answer, if only that a queue is full, proves that it is there.
_NO_ANSWER: Final = {"closed", "blocked", "timeout"}
_ANSWERS: Final = {"nacked", "returned"}
_FIRST_PAUSE: Final = 0.25
_LONGEST_PAUSE: Final = 5.0
_LONGEST_POSTPONEMENT: Final = 60.0
_MOST_DOUBLINGS: Final = 8  # more of them exceed both


@dataclass(frozen=True, slots=True)
class Round:
    """What one round achieved.

    Attributes:
        taken: outputs leased.
        confirmed: outputs that the broker confirmed.
        quarantined: outputs given up after too many refusals, visible in `idemp inbox list --pending`.
    """

    taken: int = 0
    confirmed: int = 0
    quarantined: int = 0


class Outage:
    """What one server's outage has cost so far: the rounds in a row that met it.

    Example:
        >>> outage = Outage()
        >>> outage.met(), outage.met(), outage.over(), outage.over()
        (True, False, True, False)
    """

    def __init__(self) -> None:
        self.rounds = 0

    def met(self) -> bool:
        """A round met it; whether it is the first one, which is told."""
        self.rounds += 1
        return self.rounds == 1

    def over(self) -> bool:
        """The server did something; whether that ended an outage."""
        was, self.rounds = self.rounds > 0, 0
        return was

    def pause(self) -> float:
        """Seconds until the next round, which grow."""
        return _pause(self.rounds)


def away_or_refuses(error: StoreError) -> str:
    """Whether the database can't be reached, or answers and refuses, in words.

    Example:
        >>> away_or_refuses(StoreUnavailable("gone")), away_or_refuses(StoreError("A table is missing."))
        ('the database is away', 'the database refuses')
    """
    return "the database is away" if isinstance(error, StoreUnavailable) else "the database refuses"


class Relay:
    """Takes what is due, sends it, records what was confirmed. Any number of relays may run on one database.

    Args:
        upkeep: the store's half with the leases.
        publisher: publishes with confirms; the relay's own.
        batch: outputs per round.
        lease: how long this relay alone has an output; a dead relay's work is taken over when it ends.
        max_attempts: refusals of one output (no queue takes it, or the broker never will) before it is quarantined.
        telemetry: what looks on.

    Example:
        >>> from idemp.broker.memory import InMemoryBroker
        >>> from idemp.inbox.memory import InMemoryStore
        >>> Relay(InMemoryStore(), InMemoryBroker().publisher()).run_once()
        Round(taken=0, confirmed=0, quarantined=0)
    """

    def __init__(
        self,
        upkeep: Upkeep,
        publisher: Publisher,
        *,
        batch: int = 200,
        lease: timedelta = timedelta(seconds=30),
        max_attempts: int = 10,
        telemetry: Telemetry = SILENT,
    ) -> None:
        self._upkeep = upkeep
        self._publisher = publisher
        self._batch = batch
        self._lease = lease
        self._timeout = lease / 2  # then there is time left to record what was confirmed, before others take it
        self._max_attempts = max_attempts
        self._broker = Outage()
        self._database = Outage()
        self._telemetry = telemetry
        self._watch = watch_of(telemetry, None, publisher)
        self._alive_at = time.monotonic()

    def run_once(self) -> Round:
        """One round.

        Raises:
            StoreError: the database could not do its part; leased outputs come back when their lease ends.
        """
        taken = self._upkeep.take_pending(self._batch, self._lease)
        if self._database.over():
            log.info("relay: the database is back", extra={"event": "relay_back", "server": "database"})
        if not taken:
            return Round()
        # Of what was tried before nobody knows whether it arrived: such a copy says that it may be one.
        outputs = [item.output.marked_redispatched() if item.attempts > 1 else item.output for item in taken]
        answers = watched_publish(self._watch, "relay", self._publisher, outputs, self._timeout)
        confirmed = [item.output.id for item, answer in zip(taken, answers, strict=True) if answer is None]
        refused = [(item, answer) for item, answer in zip(taken, answers, strict=True) if answer is not None]
        self._note_answers(confirmed, [refusal for _, refusal in refused])  # first: the database may go away here
        if confirmed:
            self._upkeep.settle_pending(confirmed, {}, timedelta(0))
        given_up = self._postpone(refused)
        done = Round(len(taken), len(confirmed), given_up)
        self._telemetry.relayed(done)
        return done

    def health(self, timeout: timedelta) -> Health:
        """Return whether `run` has begun a round within `timeout`, and waits for no server; called from other threads."""
        silent = time.monotonic() - self._alive_at
        problems = [f"relay: no sign of life for {silent:.0f} s"] if silent > timeout.total_seconds() else []
        servers = {"database": self._database, "broker": self._broker}
        return Health(problems, [f"relay: the {name} is away" for name, outage in servers.items() if outage.rounds])

    def run(self, stop: threading.Event, interval: timedelta = timedelta(seconds=1)) -> None:
        """Rounds until `stop`: at once while there is work, else when woken or every `interval`.

        After a round that met an outage of the broker or the database it pauses, at most 5 seconds. An output that was
        refused for its own or its queue's sake waits alone.

        Raises:
            StoreReplaced: the database's file was deleted or replaced.
        """
        while not stop.is_set():
            self._alive_at = time.monotonic()
            before = self._broker.rounds
            try:
                done = self.run_once()
            except StoreReplaced:
                raise
            except StoreError as error:
                if self._database.met():
                    log.warning("relay: %s: %s", away_or_refuses(error), error, extra={"event": "relay_store_away"})
                stop.wait(self._database.pause())
                continue
            if self._broker.rounds > before:
                stop.wait(self._broker.pause())
            elif done.taken == 0:
                self._wait(stop, interval)

    def _wait(self, stop: threading.Event, interval: timedelta) -> None:
        try:
            self._upkeep.wait_for_pending(interval.total_seconds())
        except StoreError:
            stop.wait(interval.total_seconds())

    def _postpone(self, refused: Sequence[tuple[PendingOutput, Refusal]]) -> int:
        given_up: dict[UUID, str] = {}
        lost: list[tuple[PendingOutput, Refusal]] = []
        later: dict[tuple[bool, int], dict[UUID, str]] = {}
        for item, refusal in refused:
            reason = reason_of(refusal)
            about_it = refusal.kind in _ABOUT_THE_OUTPUT
            if about_it and item.refusals + 1 >= self._max_attempts:
                given_up[item.output.id] = reason
                lost.append((item, refusal))
            else:
                later.setdefault((about_it, min(item.attempts, _MOST_DOUBLINGS)), {})[item.output.id] = reason
        if given_up:
            self._upkeep.quarantine(given_up)
            for item, refusal in lost:
                log.error(
                    "output %s quarantined: %s; `idemp inbox redispatch %s` sends it again",
                    item.output.id,
                    given_up[item.output.id],
                    item.output.id,
                    extra={
                        "event": "output_quarantined",
                        "message_id": item.output.message.causation_id,
                        "output_id": str(item.output.id),
                        "destination": item.output.routing_key,
                        "refusal": refusal.kind,
                        "attempts": item.attempts,
                        "refusals": item.refusals + 1,
                    },
                )
        for (about_it, attempts), failed in later.items():
            self._upkeep.settle_pending([], failed, timedelta(seconds=backoff(attempts)), refused=about_it)
        return len(given_up)

    def _note_answers(self, confirmed: Sequence[UUID], refusals: Sequence[Refusal]) -> None:
        """One log line per outage of the broker, and one at its end."""
        if confirmed or any(refusal.kind in _ANSWERS for refusal in refusals):
            if self._broker.over():
                log.info("relay: the broker is back", extra={"event": "relay_back", "server": "broker"})
            return
        missing = next((refusal for refusal in refusals if refusal.kind in _NO_ANSWER), None)
        if missing is not None and self._broker.met():
            log.warning(
                "relay: the broker is away: %s",
                reason_of(missing),
                extra={"event": "relay_broker_away", "refusal": missing.kind},
            )


def _pause(rounds: int) -> float:
    """Seconds after the nth round in a row that met an outage: doubling from a quarter up to 5, less some jitter."""
    return min(_LONGEST_PAUSE, _doubled(rounds - 1)) * (0.5 + random.random() / 2)  # noqa: S311 - jitter, not a secret


def backoff(attempt: int) -> float:
    """Seconds for which one output waits: doubling from half a second up to a minute, with jitter.

    Example:
        >>> 0.25 <= backoff(1) <= 0.75
        True
    """
    return min(_LONGEST_POSTPONEMENT, _doubled(attempt)) * (0.5 + random.random())  # noqa: S311 - jitter, not a secret


def _doubled(times: int) -> float:
    return _FIRST_PAUSE * float(2 ** min(times, _MOST_DOUBLINGS))
