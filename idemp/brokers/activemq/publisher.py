"""Publishing with a receipt for each message, many in flight.

Transactions of the broker are not used: one that is refused for lack of space keeps that space until a restart.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from idemp.brokers.activemq.link import Link
from idemp.brokers.activemq.receiver import NATIVE, PROPERTIES
from idemp.errors import Unavailable, describe_error
from idemp.messages import Output, Refusal

__all__ = ["ActivemqPublisher"]

LONGEST_HEADER: Final = 10_000  # bytes; the broker would close the connection
LONGEST: Final = 50_000_000  # bytes of a body; the broker would read the rest of one that it refuses as frames
LOSSES: Final = 3  # connections that single messages may cost in a call before that counts as an outage
BLAMES: Final = ("authorized", "destination", "header")
"""Words of errors that are about a message; the others are about the broker, such as that its store is full."""


class ActivemqPublisher:
    """Publishes lists of messages. Connects at first use; any unclear error costs the connection.

    Args:
        connect: Function that opens a link within some seconds.
        route: Function that returns the queues that take an output.

    Example:
        >>> ActivemqPublisher(lambda timeout: None, lambda link, output: []).publish([], 1.0)
        []
    """

    def __init__(self, connect: Callable[[float], Link], route: Callable[[Link, Output], Sequence[str]]) -> None:
        self._connect, self._route = connect, route
        self._link: Link | None = None
        self._number = 0

    def send(self, outputs: Sequence[Output]) -> None:
        """Do nothing: `publish` sends the messages."""

    def publish(self, outputs: Sequence[Output], timeout: float) -> list[Refusal | None]:
        """Send messages, and wait for all receipts."""
        deadline = time.monotonic() + timeout
        answers: dict[int, Refusal | None] = {}
        alone, losses = False, 0
        while left := [place for place in range(len(outputs)) if place not in answers]:
            some = left[:1] if alone else left
            link: Link | None = None
            try:
                link = self._open(deadline)
                self._send(link, {place: outputs[place] for place in some}, answers, deadline)
            except Unavailable as error:
                self._drop()
                lost = link is not None and time.monotonic() < deadline and losses < LOSSES
                refused = left if not lost else some if alone else []  # one by one, so that the others are sent once more at most
                answers |= {place: Refusal(describe_error(error)) for place in refused if place not in answers}
                alone, losses = True, losses + alone
        return [answers[place] for place in range(len(outputs))]

    def _send(self, link: Link, outputs: Mapping[int, Output], answers: dict[int, Refusal | None], deadline: float) -> None:
        """Send messages, and store the answer to each in `answers`."""
        routes = {place: self._route(link, output) for place, output in outputs.items()}
        left: dict[str, int] = {}
        refused: dict[int, Refusal] = {}
        for place, output in outputs.items():
            if refusal := _unsendable(output, routes[place]):
                answers[place] = refusal
            elif not routes[place]:
                answers[place] = None
            for queue in () if refusal else routes[place]:
                self._number += 1
                left[str(self._number)] = place
                link.send("SEND", _headers(output, queue, str(self._number)), output.body)
        while left:
            place = self._take(link, left, refused, deadline)
            if place >= 0 and place not in left.values():
                answers[place] = refused.get(place)

    def close(self) -> None:
        """Close the connection."""
        if self._link is not None:
            self._link.close()
        self._link = None

    def _take(self, link: Link, left: dict[str, int], refused: dict[int, Refusal], deadline: float) -> int:
        """Take a receipt, or an error that names one. Return the place of its message, or -1 if it belongs to none."""
        answer = link.next(max(0.0, deadline - time.monotonic()))
        if answer is None:
            raise Unavailable("ActiveMQ has sent no receipt in time")
        place = left.pop(answer.headers.get("receipt-id", ""), -1)
        if answer.kind == "error" and place >= 0:
            refused[place] = Refusal(answer.text, own=any(word in answer.text.lower() for word in BLAMES))
        return place

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
    text = json.dumps(output.properties)
    if len(output.body) > LONGEST or len(text) + sum(map(text.count, ":\\")) > LONGEST_HEADER:  # STOMP escapes these
        return Refusal(f"its body has more than {LONGEST:,} bytes, or its properties more than {LONGEST_HEADER:,}", own=True)
    if output.mandatory and not queues:
        return Refusal(f"no queue takes {output.routing_key!r}", own=True)
    return None


def _headers(output: Output, queue: str, receipt: str) -> dict[str, Any]:
    """Return the headers of a message: all of its properties as JSON, and those that other consumers look for."""
    properties = output.properties
    headers = {"destination": f"/queue/{queue}", "persistent": "true", "receipt": receipt, PROPERTIES: json.dumps(properties)}
    headers["content-length"] = str(len(output.body))
    known = {"message_id": "message_id", **NATIVE}
    headers |= {name: properties[ours] for name, ours in known.items() if isinstance(properties.get(ours), str)}
    if isinstance(properties.get("reply_to"), str):
        headers["reply-to"] = f"/queue/{properties['reply_to']}"
    return headers
