"""Idempotent subscribers of FastStream: in its test broker, and in processes that are killed, on real RabbitMQ and PostgreSQL."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing, contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any

import aio_pika
import pika
import pytest
from faststream import AckPolicy, BaseMiddleware
from faststream.exceptions import AckMessage
from faststream.rabbit import (
    Channel,
    ExchangeType,
    QueueType,
    RabbitBroker,
    RabbitExchange,
    RabbitMessage,
    RabbitQueue,
    RabbitRouter,
    TestRabbitBroker,
)
from faststream.redis import RedisBroker
from pydantic import BaseModel
from sqlalchemy import create_engine, make_url, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from idemp import AsyncInbox, ConfigurationError
from idemp.errors import BlockEnded, Conflict, HandlerError, Unreadable, UnusableOutput
from idemp.integrations.faststream import Session, install
from idemp.sql.engine import Database
from tests.integrations.service import TABLES, Service, on_postgresql
from tests.servers import ask
from tests.servers.databases import query
from tests.sql.test_outages import end_sessions, role
from tests.worker.test_loop import wait_for
from tests.world import let_pass

__all__ = ["role"]

ROUNDS = 3
CHANNEL = Channel(prefetch_count=2)
NACK: Any = {"ack_policy": AckPolicy.NACK_ON_ERROR, "channel": CHANNEL}


class Pay(BaseModel):
    order_id: int
    cents: int = 100


class Shop:
    """Subscribers in the process of a test."""

    def __init__(self, url: str) -> None:
        self.ran, self.arrived, self.reader = list[str](), list[tuple[Any, str]](), create_engine(url)
        self.query("CREATE TABLE changed (what TEXT)")
        self.engine = create_async_engine(url.replace("sqlite:", "sqlite+aiosqlite:"))
        self.broker = broker = RabbitBroker("amqp://localhost/shop")
        self.idempotent = idempotent = install(broker, AsyncInbox(self.engine), consumer="shop")

        @broker.subscriber(RabbitQueue("orders"), **NACK)
        @broker.publisher("parcels")
        @idempotent("shop.Pay")
        async def pay(order: Pay, session: Session) -> dict[str, int]:
            await self.change(session, f"pay {order.order_id}")
            await broker.publish({"order": order.order_id}, "notes", headers={"by": "pay"}, expiration=60)
            if order.cents < 0:
                raise ValueError("negative")
            if order.cents == 0:
                raise AckMessage
            return {"parcel": order.order_id}

        @broker.subscriber(RabbitQueue("parcels"), **NACK)
        @idempotent("shop.Pack", key=lambda message: message.body.decode())
        async def pack(parcel: dict[str, int], session: Session) -> None:
            await self.change(session, f"pack {parcel['parcel']}")

        @broker.subscriber("notes")
        async def note(body: dict[str, int], message: RabbitMessage) -> None:
            self.arrived.append((body["order"], message.message_id))

    async def change(self, session: AsyncSession, what: str) -> None:
        self.ran.append(what)
        await session.execute(text("INSERT INTO changed VALUES (:what)"), {"what": what})

    def query(self, statement: str) -> list[tuple[Any, ...]]:
        with self.reader.begin() as connection:
            found = connection.execute(text(statement))
            return [tuple(row) for row in found] if found.returns_rows else []

    def run(self, steps: Callable[[RabbitBroker], Coroutine[Any, Any, None]]) -> list[str]:
        """Run steps in the test broker, and return what is committed."""

        async def run() -> None:
            async with TestRabbitBroker(self.broker) as broker:
                await steps(broker)
            await self.engine.dispose()

        asyncio.run(run())
        return [what for (what,) in self.query("SELECT what FROM changed")]


@pytest.fixture
def shop(url: str) -> Iterator[Shop]:
    shop = Shop(url)
    yield shop
    shop.reader.dispose()


def test_what_a_subscriber_publishes_arrives_after_commit(shop: Shop) -> None:
    async def steps(broker: RabbitBroker) -> None:
        for _ in range(2):
            await broker.publish(Pay(order_id=7), "orders", message_id="seven")

    assert shop.run(steps) == ["pay 7", "pack 7"]
    assert shop.ran == ["pay 7", "pack 7"]
    assert [order for order, _ in shop.arrived] == [7]
    assert shop.query("SELECT 1 FROM idemp_pending") == []


def test_a_subscriber_that_fails_publishes_nothing(shop: Shop) -> None:
    async def steps(broker: RabbitBroker) -> None:
        with pytest.raises(ValueError, match="negative"):
            await broker.publish(Pay(order_id=7, cents=-1), "orders", message_id="seven")
        await broker.publish(Pay(order_id=8, cents=0), "orders", message_id="eight")  # acknowledged, so committed

    assert shop.run(steps) == ["pay 8"]
    assert [order for order, _ in shop.arrived] == [8]
    assert shop.query("SELECT count(*) FROM idemp_inbox") == [(1,)]


def test_other_middleware_that_calls_again_has_one_effect(shop: Shop) -> None:
    """Each call is a transaction; and an error that it counts as handled leaves nothing behind."""
    runs: list[int] = []

    class Retry(BaseMiddleware):
        async def consume_scope(self, call_next: Any, msg: Any) -> Any:
            with suppress(LookupError):
                for _ in "ab":
                    with suppress(ConnectionError):
                        return await call_next(msg)
            return None

    broker = RabbitBroker("amqp://localhost/shop", middlewares=[Retry])
    idempotent = install(broker, AsyncInbox(shop.engine), consumer="again")

    @broker.subscriber(RabbitQueue("again"), **NACK)
    @idempotent("shop.Again")
    async def again(what: str, session: Session) -> None:
        await shop.change(session, what)
        await broker.publish(what, "heard")
        runs.append(1)
        if what == "handled":
            raise LookupError
        if len(runs) == 1:
            raise ConnectionError

    @broker.subscriber("heard")
    async def hear(what: str, message: RabbitMessage) -> None:
        shop.arrived.append((what, message.message_id))

    shop.broker = broker

    async def steps(broker: RabbitBroker) -> None:
        await broker.publish("again", "again", message_id="1")
        await broker.publish("handled", "again", message_id="2")

    assert shop.run(steps) == ["again"]
    assert (len(runs), [what for what, _ in shop.arrived]) == (3, ["again"])
    assert shop.query("SELECT count(*) FROM idemp_inbox") == [(1,)]


def test_what_is_published_too_late_is_refused(shop: Shop) -> None:
    """By a part of a subscriber that outlives it: it would be sent without a commit, or after one under a new id each time."""
    late: list[asyncio.Task[None]] = []

    @shop.broker.subscriber(RabbitQueue("late"), **NACK)
    @shop.idempotent("shop.Late")
    async def begin(what: str) -> None:
        async def publish() -> None:
            await over.wait()
            await shop.broker.publish({"order": 9}, "notes")

        over = asyncio.Event()
        late.append(asyncio.create_task(publish()))
        asyncio.get_running_loop().call_later(0.01, over.set)
        raise ValueError(what)

    async def steps(broker: RabbitBroker) -> None:
        with pytest.raises(ValueError, match="late"):
            await broker.publish("late", "late", message_id="1")
        with pytest.raises(HandlerError):
            await late[0]

    assert shop.run(steps) == []
    assert shop.arrived == []


def test_middleware_of_a_router_sees_what_is_published(shop: Shop) -> None:
    """And an exchange that needs no routing key takes it."""

    class Stamp(BaseMiddleware):
        async def publish_scope(self, call_next: Any, cmd: Any) -> Any:
            cmd.headers["tenant"] = "7"
            return await call_next(cmd)

    router, fan, heard = RabbitRouter(middlewares=[Stamp]), RabbitExchange("fan", type=ExchangeType.FANOUT), list[Any]()

    @router.subscriber(RabbitQueue("routed"), **NACK)
    @router.publisher("stamped")
    @shop.idempotent("shop.Routed")
    async def route(what: str) -> str:
        await shop.broker.publish(what, exchange=fan)
        return what

    @shop.broker.subscriber("stamped")
    async def hear(what: str, message: RabbitMessage) -> None:
        heard.append((what, message.headers.get("tenant")))

    @shop.broker.subscriber(RabbitQueue("fanned"), fan)
    async def fanned(what: str) -> None:
        heard.append((what, "fan"))

    shop.broker.include_router(router)

    async def steps(broker: RabbitBroker) -> None:
        await broker.publish("x", "routed", message_id="1")

    shop.run(steps)
    assert sorted(heard) == [("x", "7"), ("x", "fan")]


@pytest.mark.parametrize(
    "key", [lambda message: message.headers["none"], lambda message: message.body, lambda _: None, lambda _: 1.5]
)
def test_a_key_that_is_none_is_the_fault_of_the_message(shop: Shop, key: Any) -> None:
    @shop.broker.subscriber(RabbitQueue("keyed"), **NACK)
    @shop.idempotent("shop.Keyed", key=key)
    async def keyed(_: str) -> None:
        raise AssertionError

    async def steps(broker: RabbitBroker) -> None:
        with pytest.raises(Unreadable, match=r"shop\.Keyed: .*not claimed"):
            await broker.publish("x", "keyed", message_id="1")

    shop.run(steps)


def test_a_subscriber_that_is_added_later_is_checked(shop: Shop) -> None:
    async def steps(broker: RabbitBroker) -> None:
        await broker.publish(Pay(order_id=7), "orders", message_id="seven")

        @broker.subscriber(RabbitQueue("dynamic"), channel=CHANNEL)
        @shop.idempotent("shop.Dynamic")
        async def dynamic(_: str) -> None:
            raise AssertionError

        await broker.start()
        with pytest.raises(ConfigurationError, match=r"shop\.Dynamic may lose messages"):
            await broker.publish("x", "dynamic", message_id="1")

    shop.run(steps)


def test_the_transaction_belongs_to_the_claim(shop: Shop) -> None:
    @shop.broker.subscriber(RabbitQueue("commits"), **NACK)
    @shop.idempotent("shop.Commit")
    async def commit(order: Pay, session: Session) -> None:
        await shop.change(session, "commit")
        await session.commit()

    async def steps(broker: RabbitBroker) -> None:
        with pytest.raises(BlockEnded):
            await broker.publish(Pay(order_id=7), "commits", message_id="seven")
        await broker.publish(Pay(order_id=7), "orders", message_id="seven")
        with pytest.raises(Conflict):
            await broker.publish(Pay(order_id=8), "orders", message_id="seven")

    assert shop.run(steps) == ["pay 7", "pack 7"]


def test_a_subscriber_is_found_below_and_above_other_decorators(shop: Shop) -> None:
    """Two of them share a queue, by filters, and its prefetch count."""

    def decorated(function: Any) -> Any:
        @wraps(function)
        async def wrapper(*arguments: Any, **named: Any) -> Any:
            return await function(*arguments, **named)

        return wrapper

    subscriber = shop.broker.subscriber(RabbitQueue("both"), **NACK | {"channel": Channel(prefetch_count=8)})

    @subscriber(filter=lambda message: message.headers.get("above"))
    @decorated
    @shop.idempotent("shop.Above")
    async def above(order_id: int, session: Session) -> None:
        await shop.change(session, f"above {order_id}")

    @subscriber
    @shop.idempotent("shop.Below")
    @decorated
    async def below(order_id: int, session: Session) -> None:
        await shop.change(session, f"below {order_id}")

    async def steps(broker: RabbitBroker) -> None:
        for headers in ({}, {"above": "yes"}):
            for _ in range(2):
                await broker.publish(7, "both", message_id="seven", headers=headers)

    assert shop.run(steps) == ["below 7", "above 7"]
    assert shop.ran == ["below 7", "above 7"]


def test_a_request_is_sent_at_once_and_its_reply_is_stored(shop: Shop) -> None:
    price = shop.broker.publisher("prices")

    @shop.broker.subscriber("prices")
    async def answer(order_id: int) -> int:
        return 100 * order_id

    @shop.broker.subscriber(RabbitQueue("asks"), **NACK)
    @shop.idempotent("shop.Ask")
    async def ask(order_id: int, session: Session) -> int:
        found = [await (await shop.broker.request(order_id, "prices")).decode(), await (await price.request(order_id)).decode()]
        await shop.change(session, f"asked {found}")
        return sum(found)

    async def steps(broker: RabbitBroker) -> None:
        assert await (await broker.request(7, "asks", message_id="seven")).decode() == 1400

    assert shop.run(steps) == ["asked [700, 700]"]


def test_an_aio_pika_message_and_no_message_are_stored(shop: Shop) -> None:
    got = list[Any]()

    @shop.broker.subscriber("raw")
    async def raw(body: Any, message: RabbitMessage) -> None:
        got.append((body, message.raw_message.priority, message.message_id))

    @shop.broker.subscriber(RabbitQueue("sends"), **NACK)
    @shop.broker.publisher("raw")
    @shop.idempotent("shop.Send")
    async def send(order_id: int) -> None:
        await shop.broker.publish(aio_pika.Message(b"[1]", content_type="application/json", message_id="m"), "raw")
        await shop.broker.publish([2], "raw", message_id="n", priority=3)

    async def steps(broker: RabbitBroker) -> None:
        await broker.publish(7, "sends", message_id="seven")

    shop.run(steps)
    assert [(body, priority) for body, priority, _ in got] == [([1], 0), ([2], 3), (None, 0)]
    assert [id for *_, id in got[:2]] == ["m", "n"]


def test_a_reply_of_a_subscriber_that_cannot_commit_is_not_sent(shop: Shop) -> None:
    """Neither is what it returns to a publisher: both are sent behind its body, and before COMMIT."""
    got = list[Any]()

    @shop.broker.subscriber("raw")
    async def raw(body: Any) -> None:
        got.append(body)

    @shop.broker.subscriber(RabbitQueue("sends"), **NACK)
    @shop.broker.publisher("raw", headers={"made": b"not JSON"})
    @shop.broker.publisher("raw")
    @shop.idempotent("shop.Send")
    async def send(order_id: int, session: Session) -> int:
        await shop.change(session, "send")
        return order_id

    async def steps(broker: RabbitBroker) -> None:
        with pytest.raises(UnusableOutput):
            await broker.publish(7, "sends", message_id="seven", reply_to="raw")

    assert shop.run(steps) == []
    assert got == []


@pytest.mark.filterwarnings("ignore:The integration has been moved:DeprecationWarning")
def test_a_router_of_fastapi(shop: Shop) -> None:
    from faststream.rabbit.fastapi import Context, RabbitRouter

    router = RabbitRouter("amqp://localhost/shop")
    shop.broker = router.broker
    idempotent = install(router.broker, AsyncInbox(shop.engine), consumer="shop")

    @router.subscriber(RabbitQueue("orders"), **NACK)
    @idempotent("shop.Pay")
    async def pay(order: Pay, session: Any = Context("idemp_session")) -> None:  # noqa: B008
        await shop.change(session, f"pay {order.order_id}")

    async def steps(broker: RabbitBroker) -> None:
        for _ in range(2):
            await broker.publish(Pay(order_id=7), "orders", message_id="seven")

    assert shop.run(steps) == ["pay 7"]
    assert shop.ran == ["pay 7"]


FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"ack_policy": AckPolicy.ACK_FIRST}, "may lose messages by AckPolicy.ACK_FIRST: set AckPolicy.NACK_ON_ERROR"),
    ({"ack_policy": AckPolicy.ACK}, "may lose messages by AckPolicy.ACK: set AckPolicy.NACK_ON_ERROR"),
    ({"ack_policy": AckPolicy.MANUAL}, "may lose messages by AckPolicy.MANUAL: set AckPolicy.NACK_ON_ERROR"),
    (
        {},
        "may lose messages by AckPolicy.REJECT_ON_ERROR: set AckPolicy.NACK_ON_ERROR, or reject into x-dead-letter-exchange",
    ),
    ({**NACK, "channel": None}, r"takes any number of messages at once: set channel=Channel\(prefetch_count=10\)"),
    ({**NACK, "channel": Channel()}, "takes any number of messages at once"),
    (
        {**NACK, "channel": Channel(prefetch_count=16)},
        "prefetch_count is 16 in all, the engine has fewer connections: set its pool_size to that",
    ),
    ({**NACK, "queue": RabbitQueue("stream", queue_type=QueueType.STREAM)}, "reads a stream, which takes nothing back"),
]


@pytest.mark.parametrize(("options", "said"), FAULTS)
def test_each_refusal_names_its_fix(options: dict[str, Any], said: str) -> None:
    broker = RabbitBroker()
    idempotent = install(broker, AsyncInbox(create_async_engine("sqlite+aiosqlite:///nowhere.db")), consumer="shop")

    @broker.subscriber(**{"queue": RabbitQueue("orders"), **options})
    @idempotent("shop.Pay")
    async def pay(order: Pay) -> None: ...

    with pytest.raises(ConfigurationError, match=said):
        asyncio.run(broker.start())


def test_what_cannot_be_installed_is_refused() -> None:
    inbox = AsyncInbox(create_async_engine("sqlite+aiosqlite:///nowhere.db"))
    with pytest.raises(ConfigurationError, match="RedisBroker is not supported, as outputs are sent by AMQP: use a RabbitBroker"):
        install(RedisBroker(), inbox, consumer="shop")  # type: ignore[arg-type]
    idempotent = install(RabbitBroker(), inbox, consumer="shop")
    with pytest.raises(ConfigurationError, match="this inbox has a broker"):
        install(RabbitBroker(), inbox, consumer="shop")
    idempotent("shop.Pay")(asyncio.sleep)
    with pytest.raises(ConfigurationError, match="one name of its own"):
        idempotent("shop.Pay")(asyncio.wait_for)
    with pytest.raises(ConfigurationError, match="one name of its own"):
        idempotent("shop.Refund")(asyncio.sleep)
    with pytest.raises(ConfigurationError, match="an async def"):
        idempotent("shop.Print")(print)


class Processes(Service):
    """The subscribers of `faststream_subscribers` in processes, and a client of theirs."""

    def __init__(self, database: str, broker: str, folder: Path) -> None:
        super().__init__(database, folder)
        self.broker = broker
        self.environment = {**os.environ, "IDEMP_DATABASE_URL": database, "SHOP_BROKER": broker}
        self.running = list[subprocess.Popen[bytes]]()
        self.found: defaultdict[str, defaultdict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        with self.channel() as channel:
            for queue in ("published", "returned", "replies", "fan", "dead"):
                channel.queue_declare(queue, durable=True)
            channel.queue_bind("fan", "amq.fanout", "fan")

    @contextmanager
    def channel(self) -> Iterator[Any]:
        with closing(pika.BlockingConnection(pika.URLParameters(self.broker))) as connection:
            yield connection.channel()

    def begin(self) -> subprocess.Popen[bytes]:
        """Start a process, and wait until it consumes."""
        command, before = [sys.executable, "-m", "tests.integrations.faststream_subscribers"], self.said(b"started successfully")
        with self.log.open("ab") as log:
            self.running.append(subprocess.Popen(command, env=self.environment, stdout=log, stderr=log))
        wait_for(lambda: self.running[-1].poll() is not None or self.said(b"started successfully") > before)
        assert self.running[-1].poll() is None, self.log.read_text()
        return self.running[-1]

    def said(self, words: bytes) -> int:
        return self.log.read_bytes().count(words) if self.log.exists() else 0

    def send(self, queue: str, id: str | None, **body: Any) -> None:
        options: Any = {
            "content_type": "application/json",
            "reply_to": "replies" if queue == "storm" else None,
            "delivery_mode": 2,
        }
        with self.channel() as channel:
            channel.confirm_delivery()
            channel.basic_publish("", queue, json.dumps(body), pika.BasicProperties(message_id=id, **options), mandatory=True)

    def arrived(self, queue: str) -> dict[int, int]:
        """Return under how many ids each number has arrived."""
        with self.channel() as channel:
            while (got := channel.basic_get(queue, auto_ack=True))[0]:
                self.found[queue][json.loads(got[2])["number"]].add(got[1].message_id)
        return {number: len(ids) for number, ids in self.found[queue].items()}

    def close(self) -> None:
        for process in self.running:
            process.kill()
            process.wait()


@pytest.fixture
def processes(url: str, vhost: str, tmp_path: Path) -> Iterator[Processes]:
    for table in TABLES:
        query(url, table)
    made = Processes(url, vhost, tmp_path)
    yield made
    made.close()


@pytest.mark.slow
@on_postgresql
def test_each_message_ends_once(processes: Processes, role: str, database: Database) -> None:
    """Duplicates, conflicts, failures, and connections that are closed under five running subscribers."""
    url = processes.database
    for (table,) in query(url, "SELECT tablename FROM pg_tables WHERE schemaname = 'public'"):
        query(url, f"GRANT ALL ON {table} TO {role}")
    processes.environment["IDEMP_DATABASE_URL"] = make_url(url).set(username=role).render_as_string(hide_password=False)
    processes.begin()
    # Copies at once: one holds the claim, the others wait for it.
    with processes.locked(1) as until:
        processes.send("work", "one", number=1, lock=1)
        until(1)
        for _ in range(2):
            processes.send("work", "one", number=1, lock=1)
        wait_for(lambda: processes.said(b"is kept, and waits") >= 2)
    # What is to blame itself becomes a dead letter: another body, no id, errors of the body and of COMMIT.
    wait_for(lambda: processes.changed() == {"work 1": 1})
    processes.send("work", "one", number=2)
    processes.send("work", None, number=3)
    processes.send("work", "four", number=4, fails="body")
    processes.send("work", "five", number=5, fails="commit")
    wait_for(lambda: len(processes.arrived("dead")) == 4)
    assert set(processes.arrived("dead")) == {2, 3, 4, 5}
    # RabbitMQ closes the connections of five running subscribers; PostgreSQL does; and each message is delivered again.
    for first, end in (
        (10, lambda: ask("rabbitmq", "close_connections", processes.broker)),
        (20, lambda: end_sessions(url, role)),
    ):
        with processes.locked(first) as until:
            for number in range(first, first + 5):
                processes.send("work", str(number), number=number, lock=first)
            until(5)
            before = processes.said(b"- Received")
            end()
            wait_for(lambda before=before: processes.said(b"- Received") >= before + 5)
            until(5)
        wait_for(lambda first=first: len(processes.changed()) == first // 2 + 1)
    # The database is away: the messages are kept.
    query(url, f"ALTER ROLE {role} NOLOGIN")
    end_sessions(url, role)
    before = processes.said(b"is kept, and waits")
    for number in range(30, 35):
        processes.send("work", str(number), number=number)
    wait_for(lambda: processes.said(b"is kept, and waits") >= before + 5)
    query(url, f"ALTER ROLE {role} LOGIN")
    numbers = [1, *range(10, 15), *range(20, 25), *range(30, 35)]
    wait_for(lambda: len(processes.arrived("published")) == len(numbers))
    assert processes.arrived("published") == dict.fromkeys(numbers, 1)
    assert processes.changed() == Counter(f"work {number}" for number in numbers)
    assert set(processes.arrived("dead")) == {2, 3, 4, 5}


@pytest.mark.slow
@on_postgresql
def test_processes_that_are_killed_lose_nothing(processes: Processes, database: Database) -> None:
    """With eight messages under way: before the change, behind it, between COMMIT and send, and between COMMIT and ack."""
    for lock in range(1, ROUNDS + 1):
        process = processes.begin()
        with processes.locked(lock) as until:
            for number in range(8 * lock, 8 * lock + 8):
                processes.send("storm", f"storm-{number}", number=number, lock=lock)
            until(7)  # two subscribers at each point, and one relay for all
            process.kill()
            process.wait()
    let_pass(database, 20.0)  # for which relays leave outputs to the one that was killed
    processes.begin()
    numbers = range(8, 8 * ROUNDS + 8)
    for queue in ("published", "returned", "replies", "fan"):
        wait_for(lambda queue=queue: len(processes.arrived(queue)) == len(numbers))
        assert processes.arrived(queue) == dict.fromkeys(numbers, 1)
    assert processes.changed() == Counter(f"storm {number}" for number in numbers)
    wait_for(lambda: not query(processes.database, "SELECT 1 FROM idemp_pending"))
    processes.send("storm", "last", number=1, lock=99)
    wait_for(lambda: processes.changed()["storm 1"])
    processes.running[-1].terminate()
    assert processes.running[-1].wait(30) == 0
    assert processes.arrived("published")[1] == 1
