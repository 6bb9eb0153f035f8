"""Publishing over a virtual transport: a call that returned is all the word that its store gives."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Self

from idemp.broker.kombu.virtual.line import told
from idemp.broker.kombu.wire import Parcel, parcel_of
from idemp.broker.port import Endpoint, Refusal
from idemp.errors import BrokerUnavailable, ConfigurationError
from idemp.forking import ForkAware, check_process, renewed_in_child

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from idemp.broker.kombu.virtual.line import Line
    from idemp.messages import Output

    Opens = Callable[[float], Line]

_parents_lines: Final[list[Line]] = []  # of a child: kept, so that no destructor closes them


class VirtualPublisher(ForkAware):
    """Publishes on a connection of its own, which it rebuilds by itself.

    Args:
        opens: opens a connection within so many seconds.
        connect_timeout: seconds for connecting; never more than the deadline of a call leaves.
        endpoint: the store, for traces.
    """

    def __init__(self, opens: Opens, *, connect_timeout: float = 5.0, endpoint: Endpoint | None = None) -> None:
        self.endpoint = endpoint or Endpoint()
        self._opens = opens
        self._connect_timeout = connect_timeout
        self._lock = renewed_in_child(threading.Lock())
        self._line: Line | None = None
        self.track()

    def after_fork_in_child(self) -> None:
        """Open another connection at the next publish."""
        if self._line is not None:
            _parents_lines.append(self._line)
        self._line = None

    def publish(self, outputs: Sequence[Output], timeout: float) -> list[Refusal | None]:
        """Send all within `timeout` seconds in sum; per output `None` if the store took it, else why not."""
        return self.publish_parcels([_packed(output) for output in outputs], timeout)

    def publish_parcels(self, parcels: Sequence[Parcel | Refusal], timeout: float) -> list[Refusal | None]:
        """What `publish` does, for messages that are encoded already or are refused already."""
        check_process()
        deadline = time.monotonic() + timeout
        routes: dict[tuple[str, str], list[str]] = {}
        answers: list[Refusal | None] = []
        broken: Refusal | None = None
        with self._lock:
            for parcel in parcels:
                if isinstance(parcel, Refusal):
                    answers.append(parcel)
                    continue
                if broken is None and time.monotonic() >= deadline:
                    broken = Refusal("timeout", "the time was up before it was sent")
                answer = broken or self._send(parcel, routes, deadline)
                if answer is not None and answer.kind in {"closed", "timeout"}:
                    broken = answer
                answers.append(answer)
        return answers

    def keep_alive(self) -> None:
        """Nothing to do: a connection that died of idleness is replaced."""

    def close(self) -> None:
        """Close the connection. Publishing again opens another."""
        with self._lock:
            self._discard()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, parcel: Parcel, routes: dict[tuple[str, str], list[str]], deadline: float) -> Refusal | None:
        try:
            line = self._ready(deadline)
        except (BrokerUnavailable, ConfigurationError) as error:
            return Refusal("closed", error.message)
        try:
            return _deliver(line, parcel, routes)
        except (TypeError, ValueError) as error:
            return Refusal("unsendable", f"never sent: {error}")
        except line.errors as error:
            # Also where it was refused: it may be a replica by now, and its name lead to another.
            self._discard()
            if isinstance(error, line.refusals):
                return Refusal("nacked", told(error))
            return Refusal("closed" if time.monotonic() < deadline else "timeout", told(error))

    def _ready(self, deadline: float) -> Line:
        left = max(0.05, deadline - time.monotonic())
        if self._line is not None:
            try:
                self._line.limit(left)
            except self._line.errors:
                self._discard()
        if self._line is None:
            self._line = self._opens(min(left, self._connect_timeout))
            self._line.limit(max(0.05, deadline - time.monotonic()))
        return self._line

    def _discard(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None


def _deliver(line: Line, parcel: Parcel, routes: dict[tuple[str, str], list[str]]) -> Refusal | None:
    address = (parcel.exchange, parcel.routing_key)
    if address not in routes:
        if parcel.hop is not None:
            line.declare_queue(parcel.routing_key)
        routes[address] = line.route(*address)
    queues = routes[address]
    if not queues and parcel.mandatory:
        return Refusal("returned", f"no queue takes {parcel.routing_key!r} of exchange {parcel.exchange!r}")
    if not queues and not parcel.exchange:
        queues = [parcel.routing_key]  # somebody may wait there whom kombu's tables do not show
    for queue in queues:
        line.put(queue, bytes(parcel.content.body), parcel.content.properties, delay=parcel.delay)
    return None


def _packed(output: Output) -> Parcel | Refusal:
    try:
        return replace(parcel_of(output), delay=output.delay)
    except ValueError as error:
        return Refusal("unsendable", f"never sent: {error}")
