"""A small service, in few words: an app on an inbox and a broker in memory, whose ports fail where a test says so."""

from __future__ import annotations

import json
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from idemp import App, Context, Idempotent, Message, Outcome
from idemp.broker.memory import InMemoryBroker
from idemp.broker.port import Delivery, Topology
from idemp.bulk.batch import Batch, may_share
from idemp.dispatch import Dispatcher
from idemp.inbox.memory import InMemoryStore
from idemp.inbox.sql import SqlStore, create_engine_safely
from idemp.protocol import Protocol
from idemp.relay import Relay, Round
from idemp.settings import Settings
from idemp.testing.clock import FakeClock
from idemp.testing.faulty import Crash, FaultyPublisher, FaultyStore, Script
from idemp.testing.store_bench import Effects, MemoryEffects, SqlEffects
from tests.inbox.sql.kept import make_tables

if TYPE_CHECKING:
    from collections.abc import Iterator
    from uuid import UUID

    from idemp.broker.port import Settlement

SELL = "shop.Sell"


class House:
    """One consumer. `worker()` is a process of its own: it knows what the store and the broker know, nothing else."""

    def __init__(self, store: Any, effects: Effects, clock: FakeClock, **settings: Any) -> None:
        self.clock = clock
        self.effects = effects
        self.script = Script()
        self.store = FaultyStore(store, self.script)
        self.broker = InMemoryBroker(clock)
        self.broker.declare(Topology(exchange="idemp", queues=("stock",)))
        self.publisher = FaultyPublisher(self.broker.publisher(), self.script)
        self.app = App("shop", store=self.store, broker=self.broker, settings=Settings(**settings), clock=clock)
        self._protocol: Protocol | None = None

    def worker(self) -> Protocol:
        """The process that lives now; a crash ends it."""
        if self._protocol is None:
            self.app.registry.build(self.app.settings.messages)
            dispatcher = Dispatcher(self.publisher, self.store, self.clock)
            self._protocol = Protocol(self.app.consumer, dispatcher, pause=lambda seconds: None)
        return self._protocol

    def sells(self, *, outputs: int = 2, **policy: Any) -> None:
        """The usual handler: one effect, and so many outputs to the queue `stock`."""

        def sell(message: dict[str, Any], ctx: Context) -> None:
            self.effects.write(ctx, "sale")  # type: ignore[arg-type]
            for number in range(outputs):
                ctx.send({"n": number, "sale": message}, to="stock", type="stock.Reserve")

        self.app.handler(dict, type=SELL, policy=Idempotent(**policy))(sell)

    def deliver(self, message: Message | None = None, *, attempt: int = 1) -> Outcome:
        return self.worker().process(message or sale(), attempt=attempt)

    def handle(self, message: Message | None = None, **of_delivery: Any) -> tuple[Outcome, Settlement]:
        return self.worker().handle(Delivery(message=message or sale(), queue="shop", **of_delivery))

    def together(self, *messages: Message, **of_delivery: Any) -> list[tuple[Outcome, Settlement]]:
        """Deliveries that share transactions, and whose outputs are sent together, as a worker does it."""
        protocol, handlings = self.worker(), []
        for message in messages:
            handling = protocol.arrive(Delivery(message=message, queue="shop", **of_delivery))
            assert handling.member is not None
            assert may_share(handling.member.work)
            handling.member.watch.waits()
            handlings.append((handling, handling.member))
        came_to = protocol.together(Batch(protocol, [member for _, member in handlings], protocol.ended))
        sent = []
        for (handling, member), each in zip(handlings, came_to, strict=True):
            with member.turn():
                handling.joined(each)
            shipment = handling.shipment
            if shipment is not None and not shipment.outputs:
                handling.confirmed(protocol.dispatcher.dispatch(shipment))
            elif shipment is not None:
                sent.append((handling, shipment))
        if sent:
            protocol.dispatcher.send(*(shipment for _, shipment in sent))
            ((_, answers),) = protocol.dispatcher.answered()
            for (handling, _), refused in zip(sent, answers, strict=True):
                handling.confirmed(refused)
        return [handling.ended for handling, _ in handlings]

    @contextmanager
    def crashing(self) -> Iterator[None]:
        """The process dies inside of the block; the next delivery finds a new one."""
        try:
            yield
        except Crash:
            self.script.clear()
            self._protocol = None
        else:
            raise AssertionError(f"nothing died; the calls were {self.script.calls}")

    def restart(self) -> None:
        """A clean end, and a new process."""
        self.worker().dispatcher.flush()
        self._protocol = None

    def consume_for_ten_minutes(self) -> None:
        """Windows of five are over for what was there before."""
        for _ in range(20):
            self.clock.advance(timedelta(seconds=30))
            self.app.store.upkeep.beat("w", relay=False, consumers=["shop"])
        self.app.store.refresh_horizons("shop", [timedelta(minutes=5)])

    def relay(self, **options: Any) -> Round:
        """One round of a relay, late enough for everything that is pending."""
        self.clock.advance(timedelta(minutes=10))
        return Relay(self.app.store.upkeep, self.publisher, **options).run_once()

    def sent(self) -> list[tuple[UUID, bytes]]:
        """What reached the broker so far: ids and bodies, in order."""
        return [(output.id, output.message.body) for output in self.publisher.sent]

    def pending(self) -> int:
        self.worker().dispatcher.flush()
        return self.app.store.upkeep.pending_count()

    def sales(self) -> int:
        return self.effects.count("sale")


def sale(text: str = "sale-1", body: Any = None, **properties: Any) -> Message:
    content = body if isinstance(body, bytes) else json.dumps({"sku": "A-1"} if body is None else body).encode()
    return Message(**{"body": content, "type": SELL, "message_id": text, **properties})


def memory_house(**settings: Any) -> House:
    clock = FakeClock()
    store = InMemoryStore(clock)
    return House(store, MemoryEffects(store), clock, **settings)


@contextmanager
def sql_house(url: str = "sqlite://", **settings: Any) -> Iterator[House]:
    clock = FakeClock()
    engine = create_engine_safely(url)
    make_tables(engine)
    store = SqlStore(engine, clock=clock)
    try:
        yield House(store, SqlEffects(engine), clock, **settings)
    finally:
        store.upkeep.close()
        engine.dispose()
