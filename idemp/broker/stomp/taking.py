"""Taking messages out of a queue by hand."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Final, Self

from idemp.broker.stomp.link import StompError
from idemp.broker.stomp.wire import destination, message_of
from idemp.errors import BrokerError, BrokerUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from idemp.broker.stomp.client import Frame
    from idemp.broker.stomp.link import Link
    from idemp.messages import Message

_MOST: Final = 30_000  # a little less than the broker's largest prefetch
_QUIET: Final = 0.2
_LOOKS: Final = 10  # where messages are known to be there


class StompTaken:
    """Messages in our hands; whatever was not accepted goes back at the end of the `with` block, in its order.

    Args:
        link: a connection of its own, closed at the end.
        queue: where from.
        wanted: ids of the messages, `None` for any.
        limit: how many at most.
        expected: how many are there to be had, `None` if the broker does not tell.
        timeout: seconds that the broker has for each answer.

    Attributes:
        messages: those that were wanted.
    """

    def __init__(
        self, link: Link, queue: str, wanted: frozenset[str] | None, limit: int, *, expected: int | None, timeout: float
    ) -> None:
        self._link = link
        self._timeout = timeout
        there = _MOST if expected is None else min(_MOST, expected)
        most = there if wanted is not None else min(limit, there)
        self._told = expected is not None
        found = self._taken(queue, wanted, limit, most) if most > 0 else []
        self._frames = [frame for frame, _ in found]
        self._accepted: set[int] = set()
        self.messages: Sequence[Message] = [message for _, message in found]

    def accept(self, index: int) -> None:
        """Remove one for good: it was published elsewhere, or shall be dropped.

        Raises:
            BrokerError: it was accepted before.
            BrokerUnavailable: the connection is lost; it comes again.
        """
        if index in self._accepted:
            raise BrokerError(f"The message {index} is not in our hands: it was accepted before.")
        self._accepted.add(index)
        try:
            self._link.call(
                "ACK", {"id": self._frames[index].headers["ack"]}, deadline=time.monotonic() + self._timeout
            )
        except StompError as error:
            raise BrokerUnavailable(f"The message goes back to its queue: {error}.", fix="Try again.") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._link.close()

    def _taken(self, queue: str, wanted: frozenset[str] | None, limit: int, most: int) -> list[tuple[Frame, Message]]:
        """Read what is there; what another consumer was given meanwhile does not come."""
        inbox: deque[Frame] = deque()
        headers = {"ack": "client-individual", "activemq.prefetchSize": str(most)}
        self._link.subscribe(destination(queue), inbox, headers)
        found: list[tuple[Frame, Message]] = []
        for _ in range(most):
            frame = self._next(queue, inbox)
            if frame is None:
                break
            message = message_of(frame.headers, frame.body)
            if wanted is None or message.message_id in wanted:
                found.append((frame, message))
            if len(found) == limit or (wanted is not None and len(found) == len(wanted)):
                break
        return found

    def _next(self, queue: str, inbox: deque[Frame]) -> Frame | None:
        """The next message, if one is to be had.

        The broker reads a queue from its store page by page, and looks for the next page when something happens to the
        queue: for one who acks nothing, a look from outside is that.
        """
        for _ in range(_LOOKS if self._told else 2):
            frame = self._link.next(inbox, time.monotonic() + _QUIET)
            if frame is not None:
                return frame
            self._link.browse(destination(queue), 1, time.monotonic() + self._timeout)
        return None
