"""A TCP proxy that breaks the line when a test says so."""

from __future__ import annotations

import re
import socket
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Literal, Self

from idemp.testing.proxy_line import DIRECTIONS, Connection, Line, OneWay, Pace, Trigger

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

__all__ = ["FaultProxy", "Trigger"]

Direction = Literal["to_server", "to_client", "both"]

_END_SECONDS: Final = 10.0


class FaultProxy:
    """Listens on a free port of 127.0.0.1 and passes on to a server, until it is told to cut, refuse, stall or swallow.

    A context manager; safe to use from any thread. Faults can be combined, switched on at any time, and hold for present
    and future connections until `heal()`. A direction is `"to_server"`, `"to_client"` or `"both"`.

    Args:
        host: the server's host.
        port: the server's TCP port.
        connect_timeout: seconds that connecting to the server may take.

    Attributes:
        host: where clients connect: 127.0.0.1.
        port: the port there; it stays the same while connections are refused.
        connections: how many connections were accepted, those that `refuse(accept=True)` reset among them.
        bytes_to_server: how many bytes were passed on to the server.
        bytes_to_client: how many bytes were passed on to clients.

    Raises:
        OSError: no port is free.

    Example:
        >>> echo = socket.create_server(("127.0.0.1", 0))
        >>> with FaultProxy(*echo.getsockname()) as proxy, socket.create_connection(proxy.address) as client:
        ...     server, _ = echo.accept()
        ...     client.sendall(b"fine")
        ...     server.recv(10)
        ...     trigger = proxy.cut_when(b"COMMIT", direction="to_server", before=True)
        ...     client.sendall(b"BEGIN; COMMIT")
        ...     trigger.wait_triggered(5), server.recv(10), server.recv(10), client.recv(10)
        b'fine'
        (True, b'BEGIN; ', b'', b'')
        >>> server.close(), echo.close()
        (None, None)
    """

    def __init__(self, host: str, port: int, *, connect_timeout: float = 5.0) -> None:
        self._server = (host, port)
        self._connect_timeout = connect_timeout
        self._line = Line()
        self._threads: set[threading.Thread] = set()
        self._resetting = False
        self._closed = False
        self.connections = 0
        # Bound and never listening: keeps the port ours while the listener is away.
        self._place = _bound(("127.0.0.1", 0))
        self.host, self.port = self._place.getsockname()
        self._listener: socket.socket | None = None
        self._listen()

    # What there is ---------------------------------------------------------------------------------------------------

    @property
    def address(self) -> tuple[str, int]:
        """Host and port for clients."""
        return self.host, self.port

    @property
    def bytes_to_server(self) -> int:
        """Bytes passed on to the server so far."""
        with self._line.changed:
            return self._line.passed["to_server"]

    @property
    def bytes_to_client(self) -> int:
        """Bytes passed on to clients so far."""
        with self._line.changed:
            return self._line.passed["to_client"]

    @property
    def open_connections(self) -> int:
        """How many connections are open now."""
        with self._line.changed:
            return len(self._line.open)

    def through(self, url: str) -> str:
        """A server's URL with this proxy's host and port in it.

        Example:
            >>> with FaultProxy("db", 5432) as proxy:
            ...     proxy.through("postgresql://me:secret@db:5432/shop").replace(str(proxy.port), "PORT")
            'postgresql://me:secret@127.0.0.1:PORT/shop'
        """
        return re.sub(r"(://(?:[^/?#]*@)?)[^/?#]*", rf"\g<1>{self.host}:{self.port}", url, count=1)

    # Faults ----------------------------------------------------------------------------------------------------------

    def cut(self, *, reset: bool = False) -> None:
        """Close all connections at once, on both sides; returns when they are closed. New ones are welcome.

        Args:
            reset: by RST, as a crashed machine or a firewall does; else as an orderly end.
        """
        with self._line.changed:
            broken = set(self._line.open)
            for connection in broken:
                connection.end(reset=reset)
            self._line.changed.notify_all()
            if threading.current_thread() not in self._threads:
                self._line.changed.wait_for(lambda: not broken & self._line.open, _END_SECONDS)

    def refuse(self, *, accept: bool = False) -> None:
        """Let nobody in; present connections stay.

        Args:
            accept: accept and reset at once, so that attempts show in `connections`; else the connection is refused.
        """
        if accept:
            with self._line.changed:
                self._resetting = True
        else:
            self._unlisten()

    def stall(self, direction: Direction = "both") -> None:
        """Accept and keep connections, and forward nothing; what comes is kept, and goes on after `heal()`."""
        with self._line.changed:
            self._line.stalled.update(_each(direction))

    def half_open(self, direction: Direction = "both") -> None:
        """Take what is sent and drop it in silence, as if the peer were gone: its close is not told either.

        A connection that lost bytes can't be mended: `heal()` resets it.
        """
        with self._line.changed:
            self._line.swallowed.update(_each(direction))
            self._line.changed.notify_all()

    def slow(self, bytes_per_second: float | None = None, *, delay: float = 0.0, direction: Direction = "both") -> None:
        """Pass on slowly.

        Args:
            bytes_per_second: at most so many on each connection in each direction; no limit if `None`.
            delay: seconds before each chunk (what was received at once, up to 64 KiB).
            direction: which way.

        Raises:
            ValueError: a rate of zero or less: that is `stall`.
        """
        if bytes_per_second is not None and bytes_per_second <= 0:
            raise ValueError("At a rate of zero or less nothing passes: take stall().")
        with self._line.changed:
            self._line.paces.update(dict.fromkeys(_each(direction), Pace(bytes_per_second, delay)))

    def heal(self) -> None:
        """End all faults and disarm all triggers; kept bytes go on, connections that lost bytes are reset."""
        with self._line.changed:
            self._resetting = False
            self._line.heal()
            if self._listener is None and not self._closed:
                self._listen()

    # Triggers --------------------------------------------------------------------------------------------------------

    def when(
        self,
        pattern: bytes,
        do: Callable[[], object],
        *,
        direction: OneWay = "to_server",
        before: bool = True,
        nth: int = 1,
        answer_within: float = 0.5,
    ) -> Trigger:
        """Do something, once, when given bytes pass; they may be spread over several chunks.

        Args:
            pattern: the bytes, up to 4096.
            do: a fault, such as `proxy.stall`; called on a thread of the proxy.
            direction: which way they go.
            before: do it before they are passed on (what stood before them in their chunk is); else when they were passed
                on and the other side answers: the answer meets the fault.
            nth: wait for so many occurrences, counted over all connections.
            answer_within: with `before=False`, do it after so many seconds without an answer; 0: do not wait for one.

        Raises:
            ValueError: no pattern, one that is too long, or `nth` below 1.

        Example:
            >>> with FaultProxy("127.0.0.1", 5672) as proxy:
            ...     trigger = proxy.when(b"basic", proxy.stall, direction="to_client")
            ...     trigger.wait_triggered(0)
            False
        """
        return self._line.arm(
            Trigger(lambda _: do(), direction, pattern, before=before, count=nth, answer_within=answer_within)
        )

    def after(self, count: int, do: Callable[[], object], *, direction: OneWay = "to_server") -> Trigger:
        """Do something, once, when `count` more bytes have passed in a direction, counted over all connections."""
        return self._line.arm(Trigger(lambda _: do(), direction, None, count=count))

    def cut_when(
        self,
        pattern: bytes,
        *,
        direction: OneWay = "to_server",
        before: bool = True,
        nth: int = 1,
        answer_within: float = 0.5,
        reset: bool = False,
        only_there: bool = False,
    ) -> Trigger:
        """Cut, once, when given bytes pass: see `when` for the arguments.

        With `before=True` the bytes never arrive as a whole; with `before=False` they do, and their answer does not,
        however quick it is: nothing passes on what is cut between the bytes and the cut.

        Args:
            pattern: the bytes.
            direction: which way they go.
            before: whether they are lost, or their answer.
            nth: wait for so many occurrences.
            answer_within: with `before=False`, cut after so many seconds without an answer.
            reset: by RST.
            only_there: cut that connection alone; else all.
        """
        act = self._cutting(reset=reset, only_there=only_there)
        return self._line.arm(
            Trigger(act, direction, pattern, before=before, count=nth, answer_within=answer_within, at_once=True)
        )

    def cut_after(
        self,
        count: int,
        *,
        direction: OneWay = "to_server",
        reset: bool = False,
        only_there: bool = False,
    ) -> Trigger:
        """Cut, once, when `count` more bytes have passed in a direction, counted over all connections."""
        act = self._cutting(reset=reset, only_there=only_there)
        return self._line.arm(Trigger(act, direction, None, count=count, at_once=True))

    # Its end ---------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Cut all, listen no more, and wait until every thread has ended. Repeating it is harmless.

        Raises:
            RuntimeError: a thread did not end.
        """
        with self._line.changed:
            self._closed = True
        self._unlisten()
        self.cut()
        deadline = time.monotonic() + _END_SECONDS
        with self._line.changed:
            running = list(self._threads)
        for thread in running:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                raise RuntimeError(f"{thread.name} did not end.")
        self._place.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.host}:{self.port} -> {self._server[0]}:{self._server[1]})"

    def _listen(self) -> None:
        self._listener = _bound(self.address)
        self._listener.listen(128)
        self._start(self._accept, self._listener)

    def _unlisten(self) -> None:
        with self._line.changed:  # to the end: `heal` listens again only where nobody does
            listener, self._listener = self._listener, None
            if listener is not None:
                # Wakes the thread that accepts, and from here on the system refuses.
                with suppress(OSError):
                    listener.shutdown(socket.SHUT_RDWR)
                listener.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            with self._line.changed:
                if listener is not self._listener:
                    client.close()
                    return
                self.connections += 1
                connection = Connection(client)
                self._line.open.add(connection)
                if self._resetting:
                    connection.end(reset=True)
                self._start(self._serve, connection)

    def _serve(self, connection: Connection) -> None:
        """Connect to the server, and pass on."""
        try:
            server = None if connection.ending else socket.create_connection(self._server, self._connect_timeout)
        except OSError:
            server = None
        with self._line.changed:
            if server is None:
                connection.end(reset=True)
            else:
                server.settimeout(None)
                connection.join(server)
            if connection.ending:
                self._line.forget(connection)
                return
            to_server, to_client = connection.ways
            self._start(self._line.pump, connection, to_client)
        self._line.pump(connection, to_server)

    def _cutting(self, *, reset: bool, only_there: bool) -> Callable[[Connection], None]:
        def cut(connection: Connection) -> None:
            with self._line.changed:
                for broken in {connection} if only_there else set(self._line.open):
                    broken.end(reset=reset)
                self._line.changed.notify_all()

        return cut

    def _start(self, call: Callable[..., None], *arguments: object) -> None:
        def run() -> None:
            try:
                call(*arguments)
            finally:
                with self._line.changed:
                    self._threads.discard(thread)

        thread = threading.Thread(target=run, name=f"fault-proxy-{self.port}", daemon=True)
        with self._line.changed:
            self._threads.add(thread)
        thread.start()


def _bound(address: tuple[str, int]) -> socket.socket:
    end = socket.socket()
    end.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    end.bind(address)
    return end


def _each(direction: Direction) -> tuple[OneWay, ...]:
    return DIRECTIONS if direction == "both" else (direction,)
