"""A broker without space: what a plain producer loses there, and that idemp loses nothing, and says why it waits."""

from __future__ import annotations

import json
import time
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar
from uuid import UUID

import pytest
import stomp
from sqlalchemy import Engine, text

from idemp import App, Context, Idempotent, Message
from idemp.broker.port import Ack, Park, Topology
from idemp.broker.stomp import StompBroker
from idemp.broker.stomp.address import Address
from idemp.inbox.sql import SqlStore, create_engine_safely
from idemp.messages import Output, OutputKind
from idemp.settings import Settings
from idemp.testing.store_bench import Background, SqlEffects
from idemp.worker import Worker
from tests.inbox.sql.kept import make_tables
from tests.servers.activemq import ActiveMQ
from tests.servers.fixtures import private
from tests.servers.process import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow

SOON = 10.0
LATER = 2.0
BALLAST = "ballast"
LARGE = bytes(100_000)


class SmallActiveMQ(ActiveMQ):
    """Refuses what it has no space for, and lets a transaction commit whose asynchronous sends failed, as older ones did."""

    attributes: ClassVar[str] = 'schedulerSupport="true" rollbackOnlyOnAsyncException="false"'
    usage: ClassVar[str] = (
        '<systemUsage><systemUsage sendFailIfNoSpace="true">'
        '<storeUsage><storeUsage limit="4 mb"/></storeUsage></systemUsage></systemUsage>'
    )


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A broker with little space."""
    with private(SmallActiveMQ) as server:
        yield server.url


@pytest.fixture
def broker(url: str) -> StompBroker:
    """With the queues of this module."""
    broker = StompBroker(url)
    broker.declare(Topology(exchange="", queues=("shop", "stock", BALLAST)))
    return broker


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """A database with tables."""
    engine = create_engine_safely(f"sqlite:///{tmp_path / 'shop.db'}")
    make_tables(engine)
    yield engine
    engine.dispose()


def an_input(number: int, *, delay: float = 0.0) -> Output:
    message = Message(body=json.dumps({"id": number}).encode(), type="shop.Sell", message_id=str(UUID(int=number)))
    return Output(
        id=UUID(int=number),
        ordinal=0,
        kind=OutputKind.SEND,
        exchange="",
        routing_key="shop",
        message=message,
        delay=delay,
    )


class Heard(stomp.ConnectionListener):  # type: ignore[misc]
    """What a plain producer looks at; that errors come, of no message by name, is told to nobody."""

    def __init__(self) -> None:
        self.receipts: list[str] = []

    def on_receipt(self, frame: Any) -> None:
        self.receipts.append(frame.headers["receipt-id"])


def plain(url: str, count: int, body: bytes, *, transaction: str | None = None, **headers: Any) -> list[str]:
    """What many producers do: send, and ask for no receipt but that of the transaction, and of their goodbye."""
    client = stomp.StompConnection12(Address.of(url).hosts)
    client.set_listener("heard", heard := Heard())
    client.connect(wait=True)
    if transaction is not None:
        client.begin(transaction)
        headers["transaction"] = transaction
    for _ in range(count):
        client.send(f"/queue/{BALLAST}", body, headers={"persistent": "true", **headers})
    if transaction is not None:
        client.commit(transaction, receipt="committed")
        wait_until(lambda: "committed" in heard.receipts, "the commit's receipt")
    client.disconnect(receipt="all were read")
    return heard.receipts


@pytest.fixture
def app(broker: StompBroker, engine: Engine) -> App:
    """Each input has one effect and two outputs. It was started before: a full broker can't write down its queues."""
    app = App("shop", store=SqlStore(engine), broker=broker, settings=Settings(relay_after="1s", relay_interval="1s"))
    effects = SqlEffects(engine)

    @app.handler(dict, type="shop.Sell", policy=Idempotent())
    def sell(message: dict[str, Any], ctx: Context) -> None:
        effects.write(ctx, str(message["id"]))  # type: ignore[arg-type]
        for part in range(2):
            ctx.send({"of": message["id"], "part": part}, to="stock", type="stock.Reserve")

    app.start()
    return app


@contextmanager
def working(app: App) -> Iterator[None]:
    """A worker with its relay."""
    worker = Worker([app])
    running = Background(worker.run)
    try:
        yield
    finally:
        worker.stop()
        running.result(30.0)


def rows(engine: Engine, statement: str) -> list[Any]:
    with engine.connect() as connection:
        return list(connection.scalars(text(statement)))


def make_space(broker: StompBroker) -> int:
    """Take the ballast away."""
    with broker.take(BALLAST, None, 10_000) as taken:
        for index in range(len(taken.messages)):
            taken.accept(index)
        return len(taken.messages)


def test_a_plain_producer_loses_and_idemp_does_not(url: str, broker: StompBroker, app: App, engine: Engine) -> None:
    with closing(broker.publisher()) as feeder:
        assert feeder.publish([an_input(number) for number in range(5)], SOON) == [None] * 5
        began = time.monotonic()
        assert feeder.publish([an_input(5, delay=LATER)], SOON) == [None]
        plain(url, 1, b"scheduled", AMQ_SCHEDULED_DELAY=round(1000 * LATER))

        sent, there = 0, 0
        while there == sent < 600:  # how much fits depends on when the store counts what it has
            assert plain(url, 60, LARGE) == ["all were read"]
            sent, there = sent + 60, broker.depth(BALLAST)
        assert 20 < there < sent, "it lost the others, and its connection ended in good order"
        assert "committed" in plain(url, 10, b"", transaction="t")
        assert broker.depth(BALLAST) == there, "ten more, in a transaction that was confirmed"

        (refusal,) = feeder.publish([an_input(6)], SOON)
        assert refusal is not None
        assert (refusal.kind, "store is Full" in refusal.detail) == ("nacked", True)

    with working(app):
        wait_until(
            lambda: len(rows(engine, "SELECT reason FROM idemp_pending WHERE reason IS NOT NULL")) == 10, "reasons"
        )
        reasons = rows(engine, "SELECT reason FROM idemp_pending")
        assert all("nacked" in reason and "store is Full" in reason for reason in reasons), reasons
        wait_until(lambda: time.monotonic() > began + LATER + 0.5, "the delayed ones are due")
        assert sorted(rows(engine, "SELECT name FROM conformance_effect")) == ["0", "1", "2", "3", "4"]
        assert make_space(broker) == there, "what the broker's own scheduler had to send is gone"
        wait_until(lambda: len(rows(engine, "SELECT name FROM conformance_effect")) == 6, "the delayed input")
        wait_until(lambda: not rows(engine, "SELECT 1 FROM idemp_pending"), "all outputs are confirmed", seconds=30)
    arrived = broker.browse("stock", 100)
    assert len({message.message_id for message in arrived}) == 12, "each output came, under one id"
    assert len({(message.message_id, message.body) for message in arrived}) == 12
    assert (broker.depth("shop"), broker.depth("shop.dead")) == (0, 0)
    assert broker.depth(BALLAST) == 0, "nor did it come later"


def test_what_can_not_be_moved_comes_again(url: str, broker: StompBroker, caplog: pytest.LogCaptureFixture) -> None:
    """Its receiver goes on meanwhile, and says so."""
    with closing(broker.publisher()) as feeder:
        assert feeder.publish([an_input(7), an_input(8)], SOON) == [None] * 2
        while (
            refusal := feeder.publish([replace(an_input(9), routing_key=BALLAST, message=Message(body=LARGE))], SOON)[0]
        ) is None:
            pass
        assert refusal.kind == "nacked"
    with closing(broker.receiver(["shop"], prefetch=5)) as receiver:
        for settlement in (Park("Refuse"), Ack()):
            delivery = receiver.receive(SOON)
            assert delivery is not None
            receiver.settle(delivery, settlement)
        receiver.end_settled()
        assert [record.queues for record in caplog.records if getattr(record, "event", "") == "copy_refused"] == [
            ["shop"]
        ]  # type: ignore[attr-defined]
        make_space(broker)
        wait_until(lambda: feeder_takes(broker), "space")
        again = receiver.receive(SOON)
        assert again is not None
        assert again.message.message_id == str(UUID(int=7))
        receiver.settle(again, Park("Refuse"))
    assert [message.message_id for message in broker.browse("shop.dead", 10)] == [str(UUID(int=7))]


def feeder_takes(broker: StompBroker) -> bool:
    with closing(broker.publisher()) as feeder:
        return feeder.publish([replace(an_input(10), routing_key=BALLAST)], SOON) == [None]
