"""Case 25a: a flow that keeps itself going, and duplicates in it."""

from __future__ import annotations

import json
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest
from sqlalchemy import text

from idemp import App, Context, Idempotent, Message
from idemp.broker.memory import InMemoryBroker
from idemp.broker.port import Ack
from idemp.inbox.memory import InMemoryStore
from idemp.inbox.sql import SqlStore, create_engine_safely
from idemp.messages import Output, OutputKind
from idemp.settings import Settings
from idemp.testing.store_bench import Background
from idemp.worker import Worker
from tests.inbox.sql.kept import make_tables

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from idemp.broker.memory import MemoryPublisher
    from idemp.broker.port import Refusal
    from idemp.inbox.port import InboxStore

TICK = "clock.Tick"


class CountingBroker(InMemoryBroker):
    """Counts how often each tick was published."""

    def __init__(self) -> None:
        super().__init__()
        self.delivered: Counter[int] = Counter()

    def publisher(self) -> MemoryPublisher:
        publisher = super().publisher()
        publish = publisher.publish

        def counted(outputs: Sequence[Output], timeout: float) -> list[Refusal | None]:
            self.delivered.update(json.loads(output.message.body)["n"] for output in outputs)
            return publish(outputs, timeout)

        publisher.publish = counted  # type: ignore[method-assign]
        return publisher


class Flow:
    """Tick n sends tick n + 1 to its own queue."""

    def __init__(
        self, last: int, store: InboxStore | None = None, work: Callable[[Context], object] = lambda ctx: None
    ) -> None:
        self.broker = CountingBroker()
        self.delivered = self.broker.delivered
        self.app = App("clock", store=store or InMemoryStore(), broker=self.broker, settings=Settings())
        self.handled: list[int] = []
        self.reached = threading.Event()
        self.last = last

        @self.app.handler(dict, type=TICK, policy=Idempotent())
        def tick(message: dict[str, Any], ctx: Context) -> None:
            work(ctx)
            self.handled.append(message["n"])
            if message["n"] == self.last:
                self.reached.set()
            else:
                ctx.send({"n": message["n"] + 1}, to="clock", type=TICK)

        self.app.start()

    def put(self, message: Message) -> None:
        """A message in the queue: what arrives twice is a duplicate."""
        output = Output(id=uuid4(), ordinal=0, kind=OutputKind.SEND, exchange="", routing_key="clock", message=message)
        assert self.broker.publisher().publish([output], 1) == [None]


def start() -> Message:
    return Message(body=b'{"n":0}', type=TICK, message_id="start")


@pytest.mark.parametrize("threads", [1, 2])
def test_a_duplicate_starts_no_second_endless_chain(threads: int) -> None:
    flow = Flow(last=300)
    for _ in range(2):
        flow.put(start())
    worker = Worker([flow.app], threads=threads)
    running = Background(worker.run)
    assert flow.reached.wait(30)
    assert flow.broker.join(30)
    worker.stop()
    running.result(30)
    assert flow.handled == list(range(301))


def test_duplicates_die_out_where_many_threads_share_the_flow(postgresql_url: str) -> None:
    """Marks wait in the thread that sent a tick, while its copy reaches another thread, which reads the tick as pending."""
    engine = create_engine_safely(postgresql_url)
    make_tables(engine)
    # A tick's work takes longer than skipping its copy: copies never fall behind.
    flow = Flow(last=100, store=SqlStore(engine), work=lambda ctx: ctx.session.execute(text("SELECT pg_sleep(0.01)")))
    for _ in range(8):
        flow.put(start())
    worker = Worker([flow.app], threads=24)
    running = Background(worker.run)
    assert flow.reached.wait(300)
    assert flow.broker.join(60)
    worker.stop()
    running.result(60)
    engine.dispose()
    assert flow.handled == list(range(101))
    copies = [n for n, number in flow.delivered.items() if number > 1]
    # Each duplicate of the first tick costs a few copies and ends; a ripple would go on to the last tick.
    assert max(copies) < 8, f"ticks with copies: {sorted(copies)[-20:]}"


@pytest.mark.parametrize("step", [0, 1, 7])
def test_what_a_duplicate_costs(step: int) -> None:
    """Step by step: its outputs once more, and those copies end where they arrive."""
    flow = Flow(last=10)
    flow.put(start())
    protocol = flow.app.protocol(flow.broker.publisher())
    receiver = flow.broker.receiver(["clock"], prefetch=1)
    deliveries = []
    while (delivery := receiver.receive(0)) is not None:
        deliveries.append(delivery.message)
        if len(deliveries) == step + 1:
            flow.put(delivery.message)
        assert protocol.handle(delivery)[1] == Ack()
        receiver.settle(delivery, Ack())
    assert flow.handled == list(range(11))
    copies = [message for message in deliveries if message.redispatched]
    assert (len(deliveries), [message.body for message in copies]) == (13, [b'{"n":%d}' % (step + 1)])
