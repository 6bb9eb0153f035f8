"""The kept STOMP client, as a link uses it: its threads, its socket, its log."""

from __future__ import annotations

import logging
import os
import socket
import ssl
import struct
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Protocol

from idemp.errors import ConfigurationError
from idemp.forking import close_descriptor

# It would ask the name server for this machine's names, which nobody here needs.
os.environ.setdefault("STOMP_SKIP_HOSTNAME_SCAN", "1")

try:
    import stomp
    from stomp.exception import StompException
except ImportError as missing:
    raise ConfigurationError(f"stomp:// needs stomp.py: {missing}.", fix="pip install 'idemp[activemq]'") from missing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from idemp.broker.stomp.address import Address

#: What it raises. AttributeError: one of its threads takes the socket away while another writes.
CLIENT_ERRORS: Final = (StompException, OSError, AttributeError)
_HEARTBEAT_MS: Final = 10_000
_SEND_SECONDS: Final = 10.0
_END_SECONDS: Final = 1.0

_log = logging.getLogger("stomp.py")
if _log.level == logging.NOTSET:
    _log.setLevel(logging.CRITICAL)  # what it would say stands in our errors
# What it writes at DEBUG has the password in it.
_log.addFilter(lambda record: "passcode" not in record.getMessage())


class Frame:
    """A MESSAGE as it came: its headers, unescaped, and its bytes."""

    __slots__ = ("body", "headers")

    def __init__(self, headers: Mapping[str, str], body: bytes) -> None:
        self.headers = headers
        self.body = body


class Hears(Protocol):
    """Who is told what comes, by the client's own thread."""

    def heard_connected(self, headers: Mapping[str, str]) -> None:
        """The broker took us."""

    def heard_receipt(self, receipt: str) -> None:
        """A RECEIPT came."""

    def heard_error(self, headers: Mapping[str, str]) -> None:
        """An ERROR came."""

    def heard_message(self, frame: Frame) -> None:
        """A MESSAGE came."""

    def mark(self, reason: str) -> None:
        """The connection ended."""


class Client:
    """One connection of stomp.py's, none of whose calls waits for ever.

    Args:
        address: where to.
        timeout: seconds for the socket to connect.
        hears: is told what comes.
    """

    def __init__(self, address: Address, timeout: float, hears: Hears) -> None:
        self._address = address
        self._client: Any = stomp.StompConnection12(
            address.hosts,
            prefer_localhost=False,
            try_loopback_connect=False,
            reconnect_attempts_max=1,
            reconnect_sleep_initial=0.01,
            timeout=timeout,
            heartbeats=(_HEARTBEAT_MS, _HEARTBEAT_MS),
            auto_decode=False,
        )
        if address.tls:
            self._client.set_ssl(
                address.hosts, ca_certs=address.ca_certs, cert_file=address.certfile, key_file=address.keyfile
            )
            self._end_at_the_end()
        self._client.set_listener("idemp", _Listener(self, hears))
        self._reader: threading.Thread | None = None
        self._client.transport.override_threading(self._started)

    def connect(self) -> None:
        """Open the socket and say CONNECT; the answer is heard.

        Raises:
            StompException, OSError, AttributeError: nobody is there.
        """
        self._client.connect(self._address.user, self._address.password, wait=False)
        with suppress(OSError, AttributeError):  # a broker that refuses us may be gone by now, and why was heard
            sock = self._client.transport.socket
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 2 * _HEARTBEAT_MS)
        self.limit(_SEND_SECONDS)
        self.hurry()

    def limit(self, seconds: float) -> None:
        """How long a write may take at most: a broker that has no space left reads nothing."""
        whole, part = divmod(max(0.05, seconds), 1.0)
        value = struct.pack("ll", int(whole), int(1_000_000 * part))
        with suppress(*CLIENT_ERRORS):  # it shows when something is written
            self._client.transport.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)

    def why_not(self, timeout: float) -> str:
        """Why no connection could be opened, which stomp.py tells its log alone; empty if one can be now."""
        for host in self._address.hosts:
            try:
                with socket.create_connection(host, timeout) as sock:
                    if self._address.tls:
                        self._context().wrap_socket(sock, server_hostname=host[0]).close()
            except OSError as error:
                return str(error)
        return ""

    def send(self, command: str, headers: dict[str, str], body: bytes) -> None:
        """Write a frame.

        Raises:
            StompException, OSError, AttributeError: it could not be written, or not all of it.
        """
        self._client.send_frame(command, headers, body)

    def hurry(self) -> None:
        """Acknowledge what came at once: by default the broker sends no small frame before, and Linux takes 40 ms for it."""
        if hasattr(socket, "TCP_QUICKACK"):
            with suppress(*CLIENT_ERRORS):
                self._client.transport.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)

    def cut(self) -> None:
        """End the connection, whatever state it is in."""
        with suppress(Exception):
            # Over TLS stomp.py says goodbye first, and would wait for the answer for ever.
            self._client.transport.socket.shutdown(socket.SHUT_RDWR)
        # Who still reads from a socket that is closed reads from the next one that gets its number.
        if self._reader is not None and self._reader is not threading.current_thread():
            self._reader.join(_END_SECONDS)
        with suppress(Exception):
            self._client.transport.disconnect_socket()

    def leave_to_parent(self) -> None:
        """Be closed in a forked child, where the thread that reads does not exist."""
        transport, self._reader = self._client.transport, None
        sock, transport.socket, transport.running = transport.socket, None, False
        if sock is not None:
            close_descriptor(sock)

    def _started(self, read: Callable[[], object]) -> threading.Thread:
        """stomp.py's own thread, which reads."""
        self._reader = threading.Thread(target=read, name="idemp-stomp", daemon=True)
        self._reader.start()
        return self._reader

    def _end_at_the_end(self) -> None:
        """Over TLS stomp.py 9 takes the end of the connection for a pause, and asks again and again without one."""
        transport = self._client.transport
        receive = transport.receive

        def received() -> Any:
            data = receive()
            if data == b"":
                transport.running = False
            return data

        transport.receive = received

    def _context(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self._address.ca_certs)
        if self._address.certfile is not None:
            context.load_cert_chain(self._address.certfile, self._address.keyfile)
        return context


class _Listener(stomp.ConnectionListener):  # type: ignore[misc]
    def __init__(self, client: Client, hears: Hears) -> None:
        self._client = client
        self._hears = hears

    def on_connected(self, frame: Any) -> None:
        self._hears.heard_connected(frame.headers)

    def on_receipt(self, frame: Any) -> None:
        self._client.hurry()
        self._hears.heard_receipt(frame.headers.get("receipt-id", ""))

    def on_error(self, frame: Any) -> None:
        self._hears.heard_error(frame.headers)

    def on_message(self, frame: Any) -> None:
        self._client.hurry()
        self._hears.heard_message(Frame(frame.headers, frame.body or b""))

    def on_heartbeat_timeout(self) -> None:
        self._hears.mark("the broker was silent for too long")

    def on_disconnected(self) -> None:
        self._hears.mark("the broker closed the connection")
