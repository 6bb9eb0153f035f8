"""Consumers as users write them without a framework: kombu and SQLAlchemy."""

from __future__ import annotations

import contextlib
from typing import Any

from kombu import Connection, Queue
from sqlalchemy import String, create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from benchmarks.place import DONE, Done, Order, new_id
from benchmarks.seats import Seat

PREFETCH = 50


class Bare:
    """One transaction, one confirmed publish, one ack. No deduplication: a redelivery repeats the effect."""

    def __init__(self, seat: Seat) -> None:
        self.place, self._seat = seat.place, seat
        self.engine = create_engine(seat.place.database)
        self._incoming = Connection(seat.place.broker)
        self._outgoing = Connection(seat.place.broker, transport_options={"confirm_publish": True})
        self._producer = self._outgoing.Producer()
        queue = Queue(seat.place.queue, no_declare=True)
        self._consumer = self._incoming.Consumer([queue], callbacks=[self._on_message], accept=["json"], prefetch_count=PREFETCH)
        self._consumer.consume()

    def run(self) -> None:
        self._seat.ready()
        while not self._seat.stopped.is_set():
            self._seat.gate.wait()
            with contextlib.suppress(TimeoutError):
                self._incoming.drain_events(timeout=0.05)

    def _on_message(self, _body: Any, message: Any) -> None:
        self.handle(Order.model_validate_json(message.body), message.properties["message_id"])
        message.ack()
        self._seat.settled()

    def handle(self, order: Order, message_id: str) -> None:
        with self.engine.begin() as connection:
            connection.execute(self.place.insert, {"order_id": order.order_id})
        self.publish(Done(order_id=order.order_id).model_dump_json(), message_id)

    def publish(self, body: str, cause: str) -> None:
        self._producer.publish(
            body,
            routing_key=self.place.out,
            content_type="application/json",
            type=DONE,
            message_id=new_id(),
            correlation_id=cause,
            delivery_mode=2,
            mandatory=True,
        )


class _Base(DeclarativeBase):
    pass


class _Seen(_Base):
    __tablename__ = "naive_seen"
    message_id: Mapped[str] = mapped_column(String(36), primary_key=True)


class _ToSend(_Base):
    __tablename__ = "naive_to_send"
    id: Mapped[int] = mapped_column(primary_key=True)
    body: Mapped[str]
    sent: Mapped[bool] = mapped_column(default=False)


class Naive(Bare):
    """An inbox as most articles describe it: SELECT first, an outbox row, COMMIT, publish, mark it as sent, COMMIT."""

    def __init__(self, seat: Seat) -> None:
        super().__init__(seat)
        _Base.metadata.create_all(self.engine)

    def handle(self, order: Order, message_id: str) -> None:
        with Session(self.engine) as session:
            if session.get(_Seen, message_id) is not None:
                return
            session.add(_Seen(message_id=message_id))
            session.execute(self.place.insert, {"order_id": order.order_id})
            row = _ToSend(body=Done(order_id=order.order_id).model_dump_json())
            session.add(row)
            session.commit()
            self.publish(row.body, message_id)
            row.sent = True
            session.commit()


def bare(seat: Seat) -> None:
    Bare(seat).run()


def naive(seat: Seat) -> None:
    Naive(seat).run()
