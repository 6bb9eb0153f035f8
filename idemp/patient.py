"""Publishing for callers that must not wait: a broker that has kept one of them waiting is left alone for a while."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from idemp.messages import Output, Refusal
from idemp.ports import Publisher

__all__ = ["PatientPublisher"]

WAITED: Final = 1.0  # seconds; a broker that refuses faster keeps nobody waiting
REST: Final = 30.0  # seconds


class PatientPublisher:
    """A publisher in the process of a producer, whose outputs are stored: a relay sends what it refuses.

    Args:
        publisher: Sends the messages.

    Example:
        >>> from idemp.testing.memory import MemoryBroker
        >>> PatientPublisher(MemoryBroker().publisher()).publish([], 1.0)
        []
    """

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher
        self._resting_until = float("-inf")

    @property
    def resting(self) -> bool:
        """Whether the broker is left alone."""
        return time.monotonic() < self._resting_until

    def send(self, outputs: Sequence[Output]) -> None:
        """Begin to send, unless the broker is left alone."""
        if not self.resting:
            self._publisher.send(outputs)

    def publish(self, outputs: Sequence[Output], timeout: float) -> Sequence[Refusal | None]:
        """Send messages; if the broker takes some seconds to refuse them, the next ones are refused without asking it."""
        start = time.monotonic()
        if start < self._resting_until:
            left = self._resting_until - start
            return [Refusal(f"the broker has just let a time-out pass: it is asked again in {left:.0f} s")] * len(outputs)
        try:
            answers = self._publisher.publish(outputs, timeout)
        except Exception:
            self._rest(start)
            raise
        if any(answer is not None and not answer.own for answer in answers):
            self._rest(start)
        return answers

    def close(self) -> None:
        """Give up the connection."""
        self._publisher.close()

    def _rest(self, start: float) -> None:
        now = time.monotonic()
        if now - start >= WAITED:
            self._resting_until = now + REST
