"""What is sent and for how long, all of it derived from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from uuid import UUID

from tests.soak.app import Kind

WARM_SECONDS = 300.0
"""From here on the survivor's memory is judged: the next minute is what the end is held against."""
MINUTE = 60.0
_ALWAYS_OF_THOUSAND = 10
_ONCE_OF_THOUSAND = 20
_TWICE_OF_THOUSAND = 50
_LONG_ENOUGH_MINUTES = 5.0


@dataclass(frozen=True, slots=True)
class Span:
    """From how many seconds to how many."""

    least: float
    most: float

    def drawn(self, dice: random.Random) -> float:
        """One of them."""
        return dice.uniform(self.least, self.most)


@dataclass(frozen=True)
class Plan:
    """A soak.

    Attributes:
        minutes: how long messages are sent and faults happen.
        seed: of all that is random here; when things happen depends on the machine, too.
        rate: messages a second, those that repeat another not counted.
        workers: workers that are killed; one more is not.
        batches: of the workers in turn, how many messages may share a transaction.
    """

    minutes: float
    seed: int
    rate: float = 100.0
    workers: int = 2
    batches: tuple[int, ...] = (1,)

    @property
    def seconds(self) -> float:
        """How long messages are sent."""
        return self.minutes * MINUTE

    @property
    def pause(self) -> Span:
        """Between two faults of one lane: short runs shall have all of them, too."""
        return Span(2.0, 10.0) if self.minutes >= _LONG_ENOUGH_MINUTES else Span(0.2, 0.8)

    @property
    def hold(self) -> Span:
        """How long a fault lasts."""
        return Span(1.5, 8.0) if self.minutes >= _LONG_ENOUGH_MINUTES else Span(1.5, 3.0)

    @property
    def last_quarter(self) -> tuple[float, float]:
        """The seconds at the end that are held against the beginning."""
        return self.seconds * 0.75, self.seconds

    @property
    def baseline(self) -> tuple[float, float] | None:
        """The minute that memory is held against, if it is over before the last quarter begins."""
        minute = (WARM_SECONDS, WARM_SECONDS + MINUTE)
        return minute if minute[1] <= self.last_quarter[0] else None

    def order_id(self, number: int) -> UUID:
        """The key of a message."""
        return UUID(bytes=self._digest(number, "order"), version=4)

    def message_id(self, number: int, copy: int) -> str:
        """The transport's id of a message, or of the copy that a producer sends of it."""
        return str(UUID(bytes=self._digest(number, f"message-{copy}"), version=4))

    def kind(self, number: int) -> Kind:
        """How often its handler fails."""
        drawn = self._drawn(number, "kind")
        if drawn < _ALWAYS_OF_THOUSAND:
            return "always"
        return "once" if drawn < _ALWAYS_OF_THOUSAND + _ONCE_OF_THOUSAND else "fine"

    def is_sent_twice(self, number: int) -> bool:
        """Whether the producer sends it again under another transport's id; never one that is parked."""
        return self._drawn(number, "twice") < _TWICE_OF_THOUSAND and self.kind(number) != "always"

    def dice(self, purpose: str) -> random.Random:
        """Random numbers for one purpose."""
        return random.Random(f"{self.seed}-{purpose}")

    def _drawn(self, number: int, purpose: str) -> int:
        return int.from_bytes(self._digest(number, purpose)[:8]) % 1000

    def _digest(self, number: int, purpose: str) -> bytes:
        return blake2b(f"{number}-{purpose}".encode(), digest_size=16, key=self._key).digest()

    @cached_property
    def _key(self) -> bytes:
        return str(self.seed).encode()
