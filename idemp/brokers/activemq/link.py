"""A connection on which every wait is bounded. After any unclear error it is discarded."""

from __future__ import annotations

import logging
import os
import socket
import ssl
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final
from urllib.parse import parse_qs, unquote, urlsplit

import stomp
from stomp.exception import StompException

from idemp.errors import ConfigurationError, Unavailable, describe_error
from idemp.forks import forget_in_children

__all__ = ["Address", "Arrival", "Link", "addresses"]

LINK_ERRORS: Final = (StompException, OSError, AttributeError)
"""Errors that stomp.py raises when a connection ends in the middle of an operation."""
SCHEMES: Final = {"stomp": 61613, "stomp+ssl": 61614}
HEARTBEAT: Final = 10_000  # milliseconds
CLOSED: Final = "closed"
WOKEN: Final = "woken"

logging.getLogger("stomp.py").setLevel(logging.CRITICAL)  # it logs what it also raises


@dataclass(frozen=True)
class Address:
    """One host of a broker URL.

    Attributes:
        authority: File of the CA that signed the host's certificate; "" for the CAs of the system, None without TLS.
    """

    host: str
    port: int
    user: str | None
    password: str | None
    authority: str | None


def addresses(url: str) -> list[Address]:
    """Return the hosts of a broker URL; several are separated by semicolons.

    Raises:
        ConfigurationError: The URL is not one of ActiveMQ.

    Example:
        >>> [(each.host, each.port, each.authority) for each in addresses("stomp://one;stomp+ssl://two:7000")]
        [('one', 61613, None), ('two', 7000, '')]
    """
    hosts = []
    for part in url.split(";"):
        parts = urlsplit(part.strip())
        if parts.scheme not in SCHEMES or not parts.hostname:
            raise ConfigurationError("broker_url: write stomp://USER:PASSWORD@HOST:PORT or stomp+ssl://…")
        authority = parse_qs(parts.query).get("ca_certs", [""])[0] if parts.scheme.endswith("ssl") else None
        login = [unquote(text) if text else None for text in (parts.username, parts.password)]
        hosts.append(Address(parts.hostname, parts.port or SCHEMES[parts.scheme], login[0], login[1], authority))
    return hosts


@dataclass(frozen=True)
class Arrival:
    """A frame that has arrived, or the event `woken` or `closed`.

    Attributes:
        kind: `connected`, `message`, `receipt`, `error` (which names a frame), `woken` or `closed`.
    """

    kind: str
    headers: Mapping[str, str]
    body: bytes = b""

    @property
    def text(self) -> str:
        """Text of an error."""
        first = self.body.decode("utf-8", "replace").strip().partition("\n")[0]
        return self.headers.get("message") or first or self.kind


class Link(stomp.ConnectionListener):  # type: ignore[misc]
    """A connection to the first host that answers.

    Args:
        hosts: Hosts, tried in this order.
        timeout: Seconds for connecting, and for each write.

    Raises:
        Unavailable: No host answers, or it refuses the user.
    """

    def __init__(self, hosts: Sequence[Address], timeout: float) -> None:
        self._inherited, errors = False, []
        forget_in_children(self)
        for kind in ("connected", "message", "receipt", "error"):
            setattr(self, f"on_{kind}", partial(self._arrive, kind))
        for address in hosts:
            try:
                self._connect(address, timeout)
            except (*LINK_ERRORS, Unavailable) as error:
                errors.append(f"{address.host}:{address.port}: {describe_error(error)}")
                self.drop()
            else:
                return
        raise Unavailable(f"ActiveMQ cannot be reached: {'; '.join(errors)}")

    def _connect(self, address: Address, timeout: float) -> None:
        self._arrivals: SimpleQueue[Arrival] = SimpleQueue()
        where = [(address.host, address.port)]
        own: dict[str, Any] = {"prefer_localhost": False, "try_loopback_connect": False, "reconnect_attempts_max": 1}
        self._client: Any = stomp.StompConnection12(
            where, timeout=timeout, heartbeats=(HEARTBEAT, HEARTBEAT), vhost=address.host, auto_decode=False, **own
        )
        if address.authority is not None:
            # With this protocol constant, the host name is verified, too.
            self._client.set_ssl(where, ca_certs=address.authority or None, ssl_version=ssl.PROTOCOL_TLS_CLIENT)
        self._client.set_listener("idemp", self)
        self._client.connect(address.user, address.password)
        limit = struct.pack("ll", int(timeout) + 1, 0)  # a broker without space stops reading
        self._client.transport.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        if self.next(timeout) is None:
            raise Unavailable("no answer in time")

    @property
    def alive(self) -> bool:
        """True if the connection was opened by this process and is not known to be closed."""
        return not self._inherited and bool(self._client.transport.is_connected())

    def next(self, seconds: float) -> Arrival | None:
        """Return the next arrival, or wait for one; None if none comes in time.

        Raises:
            Unavailable: The connection is lost, or the broker sent an error that names no frame of ours.
        """
        try:
            arrival = self._arrivals.get(timeout=seconds) if seconds > 0 else self._arrivals.get_nowait()
        except Empty:
            return None
        if arrival.kind == CLOSED or (arrival.kind == "error" and "receipt-id" not in arrival.headers):
            raise Unavailable(f"the connection to ActiveMQ was lost: {arrival.text}")
        return arrival

    def send(self, command: str, headers: Mapping[str, str], body: bytes = b"") -> None:
        """Send a frame.

        Raises:
            Unavailable: The connection is lost.
        """
        try:
            self._client.send_frame(command, dict(headers), body)
        except LINK_ERRORS as error:
            raise Unavailable(f"the connection to ActiveMQ was lost: {describe_error(error)}") from error

    def wake(self) -> None:
        """End a waiting `next`."""
        self._arrivals.put(Arrival(WOKEN, {}))

    def close(self, timeout: float = 2.0) -> None:
        """Close the connection after the broker has processed all frames."""
        if self.alive:
            deadline = time.monotonic() + timeout
            with suppress(Unavailable):
                self.send("DISCONNECT", {"receipt": "goodbye"})
                while (answer := self.next(deadline - time.monotonic())) and answer.headers.get("receipt-id") != "goodbye":
                    pass
        self.drop()

    def forget(self) -> None:
        """Count as closed, in a forked child: the connection is the parent's."""
        self._inherited = True

    def drop(self) -> None:
        """Discard the connection without telling the broker."""
        with suppress(*LINK_ERRORS):
            if self._inherited:  # a forked child must not shut the parent's connection down
                os.close(self._client.transport.socket.detach())
            else:
                self._client.transport.disconnect_socket()

    def _arrive(self, kind: str, frame: Any) -> None:
        """Queue a frame. The thread of stomp.py calls this."""
        self._arrivals.put(Arrival(kind, frame.headers, bytes(frame.body or b"")))

    def on_disconnected(self) -> None:
        """Queue the end of the connection."""
        self._arrivals.put(Arrival(CLOSED, {"message": "the connection was closed"}))
