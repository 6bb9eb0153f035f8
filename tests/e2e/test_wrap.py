"""`Inbox.wrap` in a service that has its own engine, its own tables and its own kombu consumer."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import kombu
import pytest
from pydantic import BaseModel
from sqlalchemy import Engine, Integer, String, func, select, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, sessionmaker

from idemp import ConfirmingPublisher, Context, Idempotent, Inbox, Outcome, Policy, Refuse, protocol, wrap
from idemp.broker.port import Refusal
from idemp.classification import MAX_DEFERRALS
from idemp.inbox.sql import create_engine_safely
from idemp.messages import DEFERRED_HEADER
from tests.inbox.sql.kept import make_tables

PATIENCE = 20.0


class Base(DeclarativeBase):
    pass


class Payment(Base):
    __tablename__ = "payment"
    id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True)
    payment_id: Mapped[str] = mapped_column(String(40))


class TakePayment(BaseModel):
    __message_type__ = "billing.TakePayment"
    payment_id: str
    amount: int


class Receipt(BaseModel):
    __message_type__ = "billing.Receipt"
    payment_id: str


def take_payment(message: TakePayment, ctx: Context) -> None:
    ctx.session.add(Payment(payment_id=message.payment_id))
    ctx.send(Receipt(payment_id=message.payment_id), to="receipts")
    if message.amount < 0:
        raise Refuse("a negative amount")
    if message.amount == 0:
        raise ZeroDivisionError("nothing to take")


@pytest.fixture
def engine(postgresql_url: str) -> Iterator[Engine]:
    engine = create_engine_safely(postgresql_url)
    make_tables(engine)
    Base.metadata.create_all(engine)
    yield engine
    engine.dispose()


class Service:
    """A plain kombu consumer on plain classic queues, with idemp around its handler and nowhere else."""

    def __init__(self, url: str, engine: Engine) -> None:
        self.connection = kombu.Connection(url)
        self.channel = self.connection.channel()
        self.queue = kombu.Queue("billing", durable=True)
        for name in ("billing", "receipts"):
            kombu.Queue(name, durable=True).bind(self.channel).declare()
        self.publisher = ConfirmingPublisher(url)
        self.handle = Inbox(engine, session_factory=sessionmaker(engine)).wrap(
            take_payment,
            message=TakePayment,
            consumer="billing",
            policy=Idempotent(key="payment_id", attempts=2, retry_delays=["1s"]),
            publisher=self.publisher,
        )
        self.outcomes: list[Outcome | None] = []

    def put(self, body: bytes | dict[str, Any], *, to: str = "billing", **properties: Any) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        properties = {"type": "billing.TakePayment", "content_type": "application/json", **properties}
        kombu.Producer(self.channel).publish(
            data, routing_key=to, serializer=None, content_encoding="utf-8", **properties
        )

    def run_until(self, done: int) -> list[Outcome | None]:
        deadline = time.monotonic() + PATIENCE
        while len(self.outcomes) < done:
            assert time.monotonic() < deadline, f"only {self.outcomes}"
            try:
                self.connection.drain_events(timeout=0.5)
            except TimeoutError:
                continue
        self.handle.flush()
        return self.outcomes

    @contextmanager
    def consuming(self) -> Iterator[None]:
        def on_message(message: Any) -> None:
            self.outcomes.append(self.handle.on_message(message))

        def on_decode_error(message: Any, error: Exception) -> None:
            self.outcomes.append(self.handle.on_decode_error(message, error))

        with kombu.Consumer(
            self.channel,
            queues=[self.queue],
            on_message=on_message,
            on_decode_error=on_decode_error,
            auto_declare=False,
        ):
            yield

    def channel_raw(self, queue: str) -> list[Any]:
        """The messages of a queue as they are, since kombu can't read all of them."""
        with kombu.Connection(self.connection.as_uri(include_password=True)) as connection:
            channel = connection.connection.channel()  # of py-amqp
            found = []
            while (message := channel.basic_get(queue, no_ack=True)) is not None:
                found.append(message)
            return found

    def drained(self, queue: str) -> list[Any]:
        found = []
        while (message := self.channel.basic_get(queue, no_ack=True)) is not None:
            found.append(message)
        return found


@pytest.fixture
def service(rabbitmq_url: str, engine: Engine) -> Iterator[Service]:
    service = Service(rabbitmq_url, engine)
    yield service
    service.publisher.close()
    service.connection.release()


def payments(engine: Engine) -> int:
    with engine.connect() as connection:
        return int(connection.scalar(select(func.count()).select_from(Payment)) or 0)


def pending(engine: Engine) -> int:
    with engine.connect() as connection:
        return int(connection.scalar(text("SELECT count(*) FROM idemp_pending")) or 0)


def test_a_second_send_under_another_transport_id_is_skipped_and_redispatched(service: Service, engine: Engine) -> None:
    with service.consuming():
        service.put({"payment_id": "p-1", "amount": 5}, message_id="first")
        service.put({"payment_id": "p-1", "amount": 5}, message_id="second")
        assert service.run_until(2) == [Outcome.HANDLED, Outcome.REDISPATCHED]
    assert payments(engine) == 1
    receipts = service.drained("receipts")
    assert len(receipts) == 2
    assert len({receipt.properties["message_id"] for receipt in receipts}) == 1
    assert len({receipt.body for receipt in receipts}) == 1
    assert pending(engine) == 0


def test_the_same_id_with_another_payload_is_parked(service: Service, engine: Engine) -> None:
    with service.consuming():
        service.put({"payment_id": "p-1", "amount": 5})
        service.put({"payment_id": "p-1", "amount": 6})
        assert service.run_until(2) == [Outcome.HANDLED, Outcome.PARKED]
    (dead,) = service.drained("billing.dead")
    assert dead.headers["idemp-dead-reason"] == "PayloadConflict"
    assert json.loads(dead.body)["amount"] == 6
    assert payments(engine) == 1


def test_a_failing_handler_gets_its_attempts_and_then_the_dead_letter_queue(service: Service, engine: Engine) -> None:
    with service.consuming():
        service.put({"payment_id": "p-2", "amount": 0}, message_id="m-2")
        assert service.run_until(2) == [Outcome.RETRIED, Outcome.PARKED]
    (dead,) = service.drained("billing.dead")
    assert dead.headers["idemp-dead-reason"] == "ZeroDivisionError"
    assert dead.headers["idemp-dead-attempts"] == 2
    assert dead.properties["message_id"] == "m-2"
    assert payments(engine) == 0
    assert service.drained("receipts") == []


HOPELESS: list[tuple[bytes, dict[str, Any], str]] = [
    (b"{not json", {}, "UndecodableMessage"),
    (b"\x80\x04K*.", {"content_type": "application/x-python-serialize"}, "UnsupportedContentType"),
    (b'{"payment_id": "p-3"}', {}, "UndecodableMessage"),
    (b'{"payment_id": "p-3", "amount": -1}', {}, "Refuse"),
    (
        b'{"payment_id": "p-3", "amount": 1}',
        {"type": "billing.GiveBack", "headers": {DEFERRED_HEADER: MAX_DEFERRALS}},
        "UnknownMessageType",
    ),
    (b'{"payment_id": "", "amount": 1}', {}, "InvalidId"),
    (b'{"payment_id": "%s", "amount": 1}' % (b"x" * 300), {}, "InvalidId"),
]


def test_what_can_never_be_handled_is_parked_at_once_and_intact(service: Service, engine: Engine) -> None:
    with service.consuming():
        for number, (body, properties, _) in enumerate(HOPELESS, start=1):
            service.put(body, **properties)
            assert service.run_until(number)[-1] is Outcome.PARKED, body
    dead = service.drained("billing.dead")
    bodies = [each.body if isinstance(each.body, bytes) else each.body.encode() for each in dead]
    reasons = [each.headers["idemp-dead-reason"] for each in dead]
    assert list(zip(bodies, reasons, strict=True)) == [(body, reason) for body, _, reason in HOPELESS]
    assert payments(engine) == 0


@pytest.mark.parametrize("compression", ["no-such-codec", "zlib"])
def test_what_kombu_can_not_decompress_is_parked_and_intact(service: Service, engine: Engine, compression: str) -> None:
    """The consumer lives on, and the header is named."""
    body = b'{"payment_id": "p-4", "amount": 1}'
    with service.consuming():
        service.put(body, headers={"compression": compression})
        service.put(body)
        assert service.run_until(2) == [Outcome.PARKED, Outcome.HANDLED]
    (dead,) = service.channel_raw("billing.dead")
    assert (dead.body.encode() if isinstance(dead.body, str) else dead.body) == body
    headers = dead.properties["application_headers"]
    assert headers["compression"] == compression
    assert headers["idemp-dead-reason"] == "UndecodableMessage"
    assert f"compression={compression!r}" in headers["idemp-dead-error"]
    assert payments(engine) == 1


def test_what_cannot_be_settled_goes_back_and_does_not_use_up_the_prefetch(
    service: Service, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The publisher's connection is gone while the consuming one is fine: no copy for a retry can be made."""
    monkeypatch.setattr(wrap, "_GIVE_BACK_SECONDS", 0.3)
    service.channel.basic_qos(0, 1, False)
    publish = service.publisher.publish_parcels
    away: list[bool] = [True]

    def refused_at_first(parcels: Any, timeout: float) -> Any:
        return [Refusal("closed", "away")] * len(parcels) if away else publish(parcels, timeout)

    monkeypatch.setattr(service.publisher, "publish_parcels", refused_at_first)
    with service.consuming():
        service.put({"payment_id": "p-5", "amount": 0})
        service.put({"payment_id": "p-6", "amount": 0})
        assert service.run_until(3) == [None, None, None]
        away.clear()
        assert set(service.run_until(7)[3:]) == {Outcome.RETRIED, Outcome.PARKED}
    assert len(service.drained("billing.dead")) == 2
    assert payments(engine) == 0


def test_without_a_live_relay_a_delivery_whose_outputs_have_no_confirm_is_not_acked(
    service: Service, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "UNCONFIRMED_DELAY", timedelta(seconds=1))
    service.channel.queue_delete("receipts")
    with service.consuming():
        service.put({"payment_id": "p-4", "amount": 5})
        assert service.run_until(1) == [Outcome.PENDING]
        assert payments(engine) == 1
        assert pending(engine) == 1
        kombu.Queue("receipts", durable=True).bind(service.channel).declare()
        assert service.run_until(2)[-1] is Outcome.REDISPATCHED
    assert len(service.drained("receipts")) == 1
    assert payments(engine) == 1
    assert pending(engine) == 0


def test_a_connection_lost_while_the_handler_runs(service: Service, rabbitmq_url: str, engine: Engine) -> None:
    """Of a type that is not opted in nothing is committed, so that the next delivery has its effects once."""
    lose = [True]

    def take(message: TakePayment, ctx: Context) -> None:
        ctx.session.add(Payment(payment_id=message.payment_id))
        if lose:
            lose.clear()
            service.connection.collect()

    take_it = Inbox(engine).wrap(take, consumer="till", publisher=service.publisher)
    till = kombu.Queue("till", durable=True).bind(service.channel)
    till.declare()
    outcomes: list[Outcome | None] = []

    def consume(connection: kombu.Connection, *, times: int) -> None:
        channel = connection.channel()
        consumer = kombu.Consumer(
            channel,
            queues=[till],
            on_message=lambda message: outcomes.append(take_it.on_message(message)),
            auto_declare=False,
        )
        consumer.consume()
        while len(outcomes) < times:
            connection.drain_events(timeout=PATIENCE)

    service.put({"payment_id": "p-9", "amount": 5}, to="till")
    with suppress(ConnectionError, AttributeError):  # kombu finds its connection gone
        consume(service.connection, times=1)
    assert (outcomes, payments(engine)) == ([None], 0)
    with kombu.Connection(rabbitmq_url) as connection:
        consume(connection, times=2)
    assert (outcomes, payments(engine)) == ([None, Outcome.HANDLED], 1)


def test_a_connection_that_is_lost_each_time_the_handler_runs(
    service: Service, rabbitmq_url: str, engine: Engine
) -> None:
    """A handler that always outlasts the broker's patience: it is parked in the end, and nothing of it is committed."""
    lost: list[kombu.Connection] = []

    def take(message: TakePayment, ctx: Context) -> None:
        ctx.session.add(Payment(payment_id=message.payment_id))
        lost[-1].collect()

    take_it = Inbox(engine).wrap(take, consumer="till", publisher=service.publisher, policy=Policy(attempts=2))
    till = kombu.Queue("till", durable=True).bind(service.channel)
    till.declare()
    outcomes: list[Outcome | None] = []
    service.put({"payment_id": "p-9", "amount": 5}, to="till")
    while Outcome.PARKED not in outcomes:
        assert len(outcomes) < 8, "it goes round for ever"
        with kombu.Connection(rabbitmq_url) as connection, suppress(ConnectionError, AttributeError):
            lost.append(connection)
            with kombu.Consumer(
                connection.channel(),
                queues=[till],
                on_message=lambda message: outcomes.append(take_it.on_message(message)),
                auto_declare=False,
            ):
                connection.drain_events(timeout=PATIENCE)
    (dead,) = service.drained("till.dead")
    assert dead.headers["idemp-dead-reason"] == "WorkerDied"
    assert "consumer_timeout" in dead.headers["idemp-dead-error"] + dead.headers["idemp-dead-stack"]
    assert payments(engine) == 0
