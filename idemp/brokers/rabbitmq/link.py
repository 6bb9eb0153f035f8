"""A connection with one channel, on which every wait is bounded. After any unclear error it is discarded."""

from __future__ import annotations

import os
import select
import socket
import ssl
import struct
import threading
from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any, Final

import amqp
from amqp import method_framing
from amqp.exceptions import AMQPError
from amqp.method_framing import frame_handler
from amqp.serialization import _read_item
from kombu.utils.url import url_to_parts

from idemp.errors import ConfigurationError, Unavailable, describe_error
from idemp.forks import forget_in_children
from idemp.messages import UNREADABLE

__all__ = ["LINK_ERRORS", "Address", "Link", "addresses"]

LINK_ERRORS: Final = (AMQPError, OSError, AttributeError, KeyError, TypeError, ValueError, struct.error)
"""Errors that py-amqp raises when a connection ends in the middle of an operation."""
SCHEMES: Final = {"amqp": 5672, "pyamqp": 5672, "amqps": 5671, "pyamqps": 5671}
BAD: Final = (ValueError, OverflowError, OSError, RecursionError, IndexError, ArithmeticError, struct.error, AMQPError)
"""Errors that py-amqp raises for properties that it cannot read."""
NAMES: Final = (
    "content_type content_encoding application_headers delivery_mode priority correlation_id reply_to expiration message_id timestamp "
    "type user_id app_id cluster_id"
)
PROPERTIES: Final = tuple(zip(NAMES.split(" "), "ssFBBssssTssss", strict=True))
"""Properties of class basic in the order of their flags, each with its type (AMQP 0-9-1, 1.8 and 4.2.5)."""
SIZES: Final = {
    kind: size for kinds, size in (("V", 0), ("tbB", 1), ("sUu", 2), ("Iif", 4), ("D", 5), ("LldT", 8)) for kind in kinds
}
"""Sizes of values in bytes, by their type in a table; values of other types have a length prefix."""
HEADER_FRAME: Final = 20  # bytes of a frame of properties besides the properties
CHUNK: Final = 16_384  # bytes read at once


@dataclass(frozen=True)
class Address:
    """One host of a broker URL.

    Attributes:
        tls: Arguments of TLS, with verification; None without TLS.
    """

    host: str
    port: int
    user: str
    password: str
    vhost: str
    tls: dict[str, Any] | None


def addresses(url: str) -> list[Address]:
    """Return the hosts of a broker URL; several are separated by semicolons.

    Raises:
        ConfigurationError: The URL is not one of RabbitMQ, or its hosts name different virtual hosts.

    Example:
        >>> [(each.host, each.port, each.vhost, each.tls is None) for each in addresses("amqp://one/shop;amqps://two/shop")]
        [('one', 5672, 'shop', True), ('two', 5671, 'shop', False)]
    """
    hosts = []
    for part in url.split(";"):
        scheme, host, port, user, password, path, query = url_to_parts(part.strip())
        if scheme not in SCHEMES or not host:
            raise ConfigurationError("broker_url: write amqp://USER:PASSWORD@HOST/VHOST or amqps://…")
        tls = None
        if scheme.endswith("s"):
            files = {name: query[name] for name in ("ca_certs", "certfile", "keyfile") if name in query}
            tls = {"cert_reqs": ssl.CERT_REQUIRED, "server_hostname": host, **files}
        hosts.append(Address(host, port or SCHEMES[scheme], user or "guest", password or "guest", path or "/", tls))
    if len({part.vhost for part in hosts}) > 1:
        raise ConfigurationError("broker_url: its hosts name different virtual hosts; write /VHOST after each of them")
    return hosts


class _Tolerant(amqp.Message):
    """A message that tolerates unreadable properties: with py-amqp's own class they end the connection, and come back for ever."""

    def _load_properties(self, class_id: int, buf: bytes, offset: int) -> Any:
        try:
            return super()._load_properties(class_id, buf, offset)
        except BAD:  # not UTF-8, an unknown type, or a time before 1970 or in milliseconds
            self.properties, whole = _properties(bytes(buf[offset:]))
            if not whole:
                self.properties[UNREADABLE] = b64encode(bytes(buf[offset:])).decode()
            return len(buf)


def _properties(data: bytes) -> tuple[dict[str, Any], bool]:
    """Read properties one by one; return what can be read, and whether that is all."""
    properties: dict[str, Any] = {}
    whole, offset = True, 2
    for bit, (name, kind) in enumerate(PROPERTIES):
        if not int.from_bytes(data[:2], "big") & 0x8000 >> bit:
            continue
        try:
            fixed = {"B": 1, "T": 8, "s": 1 + data[offset]}
            size = fixed.get(kind) or 4 + int.from_bytes(data[offset : offset + 4], "big")
            raw, offset = data[offset : offset + size], offset + size
            if offset > len(data):
                raise ValueError("cut short")
            if kind == "F":
                properties[name], complete = _table(raw[4:])
                whole = whole and complete
            else:
                properties[name] = raw[1:].decode() if kind == "s" else int.from_bytes(raw, "big")
        except BAD:
            whole = False
    return properties, whole


def _table(data: bytes) -> tuple[dict[str, Any], bool]:
    """Read the entries of a table one by one, and step over those that cannot be read."""
    entries: dict[str, Any] = {}
    whole, offset = True, 0
    while offset < len(data):
        start = offset + 1 + data[offset]
        kind, value = data[start : start + 1].decode("latin-1"), start + 1
        size = SIZES.get(kind, 4 + int.from_bytes(data[value : value + 4], "big") if kind in "AFSx" else len(data))
        name, offset = data[offset + 1 : start], value + size
        try:
            if not kind or offset > len(data):
                raise ValueError("cut short, or of an unknown type")
            # A time need not fit into a date.
            entries[name.decode()] = int.from_bytes(data[value:offset], "big") if kind == "T" else _read_item(data, start)[0]
        except BAD:
            whole = False
    return entries, whole


_frames: Final = FunctionType(
    frame_handler.__code__, {**vars(method_framing), "Message": _Tolerant}, argdefs=frame_handler.__defaults__
)


class Link:
    """A connection to the first host that answers.

    Args:
        hosts: Hosts, tried in this order.
        timeout: Seconds for connecting, and for each read and write.
        heartbeat: Heartbeat interval in seconds; either side takes a connection that is silent for two intervals for lost.

    Attributes:
        channel: py-amqp's channel.
        blocked: Whether the broker takes no messages at the moment (an alarm).
        lock: Held while the connection is used, because two threads use it.

    Raises:
        Unavailable: No host answers.
    """

    def __init__(self, hosts: Sequence[Address], *, timeout: float = 5.0, heartbeat: int = 30) -> None:
        self.lock, self.blocked, self._inherited = threading.RLock(), False, False
        forget_in_children(self)
        errors = []
        for address in hosts:
            try:
                self._connect(address, timeout, heartbeat)
                break
            except LINK_ERRORS as error:
                errors.append(f"{address.host}:{address.port}: {describe_error(error)}")
                with suppress(*LINK_ERRORS):
                    self._connection.collect()
        else:
            raise Unavailable(f"RabbitMQ cannot be reached: {'; '.join(errors)}")
        self._transport.sock.settimeout(timeout)
        receive = self._transport._quick_recv  # noqa: SLF001
        self._transport._quick_recv = lambda wanted: receive(max(wanted, CHUNK))  # noqa: SLF001 - it would read frame by frame
        self._poll = select.poll()
        self._poll.register(self._transport.sock.fileno(), select.POLLIN)
        self.channel.auto_decode = False
        self.channel._do_revive = self._stay_closed  # py-amqp would reopen it without its consumers  # noqa: SLF001

    def _connect(self, address: Address, timeout: float, heartbeat: int) -> None:
        self._connection: Any = amqp.Connection(
            f"{address.host}:{address.port}",
            userid=address.user,
            password=address.password,
            virtual_host=address.vhost,
            ssl=address.tls or False,
            heartbeat=heartbeat,
            connect_timeout=timeout,
            read_timeout=timeout,
            write_timeout=timeout,
            frame_handler=_frames,
            on_blocked=partial(self._block, True),
            on_unblocked=partial(self._block, False),
            # py-amqp's 1 s also counts while a broker in alarm reads nothing.
            socket_settings={socket.TCP_USER_TIMEOUT: 1000 * max(10, 2 * heartbeat)},
        )
        self._connection.connect()
        self._transport: Any = self._connection.transport  # of a closed connection, this attribute would connect again
        self.channel: Any = self._connection.channel()

    def _stay_closed(self) -> None:
        self.channel.is_open = False

    def _block(self, blocked: bool, *_: object) -> None:
        self.blocked = blocked

    @property
    def alive(self) -> bool:
        """True if the connection was opened by this process and is not known to be closed."""
        return bool(self._transport.connected and self.channel.is_open) and not self._inherited

    @property
    def longest_properties(self) -> int:
        """Maximum size of a message's properties in bytes: they are sent in one frame."""
        return int(self._connection.frame_max) - HEADER_FRAME

    def watch(self, descriptor: int) -> None:
        """Let `wait` end when a file descriptor is readable."""
        self._poll.register(descriptor, select.POLLIN)

    def wait(self, seconds: float) -> bool:
        """Wait for something to read; return whether there is."""
        return self._is_buffered() or bool(self._poll.poll(max(0.0, seconds) * 1000))

    def read(self) -> None:
        """Read all that has arrived, and keep the connection alive."""
        with self.lock:
            sock = self._transport.sock
            usual = sock.gettimeout()
            sock.settimeout(0.25)
            try:  # the next call continues half a frame, unless the heartbeat ends the connection
                with suppress(TimeoutError):
                    while self._is_buffered() or select.select([sock], [], [], 0)[0]:
                        self._connection.on_inbound_frame(self._transport.read_frame())
            finally:
                with suppress(OSError):  # an error here must not hide the broker's reason for closing the connection
                    sock.settimeout(usual)
            self._connection.heartbeat_tick()

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Collect the frames that the block writes, and send them in one piece."""
        write, frames = self._transport._write, list[bytes]()  # noqa: SLF001
        self._transport._write = lambda frame: frames.append(bytes(frame))  # noqa: SLF001
        try:
            yield
        finally:
            self._transport._write = write  # noqa: SLF001
        if frames:
            self._transport.write(b"".join(frames))

    def _is_buffered(self) -> bool:
        """Return whether something was read from the socket and not taken yet."""
        if not self.alive:
            raise ConnectionResetError("the connection is closed")
        pending = getattr(self._transport.sock, "pending", None)  # of TLS
        return bool(self._transport._read_buffer or (pending and pending()))  # noqa: SLF001

    def beat(self) -> None:
        """Send a heartbeat, and read nothing. Another thread calls this while a handler runs."""
        if self.lock.acquire(timeout=1.0):
            try:
                if self.alive and self._connection.heartbeat:
                    self._connection.send_heartbeat()
            except LINK_ERRORS:
                self.drop()
            finally:
                self.lock.release()

    def forget(self) -> None:
        """Count as closed, in a forked child: the connection is the parent's."""
        self._inherited = True

    def drop(self) -> None:
        """Discard the connection without telling the broker."""
        with suppress(*LINK_ERRORS):
            if self._inherited:  # a forked child must not shut the parent's connection down
                os.close(self._transport.sock.detach())
            else:
                self._connection.collect()

    def close(self) -> None:
        """Close the connection in an orderly way."""
        with suppress(*LINK_ERRORS), self.lock:
            if self.alive and not self.blocked:
                self._transport.sock.settimeout(1.0)
                self._connection.close()
        self.drop()
