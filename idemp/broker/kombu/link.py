"""One AMQP connection with one channel, on which nothing waits without end."""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections import deque
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

from amqp import spec
from amqp.exceptions import AMQPError
from amqp.transport import TCPTransport
from kombu.connection import Connection

from idemp.broker.kombu import encoding
from idemp.broker.kombu.frames import tolerant_frame_handler
from idemp.broker.kombu.urls import hosts_of, tls_options
from idemp.broker.urls import place_of, shown
from idemp.credentials import without_credentials
from idemp.errors import BrokerUnavailable
from idemp.forking import ForkAware, close_descriptor, renewed_in_child

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from idemp.broker.kombu.wire import Parcel

#: What py-amqp raises when a link is lost: its own errors, the socket's, and slips on half-closed objects.
LINK_ERRORS: Final = (AMQPError, OSError, AttributeError, KeyError, TypeError, ValueError, struct.error)

_READ_SLICE = 0.25  # a frame that began to arrive has this long per read
_CLOSE_SECONDS = 1.0
_MOST_FRAMES = 96  # read before any of them is acted on: 32 messages of three frames
_PIECE = 64 * 1024  # bytes
_CHUNK = 8192  # bytes; py-amqp moves what is left of one at each read


class Link(ForkAware):
    """A connection and its channel. Every use happens under `lock`; after any error it is thrown away.

    Attributes:
        channel: the channel; it never decodes a body and never reopens itself.
        connection: the connection.
        lock: held around every operation, because a heartbeat may come from another thread.
        blocked: whether the broker said that it takes no publishes for now (memory or disk alarm).
    """

    def __init__(self, connection: Any, *, operation_timeout: float) -> None:
        self.connection = connection
        self.lock = renewed_in_child(threading.RLock())
        self.blocked = False
        connection.on_blocked = self._on_blocked
        connection.on_unblocked = self._on_unblocked
        # Kept here: `connection.transport` and `.sock` of a closed connection would silently connect anew.
        self._transport = connection.transport
        # Whatever waits for an answer inside py-amqp waits with the socket's own timeout.
        self._transport.sock.settimeout(operation_timeout)
        if isinstance(self._transport, TCPTransport):
            self._transport._quick_recv = partial(_received, self._transport.sock)  # noqa: SLF001 - one call for many frames
        self._frames: deque[Any] = deque()  # read, and not acted on
        self._poll = select.poll()
        self._poll.register(self._transport.sock.fileno(), select.POLLIN)
        self.channel = self.open_channel()
        self.track()

    @classmethod
    def open(cls, url: str, *, connect_timeout: float, heartbeat: float, operation_timeout: float = 10.0) -> Self:
        """Connect to the first host of a failover list that answers.

        Raises:
            BrokerUnavailable: none does; `__cause__` is what the last one said.
            ConfigurationError: the URL can't be used.
        """
        deadline = time.monotonic() + connect_timeout
        urls = hosts_of(url)
        for position, single in enumerate(urls):
            share = max(0.05, (deadline - time.monotonic()) / (len(urls) - position))
            try:
                connection = _connect(single, connect_timeout=share, heartbeat=heartbeat)
                try:
                    return cls(connection, operation_timeout=operation_timeout)
                except BaseException:
                    connection.collect()
                    raise
            except LINK_ERRORS as error:
                if position == len(urls) - 1:
                    raise BrokerUnavailable(
                        f"No connection to {shown(url)}: {said(error)}.", fix="Check the URL and the broker."
                    ) from error
        raise AssertionError("hosts_of returns at least one")

    def after_fork_in_child(self) -> None:
        """Be closed here. py-amqp's own way would shut the socket down, for the parent, too."""
        sock, self._transport.sock, self._transport.connected = self._transport.sock, None, False
        self.connection.frame_writer = _discarded
        self._frames.clear()
        if sock is not None:
            close_descriptor(sock)

    def identity(self, url: str) -> str:
        """The server's cluster name and the virtual host; the hosts of the URL where the server tells no name."""
        cluster = self.connection.server_properties.get("cluster_name")
        host = self.connection.virtual_host
        return f"RabbitMQ cluster {cluster!r}, virtual host {host!r}" if cluster else place_of(url)

    def open_channel(self) -> Any:
        """One more channel on this connection."""
        channel = self.connection.channel()
        channel.auto_decode = False
        # py-amqp would reopen a channel that the broker closed, without its consumers and confirms: silent for ever.
        channel._do_revive = partial(_stay_closed, channel)  # noqa: SLF001
        return channel

    def replace_channel(self) -> None:
        """Use another channel of this connection from now on. Only when nothing on the former one waits for an answer."""
        self.channel.close()
        self.channel = self.open_channel()

    @property
    def alive(self) -> bool:
        """Whether nothing is known against it; a lost network shows only when it is used."""
        return bool(self._transport.connected)

    def wait_readable(self, seconds: float, *, beside: int | None = None) -> bool:
        """Wait until a frame begins to arrive, or until anything happens to another socket, given by its number."""
        return bool(self._frames) or self._arrives(seconds, beside)

    def _arrives(self, seconds: float, beside: int | None = None) -> bool:
        if not self.alive:
            raise ConnectionResetError("the connection is closed")
        if self._transport._read_buffer:  # noqa: SLF001 - a frame whose reading timed out half-way
            return True
        pending = getattr(self._transport.sock, "pending", None)
        if pending is not None and pending():
            return True
        if beside is not None:
            both = select.poll()
            for number in (self.fileno(), beside):
                both.register(number, select.POLLIN)
            return bool(both.poll(max(0.0, seconds) * 1000))
        return bool(self._poll.poll(max(0.0, seconds) * 1000))

    def fileno(self) -> int:
        """The socket's number, for waiting on two links at once.

        Raises:
            ConnectionResetError: the connection is closed.
        """
        if not self.alive:
            raise ConnectionResetError("the connection is closed")
        return int(self._transport.sock.fileno())

    def read(self) -> bool:
        """Read the frames that have begun to arrive, and act on them; says whether there may be more.

        If acting on one raises, those after it are kept for the next call.
        """
        more = False
        try:
            if not self._frames:
                with self._transport.having_timeout(_READ_SLICE):
                    self._frames.append(self._transport.read_frame())
                    while (more := self._arrives(0)) and len(self._frames) < _MOST_FRAMES:
                        self._frames.append(self._transport.read_frame())
            else:
                more = True
        except TimeoutError:
            more = False  # within a frame the line fell silent
        finally:
            # Also before an error: the broker may have said why it closes the connection.
            while self._frames:
                self.connection.on_inbound_frame(self._frames.popleft())
        return more

    def read_pending(self) -> None:
        """Read what has arrived, without waiting for more: a line that fell silent within a frame must not hold us up."""
        more = self.wait_readable(0)
        while more:
            more = self.read()

    def beat(self) -> None:
        """Send a heartbeat if it is time, and raise if the broker's are missing. Only after `read_pending`."""
        self.connection.heartbeat_tick()

    def send_heartbeat(self) -> None:
        """Send a heartbeat; for whoever does not read."""
        if self.connection.heartbeat:
            self.connection.send_heartbeat()

    @property
    def heartbeat(self) -> float:
        """The negotiated interval in seconds, 0 for none."""
        return float(self.connection.heartbeat or 0)

    @contextmanager
    def limited_to(self, seconds: float) -> Iterator[None]:
        """Every write in this block, and every answer that py-amqp waits for, comes within these seconds or raises."""
        with self._transport.having_timeout(max(0.001, seconds)):
            yield

    def publish(self, parcels: Iterable[Parcel]) -> None:
        """Send messages, in as few calls as there is room for in pieces of 64 KiB."""
        channel, frame_max = self.channel.channel_id, self.connection.frame_max
        self._send(
            encoding.publish(
                channel,
                parcel.exchange,
                parcel.routing_key,
                mandatory=parcel.mandatory,
                properties=parcel.content.encoded,
                body=parcel.content.body,
                frame_max=frame_max,
            )
            for parcel in parcels
        )

    def ack(self, tags: Iterable[int], *, up_to: int | None = None) -> None:
        """Ack all up to one, and each of some."""
        channel = self.channel.channel_id
        together = () if up_to is None else (encoding.ack(channel, up_to, multiple=True),)
        self._send((*together, *(encoding.ack(channel, tag) for tag in tags)))

    def _send(self, frames: Iterable[bytes]) -> None:
        if not self.channel.is_open:
            raise ConnectionResetError("the channel is closed")
        piece = bytearray()
        for each in frames:
            piece += each
            if len(piece) >= _PIECE:
                self._write(piece)
                piece = bytearray()
        if piece:
            self._write(piece)

    def _write(self, piece: bytearray) -> None:
        try:
            self._transport.write(piece)
        except BaseException:
            self.discard()  # it may be half-way gone, and what was counted as sent has perhaps never left
            raise
        self.connection.bytes_sent += 1  # by which py-amqp knows that no heartbeat is due

    def discard(self) -> None:
        """Drop the connection without a word; returns at once, raises nothing."""
        with suppress(*LINK_ERRORS):
            self._transport.sock.settimeout(0.1)  # TLS says goodbye
        with suppress(*LINK_ERRORS):
            self.connection.collect()
        # Its buffer of 128 KiB stands in a cycle, for the garbage collector's rarest round. Not None: that connects anew.
        self.connection.frame_writer = _discarded

    def close(self) -> None:
        """Say goodbye to the broker if it listens, for a second at most."""
        with self.lock:
            if self.alive and not self.blocked:
                with suppress(*LINK_ERRORS):
                    self._say_goodbye()
            self.discard()

    def _say_goodbye(self) -> None:
        deadline = time.monotonic() + _CLOSE_SECONDS
        connection = self.connection
        self._transport.sock.settimeout(_CLOSE_SECONDS)
        connection.is_closing = True
        connection.send_method(spec.Connection.Close, "BsBB", (0, "", 0, 0))
        while self.alive and (left := deadline - time.monotonic()) > 0 and self.wait_readable(left):
            self.read()

    def _on_blocked(self, _reason: str) -> None:
        self.blocked = True

    def _on_unblocked(self) -> None:
        self.blocked = False


def said(error: BaseException) -> str:
    """Return what the broker or the socket said, to go on in a sentence.

    Example:
        >>> from amqp.exceptions import NotFound
        >>> said(NotFound("NOT_FOUND - no queue 'q'", (50, 10)))
        "NOT_FOUND - no queue 'q'"
        >>> said(ConnectionResetError(104, "Connection reset by peer"))
        'Connection reset by peer'
    """
    text = str(error)
    if isinstance(error, AMQPError) and error.reply_text:
        text = str(error.reply_text)
    elif isinstance(error, OSError) and error.strerror:
        text = str(error.strerror)
    return without_credentials(text).rstrip(".") or type(error).__name__


def _connect(url: str, *, connect_timeout: float, heartbeat: float) -> Any:
    options: dict[str, Any] = {"frame_handler": tolerant_frame_handler}
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        # py-amqp's own is one second, and also counts while a broker with an alarm reads nothing.
        patience = int(1000 * max(10.0, 2 * heartbeat))
        options["socket_settings"] = {socket.TCP_USER_TIMEOUT: patience}
    settings: Any = Connection(url, transport_options=options)  # type: ignore[no-untyped-call]
    settings.connect_timeout, settings.heartbeat = connect_timeout, heartbeat  # whatever the URL's query says
    if tls := tls_options(url):
        settings.ssl = tls
    return settings.transport.establish_connection()


def _received(sock: socket.socket, wanted: int) -> bytes:
    """What has arrived, even if it is more than py-amqp wants, which keeps the rest."""
    return sock.recv(max(wanted, _CHUNK))


def _discarded(*_: object) -> None:
    """Instead of writing."""
    raise ConnectionResetError("the connection is closed")


def _stay_closed(channel: Any) -> None:
    """Instead of reopening a channel."""
    channel.is_open = False
