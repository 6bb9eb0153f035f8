"""What the variants have in common: one way to do the work, connected and ready, and measured in blocks."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.work import Place

if TYPE_CHECKING:
    from sqlalchemy import Engine


class Block(NamedTuple):
    """What one message of a block took, on average.

    Attributes:
        seconds: from the first delivery to the last ack.
        cpu_seconds: of the processes that consume: this one's, with all its threads, or those that it started.
    """

    seconds: float
    cpu_seconds: float


class Variant(ABC):
    """One way to do the work.

    Args:
        place: the queues and the table that are its own; several variants share servers.
    """

    def __init__(self, place: Place) -> None:
        self.place = place

    def run(self, count: int) -> Block:
        """Handle so many messages, which wait in the queue."""
        self.prepare(count)
        return self.measured(count)

    def prepare(self, count: int) -> None:
        """Fill the queue."""
        self.place.send(count)

    def measured(self, count: int) -> Block:
        """Empty the queue."""
        began = time.process_time()
        seconds = self.consume(count)
        return Block(seconds / count, (time.process_time() - began) / count)

    @abstractmethod
    def consume(self, count: int) -> float:
        """Handle so many deliveries; the seconds it took."""

    def keep_alive(self) -> None:  # noqa: B027 - most hold no connection with heartbeats
        """Service connections while others are measured."""

    def conserved(self) -> str:
        """What is wrong with what it left behind; empty if nothing is."""
        return self.place.conserved()

    def close(self) -> None:
        """Close what is open."""
        self.place.close()


def place_of(name: str, engine: Engine, broker_url: str, **options: Any) -> Place:
    """The place of a variant: names of tables and queues have no blanks."""
    plain = "".join(letter if letter.isalnum() else "_" for letter in name.lower())
    return Place(plain, engine, broker_url, **options)
