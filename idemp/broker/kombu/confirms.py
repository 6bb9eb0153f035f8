"""Which publishes on one channel are still without an answer, and what the broker answered."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from idemp.broker.port import Refusal

if TYPE_CHECKING:
    from collections.abc import Callable

    from idemp.broker.kombu.link import Link
    from idemp.broker.kombu.wire import Parcel


Key = TypeVar("Key")

_SHORTEST_USE: Final = 1.0  # seconds for which a channel is used, nacked or not: a full queue nacks the next one, too
_PATIENCE: Final = 0.5  # seconds for the answers of all that is under way on it


class Confirms(Generic[Key]):
    """Delivery tags counted on our side: the broker numbers publishes from 1, in order.

    Args:
        answered: called with the publish's own key and `None` (confirmed) or the refusal.

    Example:
        >>> from idemp.broker.kombu.wire import parcel
        >>> answers = {}
        >>> confirms = Confirms(answers.__setitem__)
        >>> for index in range(3):
        ...     confirms.sent(index, parcel("", "orders", b"", {"message_id": str(index)}, mandatory=True))
        >>> confirms.on_ack(2, multiple=True)
        >>> answers, confirms.waiting
        ({0: None, 1: None}, [2])
    """

    def __init__(self, answered: Callable[[Key, Refusal | None], None]) -> None:
        self._answered = answered
        self._nacked = False
        self._replaceable_at = 0.0
        self._last_tag = 0
        self._pending: dict[int, tuple[Key, Parcel]] = {}
        self._returned: dict[int, str] = {}

    def listen(self, channel: Any) -> None:
        """Take what this channel hears; it must be in confirm mode and have published nothing."""
        self._replaceable_at = time.monotonic() + _SHORTEST_USE
        channel.events["basic_ack"].add(self.on_ack)
        channel.events["basic_nack"].add(self.on_nack)
        channel.events["basic_return"].add(self.on_return)

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def should_move(self) -> bool:
        """Whether what is published next should go over another channel, because this one was nacked.

        After a full quorum queue nacked a channel, RabbitMQ goes on nacking that channel when the policy with the limit is
        gone, even if the queue is empty by then (3.10.8). A new channel is confirmed.
        """
        return self._nacked and time.monotonic() >= self._replaceable_at

    def moved(self, link: Link, seconds: float) -> Confirms[Key]:
        """Return the confirms of a new channel of this link; these, if there are answers that don't come in time.

        Args:
            link: whose channel this is.
            seconds: how long each step may take at most.

        Raises:
            Exception: one of `LINK_ERRORS`: the connection is lost.
        """
        deadline = time.monotonic() + min(seconds, _PATIENCE)
        while self._pending and (left := deadline - time.monotonic()) > 0:
            link.wait_readable(left)
            link.read_pending()
        if self._pending or link.blocked:
            self._replaceable_at = time.monotonic() + _SHORTEST_USE
            return self
        with link.limited_to(seconds):
            link.replace_channel()
            link.channel.confirm_select()
        confirms = Confirms[Key](self._answered)
        confirms.listen(link.channel)
        return confirms

    @property
    def waiting(self) -> list[Key]:
        """The keys of the publishes without an answer, in order."""
        return [key for key, _ in self._pending.values()]

    def sent(self, key: Key, parcel: Parcel) -> None:
        """One more was published, under the caller's key for it."""
        self._last_tag += 1
        self._pending[self._last_tag] = (key, parcel)

    def on_return(self, error: Any, exchange: str, routing_key: str, message: Any) -> None:
        """No queue took it. The broker says so before it confirms, and in the order of the publishes."""
        address = (exchange, routing_key, message.properties.get("message_id"))
        for tag, (_, parcel) in self._pending.items():
            if tag not in self._returned and parcel.mandatory and parcel.address == address:
                self._returned[tag] = str(error.reply_text or "")
                return

    def on_ack(self, tag: int, multiple: bool) -> None:
        """The broker has taken responsibility, or has returned it before."""
        for each in self._meant(tag, multiple=multiple):
            key, parcel = self._pending.pop(each)
            reason = self._returned.pop(each, None)
            where = f"exchange {parcel.exchange!r}, routing key {parcel.routing_key!r}"
            self._answered(key, None if reason is None else Refusal("returned", f"{reason}: {where}"))

    def on_nack(self, tag: int, multiple: bool) -> None:
        """The broker could not, or would not, keep it."""
        self._nacked = True
        for each in self._meant(tag, multiple=multiple):
            key, parcel = self._pending.pop(each)
            self._returned.pop(each, None)
            where = parcel.routing_key if not parcel.exchange else f"{parcel.exchange}/{parcel.routing_key}"
            self._answered(key, Refusal("nacked", f"the broker refused it, {where} may be full"))

    def _meant(self, tag: int, *, multiple: bool) -> list[int]:
        if not multiple:
            return [tag] if tag in self._pending else []
        meant = []
        for each in self._pending:
            if each > tag > 0:
                break
            meant.append(each)
        return meant
