"""Runs stored effects after their COMMIT: one at a time, each leased before and recorded right after.

A process that dies between an effect and its record leaves it to the next one, which runs it again, under the same id: so
many effects may be done once more by each death as the process ran side by side. Nothing else runs an effect twice: no
redelivery, no relay, no redispatch.
"""

from __future__ import annotations

import inspect
import random
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from idemp.effects.declared import EffectRun
from idemp.errors import EffectLater, EffectRefused, HandlerError, MessageError, StoreError, StoreReplaced
from idemp.forking import call_once
from idemp.messages import parse_json
from idemp.relay import Outage, away_or_refuses
from idemp.showing import described, logger, text_of
from idemp.telemetry import SILENT, EffectResult, Telemetry

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from uuid import UUID

    from idemp.effects.declared import Effect
    from idemp.inbox.port import PendingOutput, Upkeep
    from idemp.messages import Message, Output

log = logger("idemp.effects")

MARGIN: Final = timedelta(seconds=15)
"""By how much a lease outlasts the timeout of what it is for: time to record."""
LONGEST_WAIT: Final = timedelta(days=1)
"""For no longer is an effect put off, whatever the other side asks for."""
_UNKNOWN_PAUSE: Final = timedelta(seconds=60)
_REST_SECONDS: Final = 1.0
"""For so long a former name is left to others after an effect of it that nobody knows here."""
_MOST_OVERDUE: Final = 10
_LONGEST_REASON: Final = 500


@dataclass(frozen=True, slots=True)
class EffectRound:
    """What one round achieved; of at most one effect.

    Attributes:
        taken: effects leased.
        done: those that took place, recorded or about to be.
    """

    taken: int = 0
    done: int = 0


class _Running:
    """One run on a thread of its own, which can be left behind when it takes too long."""

    def __init__(self, effect: Effect, message: Message, run: EffectRun) -> None:
        self.id = run.id
        self.error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, args=(effect, message, run), name=f"idemp-effect-{run.name}", daemon=True
        )
        self._thread.start()

    def ended(self, seconds: float = 0.0) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self, effect: Effect, message: Message, run: EffectRun) -> None:
        try:
            try:
                value = effect.codec.decode(parse_json(message))
            except MessageError as error:
                self.error = error
                return
            _check_ended(effect.name, call_once(effect.function, value, run))
        except BaseException as error:  # noqa: BLE001 - judged by whoever waits for it
            self.error = HandlerError.if_closed(error) if isinstance(error, Exception) else error


class EffectRunner:
    """Takes a consumer's effects, one by one, runs and records them. Any number may run on one database; one a thread.

    Args:
        upkeep: the store's half with the leases.
        consumer: whose effects.
        effects: what is registered, by name.
        former: names that the consumer had before; perhaps nobody else runs what is left under them. It goes first, and then
            all names in turn: one of them may live, and never run out.
        margin: by how much a lease outlasts the longest timeout; a dead process's effect is taken over when it ends.
        telemetry: what looks on.

    Example:
        >>> from idemp import App
        >>> from idemp.inbox.memory import InMemoryStore
        >>> app = App("shop", store=InMemoryStore(), broker="local://shop.db")
        >>> @app.effect("door.open")
        ... def open_door(value: dict[str, int]) -> None:
        ...     print("door", value["number"])
        >>> with app.initiate() as unit:
        ...     _ = unit.effect("door.open", {"number": 7})
        >>> runner = EffectRunner(app.store.upkeep, "shop", app.registry.effects)
        >>> runner.run_once(), runner.run_once()
        door 7
        (EffectRound(taken=1, done=1), EffectRound(taken=0, done=0))
    """

    def __init__(
        self,
        upkeep: Upkeep,
        consumer: str,
        effects: Mapping[str, Effect],
        *,
        former: Sequence[str] = (),
        margin: timedelta = MARGIN,
        telemetry: Telemetry = SILENT,
    ) -> None:
        self._upkeep = upkeep
        self._consumer = consumer
        self._names = [*former, consumer]  # who ran last comes last
        self._rests: dict[str, float] = {}  # former names, and till when they are left to others
        self._effects = effects
        self._lease = max((effect.timeout for effect in effects.values()), default=timedelta(0)) + margin
        self._telemetry = telemetry
        self._database = Outage()
        self._unrecorded: list[UUID] = []  # done, while the database is away
        self._overdue: dict[UUID, _Running] = {}  # left behind by their timeout, and still running
        self._unknown: set[str] = set()  # one line in the log for each
        self._told_held_up = False

    @property
    def held_up(self) -> bool:
        """Whether so many runs went on past their timeouts that no other begins; each holds a thread, at least."""
        return len(self._overdue) >= _MOST_OVERDUE

    def run_once(self) -> EffectRound:
        """Run the effect that is due first, if there is one, and record what became of it.

        Raises:
            StoreError: the database could not do its part; what was done is recorded by the next round, if this process
                lives to see it.
        """
        self._record_done()
        if self.held_up:
            self._tell_held_up()
            return EffectRound()
        self._told_held_up = False
        for consumer in self._names:
            if time.monotonic() < self._rests.get(consumer, 0.0):
                continue
            taken = self._upkeep.take_effects(consumer, 1, self._lease)
            if self._database.over():
                log.info("effects: the database is back", extra={"event": "effects_store_back"})
            for item in taken:
                self._names.remove(consumer)
                self._names.append(consumer)
                return EffectRound(1, int(self._handled(item, consumer)))
        return EffectRound()

    def run(self, stop: threading.Event, interval: timedelta = timedelta(seconds=1)) -> None:
        """Rounds until `stop`: at once while there is work, else when woken or every `interval`. A run is not cut short."""
        while not stop.is_set():
            try:
                if self.run_once().taken == 0:
                    self._wait(stop, interval)
            except StoreReplaced:
                raise
            except StoreError as error:
                if self._database.met():
                    log.warning("effects: %s: %s", away_or_refuses(error), error, extra={"event": "effects_store_away"})
                stop.wait(self._database.pause())

    def _wait(self, stop: threading.Event, interval: timedelta) -> None:
        if self.held_up:
            stop.wait(interval.total_seconds())
        else:
            self._upkeep.wait_for_effects(interval.total_seconds())

    # One effect -----------------------------------------------------------------------------------------------------

    def _handled(self, item: PendingOutput, consumer: str) -> bool:
        output, name = item.output, item.output.routing_key
        effect = self._effects.get(name)
        if effect is None:
            self._tell_unknown(output)
            why = f"no effect is registered as {name!r} where it was to be run"
            # At a moment that is chance: who polls steadily would meet it again, before those that know it.
            pause = _UNKNOWN_PAUSE * random.uniform(0.1, 1)  # noqa: S311 - not a secret
            if consumer != self._consumer:
                # The former one lives on, perhaps, with effects of its own, which don't wait for this look.
                pause = timedelta(0)
                self._rests[consumer] = time.monotonic() + _REST_SECONDS
            self._upkeep.return_effects({output.id: why}, pause)
            return False
        if output.id in self._overdue:  # a slow end is better than a second one beside it
            self._upkeep.return_effects({output.id: "an earlier run has not ended"}, effect.timeout)
            return False
        died = item.attempts - 1 > item.refusals  # somebody did who ran it: it ends its process, perhaps
        if died and item.attempts > effect.max_attempts:  # else somebody released it, who wants it to be run
            self._failed(effect, item, RuntimeError("each process that ran it died, or lost its database"), 0.0)
            return False
        started = time.monotonic()
        error = self._run(effect, item, consumer)
        seconds = time.monotonic() - started
        if error is None:
            log.debug("effect %s %s done in %.3f s", name, output.id, seconds)
            self._telemetry.effect(name, "done", seconds)
            self._unrecorded.append(output.id)
            self._record_done()
            return True
        self._failed(effect, item, error, seconds)
        return False

    def _run(self, effect: Effect, item: PendingOutput, consumer: str) -> BaseException | None:
        """Why it did not take place; `None` if it did."""
        message = item.output.message
        run = EffectRun(
            id=item.output.id,
            name=effect.name,
            attempt=item.attempts,
            timeout=effect.timeout,
            consumer=consumer,
            correlation_id=message.correlation_id,
            causation_id=message.causation_id,
        )
        running = _Running(effect, message, run)
        if not running.ended(effect.timeout.total_seconds()):
            self._overdue[item.output.id] = running
            return TimeoutError(f"no end within {effect.timeout.total_seconds():g} s; left to run on")
        return running.error

    def _failed(self, effect: Effect, item: PendingOutput, error: BaseException, seconds: float) -> None:
        output, reason = item.output, reason_of(error)
        last = item.attempts >= effect.max_attempts
        result: EffectResult = "refused" if isinstance(error, EffectRefused | MessageError) else "failed"
        self._telemetry.effect(effect.name, result, seconds)
        if result == "refused" or last:
            self._upkeep.quarantine({output.id: reason})
            log.error(
                "effect %s %s quarantined: %s; `idemp inbox redispatch %s` runs it again",
                effect.name,
                output.id,
                reason,
                output.id,
                extra={
                    "event": "effect_quarantined",
                    "message_id": output.message.causation_id,
                    "output_id": str(output.id),
                    "effect": effect.name,
                    "attempt": item.attempts,
                    "reason": reason,
                },
            )
            return
        delay = _delay(effect, item.attempts, error)
        self._upkeep.settle_pending([], {output.id: reason}, delay, refused=True)
        log.warning(
            "effect %s %s failed, attempt %d of %d, again in %.1f s: %s",
            effect.name,
            output.id,
            item.attempts,
            effect.max_attempts,
            delay.total_seconds(),
            reason,
            extra={
                "event": "effect_failed",
                "message_id": output.message.causation_id,
                "output_id": str(output.id),
                "effect": effect.name,
                "attempt": item.attempts,
                "reason": reason,
                "delay": delay.total_seconds(),
            },
        )

    def _record_done(self) -> None:
        """Effects that took place, those that did so later than they had time for included."""
        ended = [running for running in self._overdue.values() if running.ended()]
        for running in ended:
            del self._overdue[running.id]
            if running.error is None:
                self._unrecorded.append(running.id)
        if self._unrecorded:
            self._upkeep.settle_pending(self._unrecorded, {}, timedelta(0))
            self._unrecorded = []

    def _tell_held_up(self) -> None:
        if not self._told_held_up:
            self._told_held_up = True
            log.error(
                "effects of %s: %d runs went on past their timeouts; no other begins here until one of them ends, or this "
                "process does: restart it",
                self._consumer,
                len(self._overdue),
                extra={"event": "effects_held_up", "consumer": self._consumer},
            )

    def _tell_unknown(self, output: Output) -> None:
        name = output.routing_key
        if name not in self._unknown:
            self._unknown.add(name)
            log.error(
                "effect %s %s can't be run: nothing is registered under this name; it stays pending",
                name,
                output.id,
                extra={
                    "event": "effect_unknown",
                    "message_id": output.message.causation_id,
                    "output_id": str(output.id),
                    "effect": name,
                },
            )


def _check_ended(name: str, result: object) -> None:
    """A coroutine or a generator, of a wrapped function perhaps, would pass for what is done, and none of it would be."""
    if inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result):
        if inspect.iscoroutine(result) or inspect.isgenerator(result):
            result.close()
        raise TypeError(
            f"the effect {name!r} answered a {type(result).__name__}: nothing was done; use a plain function"
        )


def reason_of(error: BaseException) -> str:
    """Why an effect did not take place, for people.

    Example:
        >>> reason_of(EffectRefused("550 no such mailbox")), reason_of(KeyError("to"))
        ('550 no such mailbox', "KeyError: 'to'")
    """
    told = text_of(error.message) if isinstance(error, EffectRefused | EffectLater) else described(error)
    return told if len(told) <= _LONGEST_REASON else f"{told[:_LONGEST_REASON]}…"


def _delay(effect: Effect, attempt: int, error: BaseException) -> timedelta:
    """As the other side asks for; else by the effect's own policy, with jitter."""
    asked = error.after if isinstance(error, EffectLater) else None
    if asked is not None:
        return min(max(asked, timedelta(0)), LONGEST_WAIT)
    return effect.pause(attempt) * (0.75 + random.random() / 2)  # noqa: S311 - jitter, not a secret
