"""Consumers as users write them without idemp."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing, suppress
from typing import TYPE_CHECKING, Any, Final, Protocol
from uuid import uuid4

from kombu import Connection, Queue
from sqlalchemy import BigInteger, Integer, LargeBinary, String
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from benchmarks.variants import Variant
from benchmarks.work import DONE, PREFETCH, Done, Order, Place, done_output
from idemp.broker.port import Ack

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.gate import Gate
    from idemp.broker.port import Delivery

    OnOrder = Callable[[Order, str, Callable[[], None]], None]

_SECONDS: Final = 120.0


class Link(Protocol):
    """What a consumer without a framework holds in its hands."""

    def drain(self, seconds: float) -> None:
        """Handle what has arrived.

        Raises:
            TimeoutError: nothing did.
        """
        ...

    def publish(self, done: Done, correlation_id: str) -> None:
        """Publish, and wait until the broker has it."""
        ...

    def close(self) -> None:
        """Close what is open."""
        ...


class KombuPublisher:
    """Kombu's own producer on a connection of its own.

    On RabbitMQ each publish waits for its confirm. Redis has none: its answer to the command is what there is.
    """

    def __init__(self, place: Place) -> None:
        self._out = place.out
        confirming = {"confirm_publish": True} if place.broker_url.startswith("pyamqp") else {}
        self._connection = Connection(place.broker_url, transport_options=confirming)
        self._producer = self._connection.Producer()

    def publish(self, done: Done, correlation_id: str) -> None:
        """One message."""
        self._producer.publish(
            done.model_dump_json(),
            routing_key=self._out,
            content_type="application/json",
            type=DONE,
            message_id=str(uuid4()),
            correlation_id=correlation_id,
            delivery_mode=2,
            mandatory=True,
        )

    def close(self) -> None:
        """Close the connection."""
        self._connection.release()


class KombuLink:
    """Kombu's own consumer and producer, a connection each."""

    def __init__(self, place: Place, on_order: OnOrder) -> None:
        self._open = ExitStack()
        self._connection = self._open.enter_context(Connection(place.broker_url))
        publisher = self._open.enter_context(closing(KombuPublisher(place)))
        self.publish = publisher.publish

        def on_message(_: Any, message: Any) -> None:
            order = Order.model_validate_json(message.body)
            on_order(order, message.properties["message_id"], message.ack)

        queue = Queue(place.queue, no_declare=True)
        self._open.enter_context(
            self._connection.Consumer([queue], callbacks=[on_message], accept=["json"], prefetch_count=PREFETCH)
        )

    def drain(self, seconds: float) -> None:
        """One message."""
        self._connection.drain_events(timeout=seconds)

    def close(self) -> None:
        """Close what is open."""
        self._open.close()


class LocalLink:
    """A receiver and a publisher of the broker in one file: there is no other library for it."""

    def __init__(self, place: Place, on_order: OnOrder) -> None:
        self._out = place.out
        self._on_order = on_order
        self._receiver = place.broker.receiver([place.queue], prefetch=PREFETCH)
        self._publisher = place.broker.publisher()

    def drain(self, seconds: float) -> None:
        """One message."""
        delivery = self._receiver.receive(seconds)
        if delivery is None:
            raise TimeoutError
        order = Order.model_validate_json(delivery.message.body)
        self._on_order(order, delivery.message.message_id or "", lambda: self._receiver.settle(delivery, Ack()))

    def publish(self, done: Done, correlation_id: str) -> None:
        """One message."""
        if any(self._publisher.publish([done_output(done, correlation_id, self._out)], _SECONDS)):
            raise RuntimeError("the broker did not take an output")

    def close(self) -> None:
        """Close what is open."""
        self._receiver.close()
        self._publisher.close()


def link_to(place: Place, on_order: OnOrder) -> Link:
    """What there is for this broker."""
    return LocalLink(place, on_order) if place.broker_url.startswith("local:") else KombuLink(place, on_order)


class Bare(Variant):
    """One transaction, one confirmed publish, one ack. No deduplication: a redelivery has its effect again."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._settled: Callable[[], None] = self._one_less
        self._left = 0
        self.link = link_to(place, self._on_order)

    def consume(self, count: int) -> float:
        """In the calling thread."""
        self._left, began = count, time.perf_counter()
        while self._left:
            self.link.drain(_SECONDS)
        return time.perf_counter() - began

    def consume_behind(self, gate: Gate) -> None:
        """Until the gate is taken down."""
        self._settled = gate.settled
        while not gate.stopped.is_set():
            gate.opened.wait()
            with suppress(TimeoutError):
                self.link.drain(0.05)

    def handle(self, order: Order, message_id: str) -> None:
        """The effect, COMMIT, the output."""
        with self.place.engine.begin() as connection:
            connection.execute(self.place.insert, {"order_id": order.order_id})
        self.link.publish(self.place.done_by(order), message_id)

    def close(self) -> None:
        """Close what is open."""
        self.link.close()
        super().close()

    def _on_order(self, order: Order, message_id: str, ack: Callable[[], None]) -> None:
        self.handle(order, message_id)
        ack()
        self._settled()

    def _one_less(self) -> None:
        self._left -= 1


class _Base(DeclarativeBase):
    pass


class Naive(Bare):
    """An inbox as most articles have it: SELECT first, an outbox row, COMMIT, publish, mark it as sent, COMMIT."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        _Base.metadata.create_all(place.engine)

    def handle(self, order: Order, message_id: str) -> None:
        """Twice a transaction, through the ORM."""
        with Session(self.place.engine) as session:
            if session.get(_Seen, message_id) is not None:
                return
            session.add(_Seen(message_id=message_id))
            session.execute(self.place.insert, {"order_id": order.order_id})
            done = self.place.done_by(order)
            row = _ToSend(message_id=message_id, body=done.model_dump_json().encode())
            session.add(row)
            session.commit()
            self.link.publish(done, message_id)
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

    def __init__(self, place: Place, *, size: int, set_based: bool = False) -> None:
        super().__init__(place)
        self._size = size
        self._set_based = set_based
        self._open = ExitStack()
        self._receiver = self._open.enter_context(closing(place.broker.receiver([place.queue], prefetch=2 * size)))
        self._publisher = self._open.enter_context(closing(place.broker.publisher()))

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

    def keep_alive(self) -> None:
        """Both connections' heartbeats."""
        self._receiver.keep_alive()
        self._publisher.keep_alive()

    def _handle(self, taken: Sequence[Delivery]) -> None:
        orders = [Order.model_validate_json(each.message.body) for each in taken]
        rows = [{"order_id": order.order_id} for order in orders]
        with self.place.engine.begin() as connection:
            for row in [rows] if self._set_based else rows:
                connection.execute(self.place.insert, row)
        outputs = [
            done_output(self.place.done_by(order), each.message.message_id, self.place.out)
            for order, each in zip(orders, taken, strict=True)
        ]
        if any(self._publisher.publish(outputs, _SECONDS)):
            raise RuntimeError("the broker did not take an output")
        for each in taken:
            self._receiver.settle(each, Ack())

    def close(self) -> None:
        """Close what is open."""
        self._open.close()
        super().close()
