"""A service on any broker and database whose handler fails as its messages say, and that counts what it does."""

from __future__ import annotations

import json
import threading
from collections import Counter
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from sqlalchemy import Column, Integer, MetaData, String, Table, insert, select

from idemp import App, Context, Idempotent, Message, Output
from idemp.broker.port import Topology
from idemp.inbox.sql import create_engine_safely
from idemp.messages import OutputKind
from idemp.settings import Settings
from idemp.testing.store_bench import Background
from idemp.worker import Worker
from tests.inbox.sql.kept import make_tables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from idemp.broker.port import Broker

QUEUE = "mill"
TYPE = "mill.Grind"
EFFECT = Table("effect", MetaData(), Column("id", Integer, primary_key=True), Column("item", String(40)))

FINE, ONCE, ALWAYS = "fine", "once", "always"


class Jammed(Exception):
    """What the handler raises."""


class Mill:
    """The service. Its messages fail never, at their first run, or always.

    Attributes:
        runs: the handler's runs, in order: the message's id, and the number of the run.
        during: called in each run, with the message and the number of the run, after the effect and before COMMIT.
    """

    def __init__(self, database: str, broker: Broker, *, settings: dict[str, Any] | None = None, **policy: Any) -> None:
        self.engine = create_engine_safely(database)
        self._beside = create_engine_safely(database)  # looks on, whatever happens to the service's connections
        make_tables(self.engine)
        EFFECT.metadata.create_all(self.engine)
        self.broker = broker
        self.runs: list[tuple[str, int]] = []
        self.during: Callable[[dict[str, Any], int], object] = lambda message, run: None
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        made = Settings(allow_at_most_once=not broker.guarantees.at_least_once, **settings or {})
        self.app = App(QUEUE, database=self.engine, broker=broker, settings=made)
        self.app.handler(dict, type=TYPE, policy=Idempotent(attempts=3, **policy))(self.grind)
        self.app.start()
        broker.declare(Topology(exchange="idemp", queues=("flour",)))

    def grind(self, message: dict[str, Any], ctx: Context) -> None:
        """One effect and one output, and then perhaps an error."""
        item = str(ctx.message_id)
        with self._lock:
            self._counts[item] += 1
            run = self._counts[item]
            self.runs.append((item, run))
        ctx.connection.execute(insert(EFFECT), {"item": item})
        ctx.send({"item": item}, to="flour", type="mill.Ground")
        self.during(message, run)
        if message["fails"] == ALWAYS or (message["fails"] == ONCE and run == 1):
            raise Jammed(f"{item} at its run {run}")

    def send(self, kinds: Sequence[str]) -> dict[str, list[Message]]:
        """Messages of these kinds, in this order; by kind what was sent."""
        sent: dict[str, list[Message]] = {}
        outputs = []
        for number, kind in enumerate(kinds):
            identity = uuid4()
            message = Message(
                body=json.dumps({"fails": kind, "note": "ünverändert"}).encode(),
                type=TYPE,
                message_id=str(identity),
                correlation_id=f"c-{number}",
                headers={"tenant": number},
            )
            sent.setdefault(kind, []).append(message)
            outputs.append(
                Output(
                    id=identity, ordinal=number, kind=OutputKind.SEND, exchange="", routing_key=QUEUE, message=message
                )
            )
        with closing(self.broker.publisher()) as publisher:
            assert publisher.publish(outputs, 30) == [None] * len(outputs)
        return sent

    @contextmanager
    def working(self, threads: int) -> Iterator[None]:
        """A real worker during the block; it ends in good order."""
        worker = Worker([self.app], threads=threads)
        running = Background(worker.run)
        try:
            yield
        finally:
            worker.stop()
            running.result(40)

    def effects(self) -> Counter[str]:
        """How often each message had its effect."""
        with self._beside.connect() as connection:
            return Counter(connection.scalars(select(EFFECT.c.item)))

    def outputs(self) -> Counter[str]:
        """How often the output of each message arrived."""
        return Counter(json.loads(message.body)["item"] for message in self.broker.browse("flour", 1000))

    def depth(self, queue: str) -> int:
        return self.broker.depth(queue)

    def close(self) -> None:
        self.app.close()
        self.engine.dispose()
        self._beside.dispose()
