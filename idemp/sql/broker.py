"""A broker in tables of the database: `sql://`, the embedded default.

A message is a row with a due time: ready if that is past, leased if it is ahead. The COMMIT of an INSERT is the confirm.
The broker touches only rows without a history; the others are retries and dead letters of the scheduler.
"""

from __future__ import annotations

import contextlib
import json
import os
import select as system
import time
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, Final

from sqlalchemy import BindParameter, and_, bindparam, case, delete, insert, select, update

from idemp.context import EXCHANGE
from idemp.errors import describe_error
from idemp.messages import Delivery, Output, Refusal, read_properties
from idemp.ports import Finding, Kind
from idemp.sql.engine import Database

__all__ = ["SqlBroker", "SqlPublisher", "SqlReceiver", "matches"]

SHORTEST_PAUSE: Final = 0.01
LONGEST_PAUSE: Final = 0.25


def matches(pattern: str, key: str) -> bool:
    """Return whether a topic pattern takes a routing key: `*` is one word, `#` any number (AMQP 0-9-1).

    Example:
        >>> matches("shop.*", "shop.Order"), matches("shop.#", "shop"), matches("*", "shop.Order")
        (True, True, False)
    """
    words, reached = key.split("."), {0}
    for part in pattern.split("."):
        if part == "#":
            reached = set(range(min(reached), len(words) + 1)) if reached else set()
        else:
            reached = {at + 1 for at in reached if at < len(words) and part in ("*", words[at])}
    return len(words) in reached


class SqlBroker:
    """Queues and bindings in tables.

    Args:
        database: Engines and tables.
        worker: Name of this process: the holder of leased messages.
        lease: Seconds for which a received message is this worker's; `keep_alive` renews it.

    Example:
        >>> SqlBroker(Database("sqlite:///shop.db"), "worker-1").identity
        'sql'
    """

    identity = "sql"

    def __init__(self, database: Database, worker: str, lease: float = 30.0) -> None:
        self.database, self.worker, self.lease = database, worker, lease

    def declare(self, queue: str, types: Sequence[str]) -> list[Finding]:
        """Make a queue, and bind it to the types that it takes. Other bindings stay: another release may need them."""
        tables, dialect = self.database.tables, self.database.dialect
        with self.database.short(queues=True) as connection:
            for name in (queue, f"{queue}.unstorable"):
                connection.execute(dialect.insert_new(tables.queue, ["name"]), {"name": name})
            for type in types:
                bind = dialect.insert_new(tables.binding, ["exchange", "pattern", "queue"])
                connection.execute(bind, {"exchange": EXCHANGE, "pattern": type, "queue": queue})
        return []

    def receiver(self, queue: str, prefetch: int = 40) -> SqlReceiver:
        """Return a new receiver."""
        return SqlReceiver(self, queue, prefetch)

    def publisher(self) -> SqlPublisher:
        """Return a new publisher."""
        return SqlPublisher(self.database)


class SqlPublisher:
    """Inserts messages; COMMIT is the confirm.

    Example:
        >>> SqlPublisher(Database("sqlite:///shop.db")).publish([], 1.0)
        []
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        message, now = database.tables.message, database.dialect.now
        self._insert = insert(message).values(
            queue=bindparam("to"), due_at=now, headers=bindparam("properties"), body=bindparam("text")
        )

    def send(self, outputs: Sequence[Output]) -> None:
        """Do nothing: there is no wait between sending and the confirm."""

    def publish(self, outputs: Sequence[Output], timeout: float) -> list[Refusal | None]:
        """Insert a row for each queue that takes an output."""
        if not outputs:
            return []
        tables = self._database.tables
        answers: list[Refusal | None] = []
        try:
            with self._database.short(queues=True) as connection:
                queues = set(connection.scalars(select(tables.queue.c.name)))
                bindings = connection.execute(select(tables.binding)).all()
                rows = []
                for output in outputs:
                    if output.exchange:
                        key = output.routing_key
                        targets = {
                            each.queue for each in bindings if each.exchange == output.exchange and matches(each.pattern, key)
                        }
                    else:
                        targets = {output.routing_key} & queues
                    returned = output.mandatory and not targets
                    answers.append(Refusal(f"no queue takes {output.routing_key!r}", own=True) if returned else None)
                    text = json.dumps(output.properties).encode()
                    rows += [{"to": queue, "properties": text, "text": output.body} for queue in sorted(targets)]
                if rows:
                    connection.execute(self._insert, rows)
        except Exception as error:  # noqa: BLE001 - nothing was inserted
            outage = self._database.dialect.classify(error) in (Kind.TRANSIENT, Kind.LOST) and not self._answers()
            if outage or len(outputs) == 1:
                return [Refusal(describe_error(error), own=not outage)] * len(outputs)
            return [self.publish([output], timeout)[0] for output in outputs]  # one of them is to blame
        return answers

    def _answers(self) -> bool:
        """Return whether the database is there: some servers close the connection for a message that is too long."""
        try:
            with self._database.short(queues=True) as connection:
                return connection.execute(select(self._database.tables.queue.c.name).limit(1)) is not None
        except Exception:  # noqa: BLE001 - for any reason, it takes nothing
            return False

    def close(self) -> None:
        """Do nothing: connections belong to the pool."""


class SqlReceiver:
    """Leases messages of one queue.

    Attributes:
        leased: Delivery numbers of leased messages, by id.
    """

    def __init__(self, broker: SqlBroker, queue: str, prefetch: int) -> None:
        self._database, self._queue, self._prefetch = broker.database, queue, prefetch
        self.leased: dict[int, int] = {}
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        message, now, worker = self._database.tables.message, self._database.dialect.now, broker.worker
        ids: BindParameter[int] = bindparam("ids", expanding=True)
        ready = (message.c.queue == bindparam("queue"), message.c.history.is_(None), message.c.due_at <= now)
        order = (message.c.due_at, message.c.id)
        self._any_ready = select(message.c.id).where(*ready).limit(1)
        self._ready = self._database.dialect.lock(select(message.c.id).where(*ready).order_by(*order).limit(bindparam("most")))
        lease = {"due_at": now + broker.lease, "holder": worker}
        self._take = update(message).where(message.c.id.in_(ids)).values(deliveries=message.c.deliveries + 1, **lease)
        self._taken = select(message).where(message.c.id.in_(ids)).order_by(message.c.id)
        held = and_(message.c.id == bindparam("row"), message.c.holder == worker)
        ours = and_(held, message.c.deliveries == bindparam("delivery"))
        self._ack = delete(message).where(ours)
        # A message that was given back was not delivered.
        fewer = case((message.c.deliveries > 0, message.c.deliveries - 1), else_=0)
        self._give_back = update(message).where(ours).values(due_at=now, holder=None, deliveries=fewer)
        self._keep = update(message).where(ours).values(due_at=now + broker.lease)

    def receive(self, limit: int, timeout: float) -> list[Delivery]:
        """Return messages that are ready, or wait for some; polls in growing pauses."""
        deadline, pause = time.monotonic() + timeout, SHORTEST_PAUSE
        while not (deliveries := self._lease(min(limit, self._prefetch - len(self.leased)))):
            rest = deadline - time.monotonic()
            if rest <= 0:
                break
            if system.select([self._woken], [], [], min(pause, rest))[0]:
                os.read(self._woken, 1024)
                break
            pause = min(LONGEST_PAUSE, pause * 1.5)
        return deliveries

    def ack(self, deliveries: Sequence[Delivery]) -> None:
        """Delete messages. One whose lease was lost stays, as all do if this fails: they are delivered again."""
        for delivery in deliveries:
            self.leased.pop(delivery.tag[0], None)
        with self._database.short(queues=True) as connection:
            connection.execute(self._ack, list(map(_numbers, map(attrgetter("tag"), deliveries))))

    def keep_alive(self) -> None:
        """Renew the leases."""
        if leased := list(self.leased.items()):
            with self._database.short(queues=True) as connection:
                connection.execute(self._keep, list(map(_numbers, leased)))

    def wake(self) -> None:
        """End a waiting `receive`."""
        with contextlib.suppress(OSError):  # woken often enough, or closed
            os.write(self._wake, b"x")

    def close(self) -> None:
        """Give back leased messages, as if they had not been delivered."""
        if leased := list(self.leased.items()):
            with self._database.short(queues=True) as connection:
                connection.execute(self._give_back, list(map(_numbers, leased)))
        self.leased.clear()
        os.close(self._woken)
        os.close(self._wake)
        self._woken = self._wake = -1

    def _lease(self, limit: int) -> list[Delivery]:
        if limit <= 0:
            return []
        with self._database.queue_engine.connect() as connection:  # no write lock, unless there is something to lease
            if connection.execute(self._any_ready, {"queue": self._queue}).first() is None:
                return []
        with self._database.short(queues=True) as connection:
            ids = connection.scalars(self._ready, {"queue": self._queue, "most": limit}).all()
            if not ids:  # another worker was faster
                return []
            connection.execute(self._take, {"ids": ids})
            rows = connection.execute(self._taken, {"ids": ids}).all()
        deliveries = []
        for row in rows:
            self.leased[row.id] = row.deliveries
            properties, again = read_properties(row.headers), row.deliveries > 1
            deliveries.append(Delivery(row.queue, properties, row.body, again, (row.id, row.deliveries)))
        return deliveries


def _numbers(tag: tuple[int, int]) -> dict[str, Any]:
    return {"row": tag[0], "delivery": tag[1]}
