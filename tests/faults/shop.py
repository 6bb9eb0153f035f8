"""A shop on a real RabbitMQ and PostgreSQL, with a fault proxy before each; its consumer goes step by step."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, defaultdict
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from sqlalchemy import make_url, text

from idemp import App, Context, Idempotent, Message, Outcome
from idemp.broker.kombu import KombuBroker
from idemp.broker.kombu.link import Link
from idemp.broker.port import Binding, Topology
from idemp.dispatch import Dispatcher
from idemp.errors import BrokerUnavailable, StoreUnavailable
from idemp.identity import effective_id, output_id
from idemp.inbox.sql import SqlStore, create_engine_safely
from idemp.messages import Output, OutputKind
from idemp.protocol import Protocol
from idemp.relay import Relay, Round
from idemp.settings import Settings
from idemp.testing import FakeClock, FaultProxy
from idemp.testing.store_bench import Background, SqlEffects
from idemp.worker import Worker
from tests.inbox.sql.kept import make_tables
from tests.servers.process import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from uuid import UUID

    from sqlalchemy import Engine

    from idemp.broker.kombu import KombuReceiver
    from idemp.broker.port import Delivery, Settlement
    from idemp.clock import Clock

NAME = "shop"
SELL = "shop.Sell"
SELL_HASTILY = "shop.SellHastily"
STOCK = "stock"
EXCHANGE = "idemp"
SOON = 10.0
HASTE = timedelta(seconds=1.5)  # so long the hasty wait for confirms; a slow machine has to connect in it, too
QUIET = 0.1  # seconds in which nothing may come where nothing should

# AMQP methods as they stand in their frames: class and number.
PUBLISH = b"\x00\x3c\x00\x28"
ACK = b"\x00\x3c\x00\x50"
# PostgreSQL: statements, and how an answer ends.
EFFECT = b"INSERT INTO conformance_effect"
COMMIT = b"COMMIT\0"
COMMITTED = b"COMMIT\0"


def make_app(
    clock: Clock | None,
    store: SqlStore,
    broker: KombuBroker,
    settings: Settings,
    watch: Callable[[], object] = lambda: None,
    haste: timedelta = HASTE,
    **policy: Any,
) -> App:
    """One effect for each message, and an output to each queue that it names; `*` publishes. `watch` sees handlers run."""
    app = App(NAME, store=store, broker=broker, settings=settings, clock=clock)
    effects = SqlEffects(store.engine)

    def sell(message: dict[str, Any], ctx: Context) -> None:
        watch()
        effects.write(ctx, str(ctx.message_id))  # type: ignore[arg-type]
        for number, queue in enumerate(message["to"]):
            content = {"n": number, "of": ctx.message_id}
            if queue == "*":
                ctx.publish(content, type="stock.Reserve")
            else:
                ctx.send(content, to=queue, type="stock.Reserve")

    app.handler(dict, type=SELL, policy=Idempotent(**policy))(sell)
    app.handler(dict, type=SELL_HASTILY, policy=Idempotent(dispatch_timeout=haste, **policy))(sell)
    return app


class Consumer:
    """One consuming thread of a worker, as long as it lives."""

    def __init__(self, app: App, *, marks: int = 50, prefetch: int = 20) -> None:
        self._app = app
        self._prefetch = prefetch
        self._receiver: KombuReceiver | None = None
        self.publisher = app.broker.publisher()
        self.protocol = Protocol(app.consumer, Dispatcher(self.publisher, app.store, app.clock, batch=marks))
        self.outcomes: list[Outcome] = []
        self.lost = 0
        self.away: list[StoreUnavailable] = []

    def step(self, seconds: float = SOON) -> Outcome | None:
        """One delivery, received, handled and settled; `None` if none came, or its link was lost."""
        try:
            if self._receiver is None:
                self._receiver = self._app.broker.receiver([self._app.queue], prefetch=self._prefetch)  # type: ignore[assignment]
            delivery = self._receiver.receive(seconds)  # type: ignore[union-attr]
            if delivery is None:
                return None
            outcome, settlement = self._handled(delivery)
            self.outcomes.append(outcome)
            self._receiver.settle(delivery, settlement)  # type: ignore[union-attr]
        except BrokerUnavailable:
            self.lost += 1
            self._drop()
            return None
        return outcome

    def keep_alive(self) -> None:
        """As a worker's other thread does it: acks that wait for the next delivery go out."""
        if self._receiver is not None:
            self._receiver.keep_alive()

    def _handled(self, delivery: Delivery) -> tuple[Outcome, Settlement]:
        """As a worker does: held while the database is away."""
        for _ in range(5):
            try:
                return self.protocol.handle(delivery)
            except StoreUnavailable as error:
                self.away.append(error)
        raise AssertionError(f"the database stays away: {self.away}")

    def end(self) -> None:
        """A clean end."""
        self.protocol.dispatcher.flush()
        self.die()

    def die(self) -> None:
        """What it did not record is forgotten."""
        self._drop()
        self.publisher.close()

    def _drop(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None


class Shop:
    """The servers behind their proxies, the app, and what can be counted at the end, beside the proxies."""

    def __init__(self, database: str, broker: str, *, clock: Clock | None, **options: Any) -> None:
        self.direct = KombuBroker(broker)
        self.url = broker
        at = make_url(database)
        self.engine = create_engine_safely(database)
        make_tables(self.engine)
        self.in_handler: Callable[[], object] = lambda: None
        self.to_database = FaultProxy(at.host or "", at.port or 0)
        there = make_url(broker.replace("pyamqp", "amqp"))
        self.to_broker = FaultProxy(there.host or "", there.port or 0)
        self.urls = (self.to_database.through(database), self.to_broker.through(broker))
        settings = {name: options.pop(name) for name in list(options) if name in Settings.model_fields}
        self.clock = clock
        self.store = SqlStore(self._engine_through_proxy(), clock=clock)
        self._broker = KombuBroker(self.urls[1], connect_timeout=2.0, settle_timeout=1.0, max_in_flight=1)
        self._settings = Settings(broker_url=self.urls[1], **settings)
        self._options = options
        self.app = self._made(self.store)
        self.app.start()
        binding = Binding(STOCK, "stock.#")
        self.direct.declare(Topology(exchange=EXCHANGE, queues=(STOCK,), bindings=(binding,)))
        self.consumer = Consumer(self.app)
        self.feeder = self.direct.publisher()
        self.sent: dict[str, int] = {}

    def close(self) -> None:
        self.to_broker.heal()
        self.to_database.heal()
        self.consumer.die()
        self.feeder.close()
        self.app.close()
        self.store.engine.dispose()
        self.engine.dispose()
        self.to_broker.close()
        self.to_database.close()

    def quick_app(self) -> App:
        """The same app without the database's proxy, for what is about the broker alone and must be quick."""
        return self._made(SqlStore(self.engine, clock=self.clock))

    def _made(self, store: SqlStore) -> App:
        return make_app(self.clock, store, self._broker, self._settings, self._watch, **self._options)

    def _watch(self) -> None:
        self.in_handler()

    def anew(self) -> None:
        """As if nothing had ever happened here."""
        self.to_broker.heal()
        self.to_database.heal()
        self.consumer.die()
        with self.engine.begin() as connection:
            connection.execute(text("TRUNCATE conformance_effect"))
            connection.execute(
                text("TRUNCATE idemp_inbox, idemp_output, idemp_pending, idemp_history, idemp_unfinished")
            )
            connection.execute(text("UPDATE idemp_worker SET seen_at = NULL"))
        with self.link() as link:
            for queue in (NAME, f"{NAME}.dead", STOCK, *self.delays()):
                link.channel.queue_purge(queue)
        self.sent = {}
        self.in_handler = lambda: None
        self.consumer = Consumer(self.app)

    # Doing -----------------------------------------------------------------------------------------------------------

    def sell(self, *ids: str, to: Sequence[str] = (STOCK, STOCK), hasty: bool = False) -> None:
        """Messages that ask for these outputs."""
        body = json.dumps({"to": list(to)}).encode()
        messages = [Message(body=body, type=SELL_HASTILY if hasty else SELL, message_id=text) for text in ids]
        outputs = [
            Output(
                id=output_id("tests", "feeder", effective_id("envelope", str(message.message_id)).key, 0),
                ordinal=0,
                kind=OutputKind.SEND,
                exchange="",
                routing_key=NAME,
                message=message,
            )
            for message in messages
        ]
        assert self.feeder.publish(outputs, SOON) == [None] * len(outputs)
        self.sent.update(dict.fromkeys(ids, len(to)))

    def reborn(self, app: App | None = None, **options: Any) -> Consumer:
        """The consumer is dead; here is another."""
        self.consumer.die()
        self.consumer = Consumer(app or self.app, **options)
        return self.consumer

    def work(self, done: Callable[[], bool] | None = None, *, seconds: float = 120.0) -> None:
        """Step until a condition holds, or until nothing is left to do; delays pass at once.

        `seconds` is how long no delivery may arrive: however slow the machine is, a run that goes on is not cut off.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:  # without a pause: a step waits for its delivery
            quiet = self.consumer.step(0.05) is None
            if not quiet:
                deadline = time.monotonic() + seconds
            if done is not None:
                if done():
                    return
            elif quiet:
                self.consumer.protocol.dispatcher.flush()
                self.pass_delays()
                if self.at_rest():
                    return
        raise TimeoutError(f"no delivery for {seconds:g} s, and not done")

    def pass_delays(self) -> None:
        """What waits in delay tiers, or for a relay, has waited long enough."""
        with self.engine.begin() as connection:
            connection.execute(text("UPDATE idemp_pending SET due_at = :now"), {"now": self.app.clock.now()})
        with self.link() as link:
            for queue in self.delays():
                while (message := link.channel.basic_get(queue)) is not None:
                    link.channel.basic_publish(message, routing_key=NAME)
                    link.channel.basic_ack(message.delivery_tag)

    def _engine_through_proxy(self) -> Engine:
        # Triggers look for the text of statements, and a prepared one goes by its number.
        told = {"prepare_threshold": None} if self.urls[0].startswith("postgresql") else {}
        return create_engine_safely(self.urls[0], connect_args=told)

    @contextmanager
    def working(self, *, through_database_proxy: bool = False) -> Iterator[None]:
        """A worker runs in a thread of its own; at the end it stops as it does for SIGTERM."""
        engine = self._engine_through_proxy() if through_database_proxy else self.engine
        worker = Worker([self._made(SqlStore(engine))])
        running = Background(worker.run)
        try:
            yield
        finally:
            worker.stop()
            running.result(30.0)
            # A worker does not wait for a relay in the middle of its round; the engine has to.
            wait_until(lambda: not [one for one in threading.enumerate() if one.name.startswith("idemp-")], "its end")
            if engine is not self.engine:
                engine.dispose()

    def pretend_a_relay(self) -> None:
        """Some relay showed life just now: what is pending is safe, and its delivery is acked."""
        self.store.upkeep.beat("relay", relay=True, consumers=[])

    def relay(self, after: timedelta = timedelta(minutes=10)) -> Round:
        """One round of a relay of its own, late enough for everything that is pending."""
        assert isinstance(self.clock, FakeClock)
        self.clock.advance(after)
        with closing(self.app.broker.publisher()) as publisher:
            return Relay(self.store.upkeep, publisher).run_once()

    # Counting --------------------------------------------------------------------------------------------------------

    def effects(self) -> Counter[str]:
        """Effects per message."""
        with self.engine.connect() as connection:
            return Counter(connection.scalars(text("SELECT name FROM conformance_effect")))

    def pending(self) -> list[int]:
        """Which outputs have no recorded confirm."""
        with self.engine.connect() as connection:
            return list(connection.scalars(text("SELECT ordinal FROM idemp_pending ORDER BY ordinal")))

    def pending_ids(self) -> set[str]:
        """Outputs that have no recorded confirm."""
        with self.engine.connect() as connection:
            return {str(found) for found in connection.scalars(text("SELECT output_id FROM idemp_pending"))}

    def arrived(self, queue: str = STOCK) -> list[Message]:
        """All that is in a queue of outputs, left there."""
        return self.direct.browse(queue, 100_000)

    def taken(self, queue: str) -> list[Message]:
        """All that is in a queue, taken out of it."""
        with self.direct.take(queue, None, 100_000) as found:
            for index in range(len(found.messages)):
                found.accept(index)
            return list(found.messages)

    def left(self) -> int:
        """Messages that wait for the consumer, in its delay tiers too."""
        return sum(self.direct.depth(queue) for queue in (NAME, *self.delays()))

    def delays(self) -> list[str]:
        """The delay tiers of the consumer's queue."""
        return [f"{NAME}.delay.{round(1000 * delay)}ms" for delay in self.app.topology().delays]

    def at_rest(self) -> bool:
        """Whether nobody waits for anything."""
        return self.left() == 0 and not self.pending()

    @contextmanager
    def link(self) -> Iterator[Link]:
        """A connection beside the proxy, for what no application of ours does."""
        link = Link.open(self.url, connect_timeout=SOON, heartbeat=0)
        try:
            yield link
        finally:
            link.close()

    def declare(self, queue: str, arguments: Mapping[str, Any]) -> None:
        """A queue with arguments of its own."""
        with self.link() as link:
            link.channel.queue_declare(queue, durable=True, auto_delete=False, arguments=dict(arguments))

    def expected(self, message_id: str) -> list[UUID]:
        """The ids that the outputs of a message must have."""
        key = effective_id("envelope", message_id).key
        return [output_id("idemp", NAME, key, number) for number in range(self.sent[message_id])]

    def all_is_well(self, queues: Sequence[str] = (STOCK,), beside: Sequence[Message] = ()) -> Counter[str]:
        """Each effect once, each output at least once under its one id with one body, nothing left over anywhere.

        Returns:
            How often each output arrived, by id.
        """
        before = -1
        while before != (before := len(self.consumer.outcomes) + self.consumer.lost):
            self.consumer.step(QUIET)  # the broker may notice a lost connection, and give back what was in it, only now
        self.consumer.end()
        assert self.effects() == dict.fromkeys(self.sent, 1)
        seen: Counter[str] = Counter()
        bodies: defaultdict[str, set[bytes]] = defaultdict(set)
        for message in [*beside, *(message for queue in queues for message in self.arrived(queue))]:
            seen[str(message.message_id)] += 1
            bodies[str(message.message_id)].add(message.body)
        assert set(seen) == {str(id_) for message_id in self.sent for id_ in self.expected(message_id)}
        assert all(len(found) == 1 for found in bodies.values())
        assert self.pending() == []
        assert self.left() == 0
        assert self.direct.depth(f"{NAME}.dead") == 0
        return seen


@contextmanager
def a_shop(database: str, broker: str, **options: Any) -> Iterator[Shop]:
    """A shop that stands still between steps: its clock is the test's."""
    with closing(Shop(database, broker, **{"clock": FakeClock(datetime.now(UTC)), **options})) as shop:
        yield shop
