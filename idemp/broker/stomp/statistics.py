"""What the broker's statistics plugin says about a queue: STOMP itself can't ask."""

from __future__ import annotations

import json
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from idemp.broker.stomp.link import Late, Lost, StompError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from idemp.broker.stomp.client import Frame
    from idemp.broker.stomp.link import Link

_PREFIX: Final = "/queue/ActiveMQ.Statistics."
_END: Final = "ActiveMQ.Statistics.Destination.List.End.With.Null"  # an empty answer after the last, or alone
_PATIENCE: Final = 3.0
_SILENCE: Final = 30.0
"""Seconds for which a broker that did not answer is not asked again."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """A queue's own.

    Attributes:
        size: messages in it.
        held: those of them that are in consumers' hands.
    """

    size: int
    held: int

    @property
    def ready(self) -> int:
        """Those that nobody has."""
        return max(0, self.size - self.held)


class NoStatistics(Exception):
    """The broker has no statistics plugin, or not the library with which it would answer over STOMP."""


class Statistics:
    """Asks, each time on a connection of its own: a broker that can't put an answer into words cuts the connection.

    Args:
        opens: opens a connection within so many seconds.
    """

    def __init__(self, opens: Callable[[float | None], Link]) -> None:
        self._opens = opens
        self._silent_until = float("-inf")

    def of(self, queue: str, deadline: float = float("inf")) -> Numbers | None:
        """The numbers of a queue, `None` if the broker has none of that name.

        Raises:
            NoStatistics: the broker does not tell.
            Late: the deadline came first.
            BrokerUnavailable: it can't be reached.
            ConfigurationError: it refuses the user.
        """
        values = self._asked(f"{_PREFIX}Destination.{queue}{_END}", deadline)
        return Numbers(size=int(values["size"]), held=int(values.get("inflightCount", 0))) if "size" in values else None

    def of_broker(self) -> Mapping[str, Any]:
        """What the broker says about itself, by its names, such as `storePercentUsage`.

        Raises:
            NoStatistics, BrokerUnavailable, ConfigurationError: as of `of`.
        """
        return self._asked(f"{_PREFIX}Broker")

    def _asked(self, question: str, deadline: float = float("inf"), *, again: bool = True) -> Mapping[str, Any]:
        now = time.monotonic()
        if now < self._silent_until:
            raise NoStatistics
        hurried = deadline < now + _PATIENCE
        with self._opens(max(0.05, deadline - now) if hurried else None) as link:
            try:
                return _first_answer(link, question, min(deadline, time.monotonic() + _PATIENCE))
            except StompError as error:
                if isinstance(error, Late) and hurried:
                    raise
                if not again or not isinstance(error, Lost):
                    # It may be given the plugin.
                    self._silent_until = time.monotonic() + _SILENCE
                    raise NoStatistics(str(error)) from error
        # It may have been restarted in between.
        return self._asked(question, deadline, again=False)


def _first_answer(link: Link, question: str, deadline: float) -> Mapping[str, Any]:
    inbox: deque[Frame] = deque()
    answers = f"/temp-queue/idemp-{uuid4().hex}"
    link.subscribe(answers, inbox, {"ack": "auto", "transformation": "jms-map-json"})
    # Where nobody answers, the question must not stay.
    expires = str(round(1000 * (time.time() + _PATIENCE)))
    link.call("SEND", {"destination": question, "reply-to": answers, "expires": expires}, deadline=deadline)
    frame = link.next(inbox, deadline)
    if frame is None:
        raise Late("no answer came in time")
    return _values(frame)


def _values(frame: Frame) -> Mapping[str, Any]:
    """The entries of a JMS map as XStream writes it: of texts a pair, of numbers the name and the value by its type."""
    try:
        entries = json.loads(frame.body)["map"]["entry"]
    except (ValueError, KeyError, TypeError):
        return {}
    values: dict[str, Any] = {}
    for entry in entries if isinstance(entries, list) else [entries]:
        name = entry.pop("string", None)
        if isinstance(name, str) and len(entry) == 1:
            (values[name],) = entry.values()
    return values
