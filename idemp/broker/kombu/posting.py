"""Publishing without waiting: what is sent now is answered later, and whoever sent it comes back for the answers."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from idemp.broker.kombu.confirms import Confirms
from idemp.broker.kombu.link import LINK_ERRORS, Link, said
from idemp.broker.port import Refusal
from idemp.broker.urls import shown
from idemp.errors import BrokerUnavailable

if TYPE_CHECKING:
    from idemp.broker.kombu.wire import Parcel


class Post:
    """Sends messages on a connection of its own, which is opened when it is needed. The caller takes care of turns.

    Args:
        url: where RabbitMQ is.
        connect_timeout: seconds for connecting.
        heartbeat: seconds; a connection that is silent for two of them is dead.
        write_timeout: seconds that the broker may take to read a message.

    Example:
        >>> post = Post("pyamqp://guest:secret@broker/shop")
        >>> post, len(post), post.answers()
        (Post('pyamqp://***@broker/shop'), 0, {})
    """

    def __init__(
        self, url: str, *, connect_timeout: float = 5.0, heartbeat: float = 30, write_timeout: float = 10.0
    ) -> None:
        self._url = url
        self._connect_timeout = connect_timeout
        self._heartbeat = heartbeat
        self._write_timeout = write_timeout
        self._link: Link | None = None
        self._answers: dict[int, Refusal | None] = {}
        self._confirms = Confirms[int](self._answers.__setitem__)

    def __len__(self) -> int:
        return len(self._confirms)

    def fileno(self) -> int | None:
        """The number of the socket at which answers arrive, if there is a connection."""
        link = self._link
        with suppress(*LINK_ERRORS):
            return None if link is None else link.fileno()
        return None

    def send(self, key: int, parcel: Parcel) -> None:
        """Send one. A lost connection is an answer like others: "closed" for all that have none yet.

        Args:
            key: under what number the answer is told; no other message that has no answer yet may have it.
            parcel: the message.

        Raises:
            BrokerUnavailable: no connection; nothing was sent.
        """
        link = self._open()
        try:
            with link.limited_to(self._write_timeout):
                self._confirms.sent(key, parcel)
                link.publish([parcel])
        except LINK_ERRORS as error:
            self._lose(Refusal("closed", said(error)))

    def answers(self) -> dict[int, Refusal | None]:
        """What the broker has said since the last call, without waiting: `None` for a confirm, else why there is none."""
        if self._link is not None:
            try:
                self._link.read_pending()
            except LINK_ERRORS as error:
                self._lose(Refusal("closed", said(error)))
        told = dict(self._answers)
        self._answers.clear()
        return told

    def give_up(self) -> None:
        """Wait no longer: what has no answer is refused, and this connection is never used again."""
        if self._link is not None and self._link.blocked:
            self._lose(Refusal("blocked", "the broker takes no messages for now (memory or disk alarm)"))
        else:
            self._lose(Refusal("timeout", "no confirm in time"))

    def keep_alive(self) -> None:
        """Read what came, and send a heartbeat if it is time; never blocks for long, never raises."""
        if self._link is not None:
            try:
                self._link.read_pending()
                with self._link.limited_to(1.0):
                    self._link.beat()
            except LINK_ERRORS as error:
                self._lose(Refusal("closed", said(error)))

    def close(self) -> None:
        """Close the connection; never blocks on a dead link."""
        if self._link is not None:
            self._link.close()
            self._lose(Refusal("closed", "the connection was closed"))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({shown(self._url)!r})"

    def _open(self) -> Link:
        if self._link is not None and self._confirms.should_move:
            try:
                self._confirms = self._confirms.moved(self._link, self._write_timeout)
            except LINK_ERRORS as error:
                self._lose(Refusal("closed", said(error)))
        if self._link is not None:
            return self._link
        link = Link.open(
            self._url,
            connect_timeout=self._connect_timeout,
            heartbeat=self._heartbeat,
            operation_timeout=self._connect_timeout,
        )
        try:
            link.channel.confirm_select()
        except LINK_ERRORS as error:
            link.discard()
            raise BrokerUnavailable(f"{shown(self._url)} confirms nothing: {said(error)}.", fix="Try again.") from error
        self._confirms = Confirms[int](self._answers.__setitem__)
        self._confirms.listen(link.channel)
        self._link = link
        return link

    def _lose(self, refusal: Refusal) -> None:
        self._answers.update(dict.fromkeys(self._confirms.waiting, refusal))
        self._confirms = Confirms[int](self._answers.__setitem__)
        link, self._link = self._link, None
        if link is not None:
            link.discard()
