"""Publishing with a receipt for each message, many in flight.

They are not sent in a transaction of the broker's: one that is refused for want of space keeps that space until a restart.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from idemp.brokers.activemq.link import Link
from idemp.brokers.activemq.receiver import NATIVE, PROPERTIES
from idemp.errors import Unavailable, describe_error
from idemp.messages import Output, Refusal

__all__ = ["ActivemqPublisher"]

LONGEST_HEADER: Final = 10_000  # bytes; the broker would close the connection
LONGEST: Final = 50_000_000  # bytes of a body; the broker would read the rest of one that it refuses as frames
BLAMES: Final = ("authorized", "destination", "header")
"""Words of errors that are about a message; the others are about the broker, such as that its store is full."""


class ActivemqPublisher:
    """Publishes lists of messages. Connects at first use; any doubt costs the connection.

    Args:
        connect: Returns a new link that was opened within some seconds.
        route: Returns the queues that take an output.

    Example:
        >>> ActivemqPublisher(lambda timeout: None, lambda link, output: []).publish([], 1.0)
        []
    """

    def __init__(self, connect: Callable[[float], Link], route: Callable[[Link, Output], Sequence[str]]) -> None:
        self._connect, self._route = connect, route
        self._link: Link | None = None
        self._number = 0

    def send(self, outputs: Sequence[Output]) -> None:
        """Leave it to `publish`."""

    def publish(self, outputs: Sequence[Output], timeout: float) -> list[Refusal | None]:
        """Send messages, and wait for all receipts."""
        deadline = time.monotonic() + timeout
        answers: dict[int, Refusal] = {}
        unsent, left = set(range(len(outputs))), dict[str, int]()
        if not outputs:
            return []
        try:
            link = self._open(deadline)
            routes = [self._route(link, output) for output in outputs]
            for place, (output, queues) in enumerate(zip(outputs, routes, strict=True)):
                if refusal := _unsendable(output, queues):
                    answers[place] = refusal
                for queue in () if refusal else queues:
                    self._number += 1
                    left[str(self._number)] = place
                    link.send("SEND", _headers(output, queue, str(self._number)), output.body)
                unsent.discard(place)
            while left:
                self._take(link, left, answers, deadline)
        except Unavailable as error:
            self._drop()
            for place in (*left.values(), *unsent):
                answers.setdefault(place, Refusal(describe_error(error)))
        return [answers.get(place) for place in range(len(outputs))]

    def close(self) -> None:
        """Close the connection."""
        if self._link is not None:
            self._link.close()
        self._link = None

    def _take(self, link: Link, left: dict[str, int], answers: dict[int, Refusal], deadline: float) -> None:
        """Take a receipt, or an error that names one."""
        found = link.next(max(0.0, deadline - time.monotonic()))
        if found is None:
            raise Unavailable("ActiveMQ has sent no receipt in time")
        place = left.pop(found.headers.get("receipt-id", ""), None)
        if found.kind == "error" and place is not None:
            answers[place] = Refusal(found.text, own=any(word in found.text.lower() for word in BLAMES))

    def _open(self, deadline: float) -> Link:
        if self._link is None or not self._link.alive:
            self._drop()
            self._link = self._connect(max(0.1, min(5.0, deadline - time.monotonic())))
        return self._link

    def _drop(self) -> None:
        if self._link is not None:
            self._link.drop()
        self._link = None


def _unsendable(output: Output, queues: Sequence[str]) -> Refusal | None:
    if len(output.body) > LONGEST or len(json.dumps(output.properties)) > LONGEST_HEADER:
        return Refusal(f"its body has more than {LONGEST:,} bytes, or its properties more than {LONGEST_HEADER:,}", own=True)
    if output.mandatory and not queues:
        return Refusal(f"no queue takes {output.routing_key!r}", own=True)
    return None


def _headers(output: Output, queue: str, receipt: str) -> dict[str, Any]:
    """Return the headers of a message: all of its properties as JSON, and those that other consumers look for."""
    said = output.properties
    headers = {"destination": f"/queue/{queue}", "persistent": "true", "receipt": receipt, PROPERTIES: json.dumps(said)}
    headers["content-length"] = str(len(output.body))
    known = {"message_id": "message_id", **NATIVE}
    headers |= {name: said[ours] for name, ours in known.items() if isinstance(said.get(ours), str)}
    if isinstance(said.get("reply_to"), str):
        headers["reply-to"] = f"/queue/{said['reply_to']}"
    return headers
