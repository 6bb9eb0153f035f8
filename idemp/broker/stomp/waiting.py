"""Messages that come later: they wait beside their queue, in the hands of its receivers, which move what is due.

The broker's own scheduler would lose them: what comes due while the store is full is logged and dropped there.
"""

from __future__ import annotations

import time
from collections import deque
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Final

from idemp.broker.stomp.link import Refused, TooLarge
from idemp.broker.stomp.topology import waiting_queues
from idemp.broker.stomp.wire import DUE, destination, forwarded, message_of, whole
from idemp.showing import logger

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from idemp.broker.stomp.client import Frame
    from idemp.broker.stomp.link import Link
    from idemp.clock import Clock

log = logger("idemp")
_AGAIN_SECONDS: Final = 1.0
_PREFETCH: Final = 100
"""How many of each tier a receiver watches: behind so many that come later, one of the same tier may be late."""


def tell_refused(queue: str, message_id: str | None, error: Exception, pause: float) -> None:
    """Say in the log that a copy could not be made: refused by the broker, or nothing that it would take."""
    kind = "nacked" if isinstance(error, Refused) and not isinstance(error, TooLarge) else "unsendable"
    log.warning(
        "message %s of %s could not be moved (%s: %s); nothing is lost, it is tried again",
        message_id,
        queue,
        kind,
        error,
        extra={
            "event": "copy_refused",
            "kind": kind,
            "queues": [queue],
            "message_ids": [message_id],
            "count": 1,
            "pause": pause,
        },
    )


def move(link: Link, frame: Frame, queue: str, headers: Mapping[str, str], body: bytes, deadline: float) -> None:
    """Put a copy into another queue and end the message itself, in one transaction of the broker's.

    Raises:
        StompError: refused, late, or the connection is gone: the message stays where it was, or comes again. The last two
            leave open which of both.
    """
    # Short: a message that the broker's largest frame just held has no room for more.
    name = {"transaction": f"t{link.number()}"}
    link.fire("BEGIN", name)
    # A transaction whose send was refused would commit the ack alone: it must not be sent before the receipt is here.
    placed = {**headers, "destination": destination(queue), "content-length": str(len(body)), **name}
    try:
        link.call("SEND", placed, body, deadline=deadline)
    except BaseException:
        if link.lost is None:
            link.fire("ABORT", name)
        raise
    link.fire("ACK", {"id": frame.headers["ack"], **name})
    link.call("COMMIT", name, deadline=deadline)


class Waiting:
    """What a receiver watches of the messages that wait beside its queues.

    Args:
        link: the receiver's.
        queues: those that it consumes.
        clock: by which messages come due.
    """

    def __init__(self, link: Link, queues: Sequence[str], clock: Clock) -> None:
        self._link = link
        self._clock = clock
        self._arrived: deque[Frame] = deque()
        self._heap: list[tuple[float, int, Frame]] = []
        self._numbers = count()
        self._told = False
        self._queues: dict[str, str] = {}
        for queue in queues:
            for place in waiting_queues(queue):
                headers = {"ack": "client-individual", "activemq.prefetchSize": str(_PREFETCH)}
                self._queues[link.subscribe(destination(place), self._arrived, headers)] = queue

    def arrived(self) -> bool:
        """Whether something came that nobody looked at."""
        return bool(self._arrived)

    def seconds(self) -> float:
        """How long until the next one is due; infinite if there is none."""
        self._look()
        return self._heap[0][0] - self._clock.now().timestamp() if self._heap else float("inf")

    def move_due(self, timeout: float) -> None:
        """Move what is due into its queue; what the broker refuses is tried again a little later.

        Raises:
            StompError: late, or the connection is gone; it comes due again.
        """
        while self.seconds() <= 0:
            _, number, frame = heappop(self._heap)
            queue = self._queues[frame.headers["subscription"]]
            try:
                move(self._link, frame, queue, forwarded(frame.headers), frame.body, time.monotonic() + timeout)
                self._told = False
            except Refused as error:
                # The store is full, say: consuming is what makes space, so it goes on.
                if not self._told:
                    tell_refused(queue, message_of(frame.headers, b"").message_id, error, _AGAIN_SECONDS)
                self._told = True  # once an outage
                heappush(self._heap, (self._clock.now().timestamp() + _AGAIN_SECONDS, number, frame))
                return

    def give_back(self) -> None:
        """Leave what waits to others.

        Raises:
            Lost: the connection is gone, and it is given back all the same.
        """
        subscriptions, self._queues, self._heap = list(self._queues), {}, []
        for subscription in subscriptions:
            self._link.unsubscribe(subscription)

    def _look(self) -> None:
        while self._arrived:
            frame = self._arrived.popleft()
            heappush(self._heap, (_due(frame), next(self._numbers), frame))


def _due(frame: Frame) -> float:
    """Seconds since 1970; at once for a message that says nothing of the kind."""
    return (whole(frame.headers.get(DUE)) or 0) / 1000
