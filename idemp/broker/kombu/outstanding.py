"""Copies on their way: which deliveries may be acked because theirs is confirmed, and which must be given back."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Final

from idemp.broker.port import Refusal
from idemp.errors import BrokerUnavailable
from idemp.plurals import counted
from idemp.showing import logger

if TYPE_CHECKING:
    from collections.abc import Mapping

    from idemp.broker.kombu.posting import Post
    from idemp.broker.kombu.settling import SendsParcels
    from idemp.broker.kombu.wire import Parcel

log = logger("idemp.settling")

#: So many copies without an answer at once; whoever settles one more waits.
MOST_OUTSTANDING: Final = 1000

_FIRST_PAUSE: Final = 0.5
_LONGEST_PAUSE: Final = 10.0
# A missing queue can be declared, and an idle connection may have been lost without anybody's knowing.
_SENT_AGAIN: Final = frozenset({"returned", "closed"})
_TOLD: Final = 10


class Outstanding:
    """The copies that retried and parked deliveries need, by delivery tag. One thread at a time.

    Args:
        post: sends copies without waiting.
        publisher: sends those again, and waits, that came back or whose connection was lost.
        timeout: seconds that a copy may take.
    """

    def __init__(self, post: Post, publisher: SendsParcels, *, timeout: float) -> None:
        self._post = post
        self._publisher = publisher
        self._timeout = timeout
        self._waiting: dict[int, tuple[Parcel, float]] = {}
        self._failed: dict[int, Parcel] = {}
        self._confirmed: list[int] = []
        self._refused: deque[tuple[float, int]] = deque()
        self._pause = 0.0

    def __len__(self) -> int:
        """How many copies have no answer."""
        return len(self._waiting) + len(self._failed)

    @property
    def tags(self) -> list[int]:
        """The deliveries that have not ended."""
        return [*self._waiting, *self._failed, *self._confirmed, *(tag for _, tag in self._refused)]

    @property
    def idle(self) -> bool:
        """Whether there is nothing to look after."""
        return not (self._waiting or self._failed or self._confirmed or self._refused)

    @property
    def patience(self) -> float:
        """Seconds until somebody has to look again though the broker said nothing."""
        now = time.monotonic()
        moments = [deadline for _, deadline in list(self._waiting.values())[:1]]
        moments += [due for due, _ in list(self._refused)[:1]]
        return max(0.0, min(moments, default=now + self._timeout) - now)

    def send(self, tag: int, copy: Parcel) -> None:
        """Send the copy of a delivery; what became of it shows later."""
        try:
            self._waiting[tag] = (copy, time.monotonic() + self._timeout)
            self._post.send(tag, copy)
        except BrokerUnavailable as error:
            del self._waiting[tag]
            self._refuse({tag: copy}, Refusal("closed", error.message))

    def look(self) -> None:
        """Take the broker's answers, without waiting for more."""
        self._take(self._post.answers())
        oldest = next(iter(self._waiting.values()), None)
        if oldest is not None and oldest[1] <= time.monotonic():
            self._post.give_up()
            self._take(self._post.answers())

    @property
    def must_send_again(self) -> bool:
        """Whether copies came back for want of their queue, or lost their connection."""
        return bool(self._failed)

    def send_again(self, seconds: float) -> None:
        """Send those once more, declare the queues that are missing, and wait for the answers."""
        failed, self._failed = self._failed, {}
        answers = self._publisher.publish_parcels(list(failed.values()), min(seconds, self._timeout))
        for (tag, copy), refusal in zip(failed.items(), answers, strict=True):
            if refusal is None:
                self._confirmed.append(tag)
            else:
                self._refuse({tag: copy}, refusal)

    def take_confirmed(self) -> list[int]:
        """The deliveries whose copies are confirmed: to be acked now, each told once."""
        confirmed, self._confirmed = self._confirmed, []
        if confirmed:
            self._pause = 0.0
        return confirmed

    def take_refused(self) -> list[int]:
        """The deliveries whose copies were refused a while ago: to be given back now, each told once."""
        now = time.monotonic()
        due = []
        while self._refused and self._refused[0][0] <= now:
            due.append(self._refused.popleft()[1])
        return due

    def _take(self, answers: Mapping[int, Refusal | None]) -> None:
        refused: dict[str, tuple[Refusal, dict[int, Parcel]]] = {}
        for tag, refusal in answers.items():
            copy, _ = self._waiting.pop(tag)
            if refusal is None:
                self._confirmed.append(tag)
            elif refusal.kind in _SENT_AGAIN:
                self._failed[tag] = copy
            else:
                refused.setdefault(refusal.kind, (refusal, {}))[1][tag] = copy
        for refusal, copies in refused.values():
            self._refuse(copies, refusal)

    def _refuse(self, copies: Mapping[int, Parcel], refusal: Refusal) -> None:
        """Give these back after a pause, which grows: what refuses one copy refuses the next one, too."""
        self._pause = min(_LONGEST_PAUSE, self._pause * 2 or _FIRST_PAUSE)
        due = time.monotonic() + self._pause
        if self._refused:
            due = max(due, self._refused[-1][0])
        self._refused.extend((due, tag) for tag in copies)
        ids = [copy.content.properties.get("message_id") for copy in copies.values()]
        queues = sorted({copy.routing_key for copy in copies.values()})
        log.warning(
            "no copy of %s to %s (%s: %s); nothing is lost, the broker delivers again",
            counted(len(ids), "message"),
            ", ".join(queues),
            refusal.kind,
            refusal.detail,
            extra={
                "event": "copy_refused",
                "kind": refusal.kind,
                "queues": queues[:_TOLD],
                "message_ids": ids[:_TOLD],
                "count": len(ids),
                "pause": self._pause,
            },
        )
