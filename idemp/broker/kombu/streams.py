"""Stream queues of RabbitMQ, read by offset: nothing is taken out of them, and any part can be read again.

A message of a stream has an offset for ever, and what RabbitMQ keeps for itself (a consumer's stored offset) has one, too:
so offsets grow, and not always by one.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, Final

from amqp.exceptions import AccessRefused, AMQPNotImplementedError, NotFound, PreconditionFailed, ResourceLocked

from idemp.broker.kombu.link import LINK_ERRORS, Link, said
from idemp.broker.kombu.settling import arrived_by_amqp
from idemp.broker.kombu.wire import message_of
from idemp.broker.urls import shown
from idemp.errors import BrokerUnavailable, ConfigurationError, OffsetsLost

if TYPE_CHECKING:
    from collections.abc import Iterator

    from idemp.messages import Message

OFFSET_HEADER: Final = "x-stream-offset"

_REFUSALS: Final = (AccessRefused, AMQPNotImplementedError, NotFound, PreconditionFailed, ResourceLocked)
_SILENCE: Final = 0.5  # seconds without a message after which an empty stream is asked whether it is
_CATCHING_UP: Final = 5.0  # seconds; far more than the last chunk of a stream takes, however many come after it
_TAIL_PREFETCH: Final = 256


class StreamQueues:
    """Stream queues of one broker. Used by one thread at a time; connections are opened when they are needed.

    RabbitMQ sends whole chunks, up to some thousand messages, so that `prefetch` is exceeded by one of them at most.

    Args:
        url: where RabbitMQ is, `pyamqp://…`.
        prefetch: how many messages the broker sends ahead.
        heartbeat: seconds; a connection that is silent for two of them is dead.
        connect_timeout: seconds for connecting.
        patience: seconds without a message, though there must be one, after which the broker is away.
    """

    def __init__(
        self,
        url: str,
        *,
        prefetch: int = 500,
        heartbeat: float = 30.0,
        connect_timeout: float = 5.0,
        patience: float = 20.0,
    ) -> None:
        self._url = url
        self._prefetch = prefetch
        self._heartbeat = heartbeat
        self._connect_timeout = connect_timeout
        self._patience = patience
        self._tails: dict[str, _Reading] = {}

    def first(self, queue: str) -> int | None:
        """The offset of the oldest message that is kept; `None` where there is none.

        Raises:
            BrokerUnavailable: the broker is away.
            ConfigurationError: there is no stream of that name, or we may not read it.
        """
        with closing(self._open(queue, "first", 1)) as reading:
            return reading.lowest if reading.begins(self._patience) else None

    def end(self, queue: str) -> int | None:
        """The offset after the newest message; `None` where there is none.

        A connection stays open, so that asking again costs little. What was confirmed before the first question counts; of
        what came later, what has arrived here.

        Raises:
            BrokerUnavailable: the broker is away.
            ConfigurationError: there is no stream of that name, or we may not read it.
        """
        tail = self._tails.pop(queue, None)
        if tail is not None:
            try:
                tail.read_pending()
                if tail.unacked < _TAIL_PREFETCH:
                    self._tails[queue] = tail
                    return tail.end
            except BrokerUnavailable:
                pass  # nobody asked for so long that the broker gave the connection up
            tail.close()
        tail = self._open(queue, "last", _TAIL_PREFETCH)
        try:
            if not tail.begins(self._patience):
                tail.close()
                return None
            tail.catch_up()
        except BaseException:
            tail.close()
            raise
        self._tails[queue] = tail
        return tail.end

    def read(self, queue: str, start: int, end: int) -> Iterator[tuple[int, Message]]:
        """The messages from offset `start` up to, and without, offset `end`, each with its offset.

        There must be a message at `end - 1`, or after it.

        Raises:
            OffsetsLost: the stream no longer keeps all of them.
            BrokerUnavailable: the connection is lost; read it again.
            ConfigurationError: there is no stream of that name, or we may not read it.
        """
        if start >= end:
            return
        follows = start
        whole = True
        with closing(self._open(queue, start, min(self._prefetch, end - start))) as reading, reading.kept_alive():
            while follows < end:
                offset, raw = reading.next(self._patience)
                if offset > follows:
                    if whole:
                        self._check_begins(queue, start)
                    whole = False
                if offset < end:
                    yield offset, seen(raw)
                follows = offset + 1
        if not whole:  # gaps are the broker's own entries, unless the stream was trimmed under our hands
            self._check_begins(queue, start)

    def close(self) -> None:
        """Close all connections; never blocks on a dead link."""
        while self._tails:
            self._tails.popitem()[1].close()

    def _check_begins(self, queue: str, start: int) -> None:
        first = self.first(queue)
        if first is None or first > start:
            raise OffsetsLost.trimmed(queue, start, first)

    def _open(self, queue: str, offset: int | str, prefetch: int) -> _Reading:
        link = Link.open(self._url, connect_timeout=self._connect_timeout, heartbeat=self._heartbeat)
        return _Reading(link, queue, offset, prefetch, shown(self._url))


def seen(raw: Any) -> Message:
    """The message as any consumer sees it; its offset is no header of the user's."""
    arrived = arrived_by_amqp(raw)
    headers = {name: value for name, value in arrived.headers.items() if name != OFFSET_HEADER}
    return message_of(arrived.properties, headers, arrived.body)


class _Reading:
    """A connection on which the messages of one stream arrive, from some offset on.

    Attributes:
        lowest: the offset of the first message that arrived.
        end: the offset after the last one.
        unacked: how many arrived since the last ack: at the prefetch no more come.
    """

    def __init__(self, link: Link, queue: str, offset: int | str, prefetch: int, shown_url: str) -> None:
        self._link = link
        self._queue = queue
        self._shown = shown_url
        self._prefetch = prefetch
        self._arrived: deque[tuple[int, Any]] = deque()
        self._tag = 0
        self.lowest: int | None = None
        self.end = 0
        self.unacked = 0
        with self._failing():
            link.channel.basic_qos(0, prefetch, False)
            link.channel.basic_consume(queue, callback=self._came, arguments={OFFSET_HEADER: offset})

    def begins(self, patience: float) -> bool:
        """Wait for the first message; whether there is one.

        Raises:
            BrokerUnavailable: the broker says that there are some, and sends none.
        """
        silent_since = time.monotonic()
        while not self.unacked:
            self._read(_SILENCE)
            silent = time.monotonic() - silent_since
            if silent >= _SILENCE:
                with self._failing():  # while it waits for the answer, a first message may arrive
                    count = self._link.channel.queue_declare(self._queue, passive=True).message_count
                if not count:
                    break
                if silent >= patience:
                    raise self._silent()
        return self.unacked > 0

    def catch_up(self) -> None:
        """Let all come that the stream has by now.

        An ack makes the broker read on to the stream's end before it answers anything else on this channel.
        """
        deadline = time.monotonic() + _CATCHING_UP
        known = -1
        while known < self.end and time.monotonic() < deadline:
            known = self.end
            self._arrived.clear()
            self._ack()
            with self._failing():
                self._link.channel.basic_qos(0, self._prefetch, False)

    def read_pending(self) -> None:
        """Read what has arrived, and forget it: its offsets are known.

        Raises:
            BrokerUnavailable: the connection is lost.
        """
        with self._failing():
            self._link.read_pending()
            self._link.beat()
        self._arrived.clear()

    def next(self, patience: float) -> tuple[int, Any]:
        """The next message with its offset.

        Raises:
            BrokerUnavailable: the connection is lost, or nothing comes.
        """
        deadline = time.monotonic() + patience
        while not self._arrived:
            if time.monotonic() >= deadline:
                raise self._silent()
            self._read(_SILENCE)
        if self.unacked * 2 >= self._prefetch:
            self._ack()
        return self._arrived.popleft()

    @contextmanager
    def kept_alive(self) -> Iterator[None]:
        """Send heartbeats meanwhile, for whoever takes the messages may be slow."""
        ended = threading.Event()
        beating = threading.Thread(target=self._beat, args=(ended,), daemon=True)
        if self._link.heartbeat:
            beating.start()
        try:
            yield
        finally:
            ended.set()
            if beating.ident is not None:
                beating.join()

    def close(self) -> None:
        """Close; never blocks on a dead link."""
        self._link.close()

    def _came(self, raw: Any) -> None:
        headers = raw.properties.get("application_headers") or {}
        offset = headers.get(OFFSET_HEADER)
        if not isinstance(offset, int):
            # Never acked: it goes back.
            raise self._refused("its messages have no offsets")
        self._tag = raw.delivery_tag
        self.lowest = offset if self.lowest is None else self.lowest
        self.end = offset + 1
        self.unacked += 1
        self._arrived.append((offset, raw))

    def _read(self, seconds: float) -> None:
        with self._failing():
            if self._link.wait_readable(seconds):
                with self._link.lock:
                    self._link.read_pending()

    def _ack(self) -> None:
        with self._failing(), self._link.lock:
            self._link.ack((), up_to=self._tag)
        self.unacked = 0

    def _beat(self, ended: threading.Event) -> None:
        while not ended.wait(self._link.heartbeat / 3):
            with self._link.lock:
                try:
                    self._link.send_heartbeat()
                except LINK_ERRORS:
                    return  # whoever reads will find it lost

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except _REFUSALS as error:
            self._link.discard()
            raise self._refused(said(error)) from error
        except LINK_ERRORS as error:
            self._link.discard()
            raise BrokerUnavailable(
                f"Reading {self._queue!r} at {self._shown} ended: {said(error)}.",
                fix="Nothing is lost: whatever was not handled is read again.",
            ) from error

    def _refused(self, why: str) -> ConfigurationError:
        return ConfigurationError(
            f"{self._queue!r} at {self._shown} can't be read as a stream: {why}.",
            fix="Name a queue declared with x-queue-type=stream; others go through `idemp pipeline spool`.",
        )

    def _silent(self) -> BrokerUnavailable:
        return BrokerUnavailable(
            f"The stream {self._queue!r} at {self._shown} has messages and sends none.", fix="Look at its replicas."
        )
