"""How the fault proxy passes bytes on: one thread for each direction of each connection, and what stops them."""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

OneWay = Literal["to_server", "to_client"]
DIRECTIONS: Final[tuple[OneWay, ...]] = ("to_server", "to_client")

_CHUNK: Final = 65536
_TAIL: Final = 4096
_LINGER_NOT: Final = struct.pack("ii", 1, 0)  # close() then sends RST
_SLICE_SECONDS: Final = 0.05


@dataclass(frozen=True, slots=True)
class Pace:
    """How slowly bytes pass: a rate, and seconds before each chunk."""

    bytes_per_second: float | None
    delay: float


@dataclass(eq=False)
class Way:
    """One direction of one connection, and what passed there already."""

    direction: OneWay
    source: socket.socket
    target: socket.socket
    offset: int = 0
    tail: bytes = b""


class Trigger:
    """Waits for bytes to pass, then does something, once. Made by the methods of `FaultProxy`.

    Attributes:
        pattern: the bytes; `None` where bytes are only counted.
        direction: which way they go.

    Example:
        >>> from idemp.testing import FaultProxy
        >>> with FaultProxy("127.0.0.1", 5432) as proxy:
        ...     trigger = proxy.cut_when(b"COMMIT")
        ...     trigger.triggered, trigger.wait_triggered(0.01)
        (False, False)
    """

    def __init__(
        self,
        act: Callable[[Connection], object],
        direction: OneWay,
        pattern: bytes | None,
        *,
        before: bool = True,
        count: int = 1,
        answer_within: float = 0.0,
        at_once: bool = False,
    ) -> None:
        if pattern is not None and not 0 < len(pattern) <= _TAIL:
            raise ValueError(f"The pattern has {len(pattern)} bytes; take 1 to {_TAIL}.")
        if count < 1:
            raise ValueError("Count from one.")
        self.pattern = pattern
        self.direction: OneWay = direction
        self.before = before
        self.answer_within = answer_within
        self.at_once = at_once  # its act waits for nobody: it happens before another byte passes, an answer say
        self._act = act
        self._left = count
        self._starts: dict[Way, int] = {}
        self._found: tuple[Way, int] | None = None
        self._done = threading.Event()

    @property
    def triggered(self) -> bool:
        """Whether it has happened."""
        return self._done.is_set()

    def wait_triggered(self, timeout: float | None = None) -> bool:
        """Wait at most so many seconds until it has happened, the fault included; says whether it has."""
        return self._done.wait(timeout)

    def begin_at(self, way: Way) -> None:
        """What passed here before does not count."""
        self._starts[way] = way.offset

    def passed(self, count: int) -> None:
        """So many bytes passed: for a trigger that counts them."""
        if self.pattern is None:
            self._left -= count

    def place(self, way: Way, chunk: bytes) -> int | None:
        """The offset in the way's stream up to which bytes pass before it happens; `None` if not in this chunk."""
        if self.pattern is None:
            return way.offset + self._left if self._left <= len(chunk) else None
        seen, first = way.tail + chunk, way.offset - len(way.tail)
        while self._left and (start := seen.find(self.pattern, max(0, self._starts.get(way, 0) - first))) >= 0:
            self._starts[way] = first + start + len(self.pattern)
            self._left -= 1
            if not self._left:
                place = max(way.offset, first + start) if self.before else way.offset + len(chunk)
                self._found = (way, place)
        return self._found[1] if self._found and self._found[0] is way else None

    def fire(self, connection: Connection) -> None:
        """Let it happen."""
        self._act(connection)
        self._done.set()


class Connection:
    """A client's connection, and the one to the server that belongs to it, once there is one."""

    def __init__(self, client: socket.socket) -> None:
        self.ends = [client]
        self.ways: tuple[Way, ...] = ()
        self.ending = False
        self._reset = False
        self.lost_bytes = False
        self.answer: tuple[Trigger, float] | None = None
        self.running = 0

    def join(self, server: socket.socket) -> None:
        """Here is the server."""
        (client,) = self.ends
        self.ends.append(server)
        for end in self.ends:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.ways = (Way("to_server", client, server), Way("to_client", server, client))
        self.running = len(self.ways)
        if self.ending:
            self._shut(server)

    def end(self, *, reset: bool) -> None:
        """Wake the threads, which then close it; the first call decides how."""
        if not self.ending:
            self.ending = True
            self._reset = reset
            for end in self.ends:
                self._shut(end)

    def _shut(self, end: socket.socket) -> None:
        with suppress(OSError):
            if self._reset:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
            # Shutting the reading half tells the peer nothing: a reset shall come as one.
            end.shutdown(socket.SHUT_RD if self._reset else socket.SHUT_RDWR)


class Line:
    """All connections of a proxy, and its faults. `changed` guards the lot, and tells of changes."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.open: set[Connection] = set()
        self.stalled: set[OneWay] = set()
        self.swallowed: set[OneWay] = set()
        self.paces: dict[OneWay, Pace] = {}
        self.triggers: list[Trigger] = []
        self.passed: dict[OneWay, int] = dict.fromkeys(DIRECTIONS, 0)

    def arm(self, trigger: Trigger) -> Trigger:
        """From now on it waits for its bytes."""
        with self.changed:
            for connection in self.open:
                for way in connection.ways:
                    trigger.begin_at(way)
            self.triggers.append(trigger)
        return trigger

    def heal(self) -> None:
        """End all faults."""
        with self.changed:
            for kept in (self.stalled, self.swallowed, self.paces, self.triggers):
                kept.clear()
            for connection in self.open:
                connection.answer = None
                if connection.lost_bytes:
                    connection.end(reset=True)
            self.changed.notify_all()

    def forget(self, connection: Connection) -> None:
        """Close it: no thread works on it."""
        with self.changed:
            for end in connection.ends:
                end.close()
            self.open.discard(connection)
            self.changed.notify_all()

    def pump(self, connection: Connection, way: Way) -> None:
        """Pass on what comes in one direction, to the end. The last of a connection's two threads closes it."""
        try:
            while chunk := self._receive(connection, way):
                fresh = True
                while chunk:
                    piece = self._paced(connection, way, len(chunk), fresh=fresh)
                    chunk, fresh = self._pass(connection, way, chunk, piece), False
            self._finish(connection, way)
        except OSError:
            self._finish(connection, way, broken=True)
        except BaseException:  # what a trigger was told to do failed: the thread's end says so
            connection.end(reset=True)
            raise
        finally:
            with self.changed:
                connection.running -= 1
                if not connection.running:
                    self.forget(connection)

    # Steps of a pump -------------------------------------------------------------------------------------------------

    def _receive(self, connection: Connection, way: Way) -> bytes:
        """What comes next; nothing at the end."""
        while (waiting := connection.answer) is not None and waiting[0].direction == way.direction:
            trigger, until = waiting
            if _ready(way.source, select.POLLIN, until - time.monotonic()):
                break
            with self.changed:
                late = connection.answer is waiting
                connection.answer = None if late else connection.answer
                if late and trigger.at_once:
                    trigger.fire(connection)
            if late and not trigger.at_once:
                trigger.fire(connection)
        return way.source.recv(_CHUNK)

    def _paced(self, connection: Connection, way: Way, size: int, *, fresh: bool) -> int:
        """Wait as the pace demands; says how many bytes may pass then."""
        with self.changed:
            pace = self.paces.get(way.direction)
            if pace is None:
                return size
            rate = pace.bytes_per_second
            piece = size if rate is None else min(size, max(1, int(rate * _SLICE_SECONDS)))
            seconds = (pace.delay if fresh else 0.0) + (piece / rate if rate else 0.0)
            self.changed.wait_for(lambda: connection.ending or self.paces.get(way.direction) is not pace, seconds)
            return piece

    def _pass(self, connection: Connection, way: Way, chunk: bytes, piece: int) -> bytes:
        """Pass on a piece, up to the next trigger; returns what is left to pass."""
        with self.changed:
            self.changed.wait_for(lambda: connection.ending or way.direction not in self.stalled)
            if connection.ending:
                return b""
            trigger = self._answered(connection, way)
            if trigger is None and way.direction in self.swallowed:
                connection.lost_bytes = True
                return b""
            full = False
            if trigger is None:
                due, place = self._due(way, chunk)
                piece = min(piece, place - way.offset)
                sent = self._send(way, chunk[:piece])
                full, chunk = sent < piece, chunk[sent:]
                if due and way.offset == place:
                    self.triggers.remove(due)
                    trigger = self._reached(connection, due)
            if trigger and trigger.at_once:
                trigger.fire(connection)
        if trigger and not trigger.at_once:  # it may wait for what needs the lock
            trigger.fire(connection)
        elif full:
            _ready(way.target, select.POLLOUT, _SLICE_SECONDS)
        return chunk

    def _due(self, way: Way, chunk: bytes) -> tuple[Trigger | None, int]:
        """The next trigger in this chunk, and the offset where it happens."""
        mine = [trigger for trigger in self.triggers if trigger.direction == way.direction]
        found = [(trigger, place) for trigger in mine if (place := trigger.place(way, chunk)) is not None]
        return min(found, key=lambda item: item[1]) if found else (None, way.offset + len(chunk))

    def _send(self, way: Way, piece: bytes) -> int:
        """Send what the socket takes at once: under the lock, so that nothing passes once a fault is switched on."""
        try:
            sent = way.target.send(piece, socket.MSG_DONTWAIT) if piece else 0
        except BlockingIOError:
            return 0
        way.offset += sent
        way.tail = (way.tail + piece[:sent])[-_TAIL:]
        self.passed[way.direction] += sent
        for trigger in self.triggers:
            if trigger.direction == way.direction:
                trigger.passed(sent)
        return sent

    def _reached(self, connection: Connection, trigger: Trigger) -> Trigger | None:
        """A trigger's bytes are here: it happens now, or when they are answered."""
        if trigger.before or not trigger.answer_within:
            return trigger
        connection.answer = (trigger, time.monotonic() + trigger.answer_within)
        return None

    def _answered(self, connection: Connection, way: Way) -> Trigger | None:
        """The trigger that waited for what comes here."""
        if connection.answer is None or connection.answer[0].direction == way.direction:
            return None
        trigger, _ = connection.answer
        connection.answer = None
        return trigger

    def _finish(self, connection: Connection, way: Way, *, broken: bool = False) -> None:
        """Tell the other side of this side's end, unless the line is such that it can't know."""
        with self.changed:
            self.changed.wait_for(lambda: connection.ending or way.direction not in self.stalled)
            if way.direction in self.swallowed:
                connection.lost_bytes = True
                self.changed.wait_for(lambda: connection.ending)
            elif broken:
                connection.end(reset=True)
            elif not connection.ending:
                with suppress(OSError):
                    way.target.shutdown(socket.SHUT_WR)


def _ready(end: socket.socket, event: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(end, event)
    return bool(poll.poll(max(0.0, seconds) * 1000))
