"""What surrounds the processes of one world: a clock that the schedule moves, and a broker that shows what it has."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

from idemp.broker.memory import InMemoryBroker
from idemp.testing.simulation.inboxes import QUEUE

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from idemp.messages import Message
    from idemp.testing.simulation.stage import Actor

START: Final = datetime(2026, 1, 1, tzinfo=UTC)
"""When all worlds begin."""


class SimulatedClock:
    """Moves when the schedule says so."""

    def __init__(self) -> None:
        self.time = START

    def now(self) -> datetime:
        """The time."""
        return self.time

    def monotonic(self) -> float:
        """Seconds since the start."""
        return (self.time - START).total_seconds()

    def advance(self, by: timedelta) -> None:
        """Move it."""
        self.time += by


class WorkersClock:
    """What a worker's dispatcher has: each call takes a second, so that marks are due once the delivery is settled."""

    def __init__(self, clock: SimulatedClock, actor: Actor) -> None:
        self.now = clock.now
        self._actor = actor

    def monotonic(self) -> float:
        """Seconds: as many as calls."""
        return float(self._actor.calls)


class Told(threading.Event):
    """A signal to stop that the schedule gives; whoever waits for it waits no time."""

    def wait(self, timeout: float | None = None) -> bool:
        """Not even for a moment."""
        del timeout
        return self.is_set()


class Rounds(Told):
    """The signal to stop of something that goes round, which comes when there is no further round.

    Args:
        goes_on: begins another round; whether there is one.
    """

    def __init__(self, goes_on: Callable[[], bool]) -> None:
        super().__init__()
        self._goes_on = goes_on

    def is_set(self) -> bool:
        """Whether there is no further round."""
        return not self._goes_on()


class PicturedBroker(InMemoryBroker):
    """An `InMemoryBroker` that shows what it has."""

    def entries(self, queue: str) -> int:
        """How many messages are ready, delayed or in somebody's hands."""
        found = self._store.queues[queue]
        return len(found.ready) + len(found.delayed) + found.unsettled

    def waits(self) -> bool:
        """Whether a message is ready."""
        return bool(self._store.awake(QUEUE).ready)

    def picture(self) -> Hashable:
        """All that its later answers depend on."""
        found = self._store.awake(QUEUE)
        return (
            frozenset((number, entry.deliveries > 0, _counted(entry.message)) for number, entry in found.ready),
            frozenset((due, number, _counted(entry.message)) for due, number, entry in found.delayed),
            found.unsettled,
            frozenset(
                (number, entry.message.message_id) for number, entry in self._store.queues[f"{QUEUE}.dead"].ready
            ),
        )


def _counted(message: Message) -> Hashable:
    return message.message_id, message.headers.get("idemp-attempt"), message.headers.get("idemp-deferred")
