"""A durable broker in one file, for the demo and for services on one machine."""

from __future__ import annotations

from contextlib import closing, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Final, Self

from idemp.broker.copies import properties_text
from idemp.broker.local.file import (
    DELAYED,
    DURABLE,
    READY,
    SYNCHRONOUS,
    FileBusy,
    Link,
    declare,
    file_of,
    identity,
    prepare,
    queue_id,
    restore,
)
from idemp.broker.local.leases import Holder, bury, messages, owners_of
from idemp.broker.local.receiver import LocalReceiver
from idemp.broker.port import Ack, Endpoint, Guarantees, Refusal
from idemp.broker.routing import matches
from idemp.clock import SystemClock
from idemp.errors import BrokerError, BrokerUnavailable, ConfigurationError
from idemp.forking import ForkAware, check_process

if TYPE_CHECKING:
    import os
    import sqlite3
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path
    from types import TracebackType

    from idemp.broker.local.leases import Leased
    from idemp.broker.port import Topology
    from idemp.clock import Clock
    from idemp.messages import Message, Output

REDELIVERY_SLACK: Final = 3600.0
DEFAULT_LEASE: Final = timedelta(seconds=30)


class LocalBroker:
    """Queues in a SQLite file that processes and threads of one machine share.

    A publish is confirmed when it is on the disk. What a receiver holds is leased: it comes back as soon as the
    receiver's process is dead, or when the lease was not renewed in time. A message's `ttl` and `priority` are kept
    with it and have no effect. The file must be on a local disk, and is nobody else's: never the inbox's database. If the
    file is deleted or replaced, nothing more is confirmed or settled (`BrokerReplaced`). Broker and publishers may be used
    on both sides of a fork; a receiver stays with the process that made it.

    Args:
        path_or_url: the file, made when missing; or `local:///absolute/file.db`, `local://relative.db`.
        clock: source of time for delays and leases.
        lease: how long a message stays in the hands of a receiver that neither settles it nor calls `keep_alive`.
        synchronous: SQLite's setting; below "FULL" a power failure loses confirmed messages.

    Raises:
        ConfigurationError: the file can't be used, or belongs to something else.

    Example:
        >>> import tempfile
        >>> from uuid import UUID
        >>> from idemp.broker.port import Topology
        >>> from idemp.messages import Message, Output, OutputKind
        >>> folder = tempfile.TemporaryDirectory()
        >>> broker = LocalBroker(f"local://{folder.name}/queues.db")
        >>> broker.declare(Topology(exchange="events", queues=("orders",)))
        >>> output = Output(id=UUID(int=1), ordinal=0, kind=OutputKind.SEND, exchange="", routing_key="orders",
        ...                 message=Message(body=b"{}"))
        >>> publisher = broker.publisher()
        >>> publisher.publish([output], timeout=5)
        [None]
        >>> receiver = broker.receiver(["orders"], prefetch=10)
        >>> delivery = receiver.receive(timeout=5)
        >>> receiver.settle(delivery, Ack())
        >>> receiver.close(); publisher.close(); folder.cleanup()
    """

    def __init__(
        self,
        path_or_url: str | os.PathLike[str],
        *,
        clock: Clock | None = None,
        lease: timedelta = DEFAULT_LEASE,
        synchronous: str = "FULL",
    ) -> None:
        if synchronous.upper() not in SYNCHRONOUS:
            raise ConfigurationError(f"synchronous={synchronous!r} is none of {', '.join(SYNCHRONOUS)}.")
        if lease <= timedelta(0):
            raise ConfigurationError(f"lease={lease!r} is no time at all.")
        self._path = file_of(path_or_url).absolute()
        self._clock = clock or SystemClock()
        self._lease = lease.total_seconds()
        self._synchronous = synchronous.upper()
        self._identity = prepare(self._path)

    @property
    def guarantees(self) -> Guarantees:
        """What the file promises with these settings."""
        durable = self._synchronous in DURABLE
        return Guarantees(
            name="local",
            at_least_once=durable,
            confirms=durable,
            delays="in place",
            horizon_seconds=self._lease + REDELIVERY_SLACK,
            remarks="One machine, one file; what a dead process held comes back at once, else when its lease runs out."
            if durable
            else f"synchronous={self._synchronous}: a power failure loses confirmed messages.",
        )

    @property
    def path(self) -> Path:
        """The file."""
        return self._path

    def declare(self, topology: Topology) -> None:
        """Make queues, their dead-letter queues and bindings."""
        with self._link() as link:
            declare(link, topology)

    def receiver(self, queues: Sequence[str], *, prefetch: int) -> LocalReceiver:
        """A receiver on a connection of its own."""
        return LocalReceiver(self._holder(queues), prefetch)

    def identity(self) -> str:
        """The file's own id, which stays with it wherever it is moved; a file made anew is another broker.

        Raises:
            BrokerUnavailable: the file can't be read or written.
        """
        with closing(Link(self._path, self._synchronous)) as link:
            return f"embedded broker {identity(link)}"

    def publisher(self) -> LocalPublisher:
        """A publisher on a connection of its own."""
        return LocalPublisher(self._open, self._clock)

    def browse(self, queue: str, limit: int) -> list[Message]:
        """Up to `limit` ready messages, oldest first."""
        with self._restored(queue) as (raw, number):
            return list(messages(raw, number, limit))

    def take(self, queue: str, wanted: Sequence[str] | None, limit: int) -> LocalTaken:
        """Lease up to `limit` ready messages, oldest first."""
        holder = self._holder([queue])
        try:
            holder.bury()
            return LocalTaken(holder, holder.lease(limit, wanted))
        except BaseException:
            holder.close()
            raise

    def depth(self, queue: str) -> int:
        """How many messages are ready."""
        with self._restored(queue) as (raw, number):
            sql = f"SELECT count(*) FROM messages WHERE queue = ? AND state = {READY}"
            return int(raw.execute(sql, (number,)).fetchone()[0])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self._path)!r})"

    def _holder(self, queues: Sequence[str]) -> Holder:
        with self._link() as link, link.transaction(kind="DEFERRED") as raw:
            names = {queue_id(raw, name): name for name in queues}
        return Holder(self._path, self._open, names, self._lease, self._clock)

    def _open(self) -> Link:
        return Link(self._path, self._synchronous, self._identity)

    @contextmanager
    def _link(self) -> Iterator[Link]:
        """A connection for one call: the broker itself keeps none, so that it may be passed on to threads and forks."""
        link = self._open()
        try:
            yield link
        finally:
            link.close()

    @contextmanager
    def _restored(self, queue: str) -> Iterator[tuple[sqlite3.Connection, int]]:
        """A transaction that sees as ready what has come back to a queue, and the queue's number."""
        with self._link() as link:
            with link.transaction(kind="DEFERRED") as raw:
                number = queue_id(raw, queue)
            bury(link, owners_of(self._path), [number])
            with link.transaction(durable=False) as raw:
                restore(raw, [number], self._clock.now().timestamp())
                yield raw, number


class LocalPublisher(ForkAware):
    """Publishes to the file of a `LocalBroker`: all outputs of a call in one transaction."""

    endpoint = Endpoint("idemp_local")

    def __init__(self, opens: Callable[[], Link], clock: Clock) -> None:
        self._opens = opens
        self._clock = clock
        self._link: Link | None = None
        self.track()

    def after_fork_in_child(self) -> None:
        """Open another connection at the next publish."""
        self._link = None

    def publish(self, outputs: Sequence[Output], timeout: float) -> list[Refusal | None]:
        """Put all into their queues; they are confirmed when COMMIT is through."""
        if not outputs:
            return []
        check_process()
        try:
            if self._link is None:
                self._link = self._opens()
            with self._link.transaction(timeout) as raw:
                return [self._publish(raw, output) for output in outputs]
        except FileBusy as error:
            return [Refusal("timeout", error.message)] * len(outputs)
        except BrokerUnavailable as error:
            self.close()
            return [Refusal("closed", error.message)] * len(outputs)

    def keep_alive(self) -> None:
        """There is no link that could go idle."""

    def close(self) -> None:
        """Close the connection; the next publish opens another."""
        if self._link is not None:
            self._link.close()
            self._link = None

    def _publish(self, raw: sqlite3.Connection, output: Output) -> Refusal | None:
        try:
            properties = properties_text(output.message)
        except (TypeError, ValueError) as error:
            return Refusal("unsendable", f"the headers are no JSON: {error}")
        queues = _route(raw, output)
        if not queues and output.mandatory:
            return Refusal("returned", f"no queue takes {output.routing_key!r} of exchange {output.exchange!r}")
        due = self._clock.now().timestamp() + output.delay if output.delay > 0 else None
        state = READY if due is None else DELAYED
        for queue in queues:
            number = raw.execute(
                "INSERT INTO messages (queue, state, due, lease, properties) VALUES (?, ?, ?, ?, ?)",
                (queue, state, due, None if due is None else round(1000 * output.delay), properties),
            ).lastrowid
            raw.execute("INSERT INTO bodies (id, body) VALUES (?, ?)", (number, output.message.body))
        return None


def _route(raw: sqlite3.Connection, output: Output) -> list[int]:
    """The queues that take an output."""
    if output.exchange == "":
        return [number for (number,) in raw.execute("SELECT id FROM queues WHERE name = ?", (output.routing_key,))]
    bindings = raw.execute("SELECT pattern, queue FROM bindings WHERE exchange = ?", (output.exchange,))
    return sorted({queue for pattern, queue in bindings if matches(pattern, output.routing_key)})


class LocalTaken:
    """Messages taken out of a queue of a `LocalBroker`: leased, and renewed by each `accept`."""

    def __init__(self, holder: Holder, leased: Sequence[Leased]) -> None:
        self.messages: Sequence[Message] = [each.message for each in leased]
        self._holder = holder
        self._left = dict(enumerate(leased))
        self._renew_at = holder.now() + holder.seconds / 3

    def accept(self, index: int) -> None:
        """Remove one for good.

        Raises:
            BrokerUnavailable: it took too long, and somebody else has it.
        """
        if index not in self._left:
            raise BrokerError(f"The message {index} is not in our hands: it was accepted before.")
        self._holder.settle(self._left[index], Ack())
        del self._left[index]
        if self._holder.now() >= self._renew_at:
            self._holder.renew()
            self._renew_at = self._holder.now() + self._holder.seconds / 3

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._holder.close()
