"""Consumers of the same work: as users write them without idemp, and with it."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from kombu import Connection, Queue
from sqlalchemy import BigInteger, Integer, LargeBinary, String
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from benchmarks.work import DONE, ORDER, PREFETCH, Done, Order, Place, done_by
from idemp import App, BatchContext, Context, Idempotent, Message, Output
from idemp.broker.kombu import KombuBroker
from idemp.broker.port import Ack
from idemp.consuming import Consuming, KeptAlive
from idemp.inbox.sql import Tables
from idemp.inbox.sql.schema import upgrade
from idemp.messages import OutputKind
from idemp.settings import Settings
from idemp.suspects import Turns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Engine

    from idemp.broker.port import Delivery, Publisher, Receiver, Settlement

_SECONDS: Final = 120.0


class Variant(ABC):
    """One way to do the work, connected and ready.

    Args:
        name: of the variant.
        engine: the database; several variants share its server, each has tables and queues of its own.
        broker_url: RabbitMQ.
    """

    def __init__(self, name: str, engine: Engine, broker_url: str) -> None:
        self.place = Place(name, engine, broker_url)

    def run(self, count: int) -> float:
        """Seconds per message, from the first delivery to the last ack, of so many messages that wait in the queue."""
        self.place.send(count)
        return self.consume(count) / count

    @abstractmethod
    def consume(self, count: int) -> float:
        """Handle so many deliveries; the seconds it took."""

    def close(self) -> None:
        """Close what is open."""
        self.place.close()


class Bare(Variant):
    """One transaction, one confirmed publish, one ack. No deduplication: a redelivery has its effect again."""

    def __init__(self, name: str, engine: Engine, broker_url: str) -> None:
        super().__init__(name, engine, broker_url)
        self._left = 0
        self._open = ExitStack()
        consuming = self._open.enter_context(Connection(broker_url))
        publishing = self._open.enter_context(Connection(broker_url, transport_options={"confirm_publish": True}))
        self.producer = publishing.Producer()
        self._consuming = consuming
        queue = Queue(self.place.queue, no_declare=True)
        consumer = consuming.Consumer([queue], callbacks=[self._on_message], accept=["json"], prefetch_count=PREFETCH)
        self._open.enter_context(consumer)

    def consume(self, count: int) -> float:
        """In the calling thread."""
        self._left, began = count, time.perf_counter()
        while self._left:
            self._consuming.drain_events(timeout=_SECONDS)
        return time.perf_counter() - began

    def _on_message(self, _: Any, message: Any) -> None:
        order = Order.model_validate_json(message.body)
        self.handle(order, message)
        message.ack()
        self._left -= 1

    def handle(self, order: Order, message: Any) -> None:
        """The effect, COMMIT, the output."""
        with self.place.engine.begin() as connection:
            connection.execute(self.place.insert, {"order_id": order.order_id})
        self.publish(done_by(order), message.properties["message_id"])

    def publish(self, done: Done, correlation_id: str) -> None:
        """Publish, and wait for the confirm."""
        self.producer.publish(
            done.model_dump_json(),
            routing_key=self.place.out,
            content_type="application/json",
            type=DONE,
            message_id=str(uuid4()),
            correlation_id=correlation_id,
            delivery_mode=2,
            mandatory=True,
        )

    def close(self) -> None:
        """Close what is open."""
        self._open.close()
        super().close()


class _Base(DeclarativeBase):
    pass


class Naive(Bare):
    """An inbox as most articles have it: SELECT first, an outbox row, COMMIT, publish, mark it as sent, COMMIT."""

    def __init__(self, name: str, engine: Engine, broker_url: str) -> None:
        super().__init__(name, engine, broker_url)
        _Base.metadata.create_all(engine)

    def handle(self, order: Order, message: Any) -> None:
        """Twice a transaction, through the ORM."""
        message_id = message.properties["message_id"]
        with Session(self.place.engine) as session:
            if session.get(_Seen, message_id) is not None:
                return
            session.add(_Seen(message_id=message_id))
            session.execute(self.place.insert, {"order_id": order.order_id})
            done = done_by(order)
            row = _ToSend(message_id=message_id, body=done.model_dump_json().encode())
            session.add(row)
            session.commit()
            self.publish(done, message_id)
            row.sent = True
            session.commit()


class _Seen(_Base):
    __tablename__ = "naive_seen"
    message_id: Mapped[str] = mapped_column(String(36), primary_key=True)


class _ToSend(_Base):
    __tablename__ = "naive_to_send"
    id: Mapped[int] = mapped_column(BigInteger().with_variant(Integer, "sqlite"), primary_key=True)
    message_id: Mapped[str] = mapped_column(String(36))
    body: Mapped[bytes] = mapped_column(LargeBinary)
    sent: Mapped[bool] = mapped_column(default=False)


class Batched(Variant):
    """The ceiling: what a batch of idemp's would be without any deduplication, over the same receiver and publisher.

    So many messages are parsed, handled one by one in one transaction, which is committed; their outputs are published
    together, and when all are confirmed the messages are acked.
    """

    def __init__(self, name: str, engine: Engine, broker_url: str, *, size: int, set_based: bool = False) -> None:
        super().__init__(name, engine, broker_url)
        self._size = size
        self._set_based = set_based
        self._receiver = self.place.broker.receiver([self.place.queue], prefetch=2 * size)
        self._publisher = self.place.broker.publisher()

    def consume(self, count: int) -> float:
        """In the calling thread."""
        began = time.perf_counter()
        while count > 0:
            first = self._receiver.receive(_SECONDS)
            if first is None:
                raise TimeoutError(f"{count} messages did not come")
            taken = [first]
            while len(taken) < self._size and (more := self._receiver.receive(0.002)) is not None:
                taken.append(more)
            self._handle(taken)
            count -= len(taken)
        self._receiver.receive(0.0)  # acks go out before it
        return time.perf_counter() - began

    def _handle(self, taken: Sequence[Delivery]) -> None:
        orders = [Order.model_validate_json(each.message.body) for each in taken]
        rows = [{"order_id": order.order_id} for order in orders]
        with self.place.engine.begin() as connection:
            for row in [rows] if self._set_based else rows:
                connection.execute(self.place.insert, row)
        outputs = [
            Output(
                id=(made := uuid4()),
                ordinal=0,
                kind=OutputKind.SEND,
                exchange="",
                routing_key=self.place.out,
                message=Message(
                    body=done_by(order).model_dump_json().encode(),
                    type=DONE,
                    message_id=str(made),
                    correlation_id=each.message.message_id,
                ),
            )
            for order, each in zip(orders, taken, strict=True)
        ]
        if any(self._publisher.publish(outputs, _SECONDS)):
            raise RuntimeError("the broker did not take an output")
        for each in taken:
            self._receiver.settle(each, Ack())

    def close(self) -> None:
        """Close what is open."""
        self._receiver.close()
        self._publisher.close()
        super().close()


class Wrapped(Variant):
    """idemp, as its worker runs it: one consuming thread, marks in batches.

    Args:
        name: of the variant.
        engine: the database.
        broker_url: RabbitMQ.
        waits: whether each confirm is waited for before the next delivery is handled.
        idempotent: whether the message type is opted in.
        policy: further options of the type's policy.
    """

    def __init__(
        self, name: str, engine: Engine, broker_url: str, *, waits: bool = False, idempotent: bool = True, **policy: Any
    ) -> None:
        super().__init__(name, engine, broker_url)
        upgrade(engine, Tables())
        self._broker = _Gated(broker_url, waits=waits)
        self.app = App(self.place.queue, database=engine, broker=self._broker, settings=Settings(prefetch=PREFETCH))
        self.register(Idempotent(**policy) if idempotent else None)
        self.app.start()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def register(self, policy: Idempotent | None) -> None:
        """The handler."""
        insert, out = self.place.insert, self.place.out

        @self.app.handler(Order, type=ORDER, policy=policy)
        def handle(order: Order, ctx: Context) -> None:
            ctx.connection.execute(insert, {"order_id": order.order_id})
            ctx.send(done_by(order), to=out, type=DONE)

    def consume(self, count: int) -> float:
        """In its own thread."""
        return self._broker.let(count)

    def close(self) -> None:
        """Close what is open."""
        self._stop.set()
        self._broker.opened.set()
        self._thread.join()
        self.app.close()
        super().close()

    def _run(self) -> None:
        Consuming(self.app, self._stop, KeptAlive(), Turns(solitary=True)).run()


class WrappedSets(Wrapped):
    """idemp with a batch handler: one INSERT of many rows."""

    def register(self, policy: Idempotent | None) -> None:
        """The handler."""
        insert, out = self.place.insert, self.place.out
        assert policy is not None

        @self.app.batch_handler(Order, type=ORDER, policy=policy)
        def handle(orders: list[Order], ctx: BatchContext) -> None:
            ctx.connection.execute(insert, [{"order_id": order.order_id} for order in orders])
            for order, each in zip(orders, ctx.each, strict=True):
                each.send(done_by(order), to=out, type=DONE)


class Duplicates(Wrapped):
    """Redeliveries of what was handled before."""

    known: Sequence[str] = ()

    def run(self, count: int) -> float:
        """The same messages each time; the first time they are handled, which is not counted."""
        if len(self.known) < count:
            self.known = self.place.send(count)
            self.consume(count)
        self.place.send_again(self.known[:count])
        return self.consume(count) / count


class _Gated(KombuBroker):
    """RabbitMQ whose receivers hand nothing out until they are let, and who notes when all is settled."""

    def __init__(self, url: str, *, waits: bool) -> None:
        super().__init__(url)
        self.opened = threading.Event()
        self._done = threading.Event()
        self._waits = waits
        self._settled = self._target = 0

    def let(self, count: int) -> float:
        """Hand out until so many are settled; the seconds it took."""
        self._done.clear()
        self._target += count
        began = time.perf_counter()
        self.opened.set()
        if not self._done.wait(_SECONDS):
            raise TimeoutError(f"{self._target - self._settled} of {count} deliveries are not settled")
        self.opened.clear()
        return time.perf_counter() - began

    def settled(self) -> None:
        """One more."""
        self._settled += 1  # perhaps of the next block already: a receiver may be waiting when the gate closes
        if self._settled == self._target:
            self._done.set()

    def receiver(self, queues: Sequence[str], *, prefetch: int) -> Any:
        """A receiver behind the gate."""
        return _GatedReceiver(super().receiver(queues, prefetch=prefetch), self)

    def publisher(self) -> Any:
        """A publisher that need not be waited for, or has to be."""
        publisher = super().publisher()
        return _Waiting(publisher) if self._waits else publisher


class _GatedReceiver:
    def __init__(self, inner: Receiver, gate: _Gated) -> None:
        self._inner = inner
        self._gate = gate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def receive(self, timeout: float) -> Delivery | None:
        if not self._gate.opened.is_set() and not self._gate.opened.wait(timeout):
            return None
        return self._inner.receive(timeout)

    def settle(self, delivery: Delivery, settlement: Settlement) -> None:
        self._inner.settle(delivery, settlement)
        self._gate.settled()


class _Waiting:
    """A publisher that can't but wait."""

    def __init__(self, inner: Publisher) -> None:
        self.publish = inner.publish
        self.keep_alive = inner.keep_alive
        self.close = inner.close
