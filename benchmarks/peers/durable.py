"""DBOS: a durable workflow for each message, under the message's id."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from dbos import DBOS, DBOSConfig, SetWorkflowID, SQLAlchemyDatasource

from benchmarks.plain import Bare, KombuPublisher
from benchmarks.work import Done, Order

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.outside import Seat

AT_ONCE: Final = 8


class Workflows(Bare):
    """Messages become workflows, so many at once; each publishes on a connection of its thread's own."""

    def __init__(self, seat: Seat) -> None:
        place = seat.place()
        self._seat = seat
        self._free = threading.Semaphore(AT_ONCE)
        self._links = threading.local()
        source = SQLAlchemyDatasource.create(seat.database, engine=place.engine)

        @source.transaction
        def effect(order_id: str) -> None:
            source.sql_session().execute(place.insert, {"order_id": order_id})

        @DBOS.step()
        def publish(order: dict[str, object]) -> None:
            done = place.done_by(Order.model_validate(order))
            self._publish(done, done.order_id)

        @DBOS.workflow()
        def handle(order: dict[str, object]) -> None:
            effect(str(order["order_id"]))
            publish(order)
            self._ended()

        self._workflow = handle
        DBOS.launch()
        super().__init__(place)

    def _on_order(self, order: Order, message_id: str, ack: Callable[[], None]) -> None:
        self._free.acquire()
        with SetWorkflowID(message_id):
            DBOS.start_workflow(self._workflow, order.model_dump())
        ack()  # it is recorded, and recovered if the process dies

    def _ended(self) -> None:
        self._free.release()
        self._seat.settled()

    def _publish(self, done: Done, message_id: str) -> None:
        if not hasattr(self._links, "link"):
            self._links.link = KombuPublisher(self.place)
        self._links.link.publish(done, message_id)


def consume(seat: Seat) -> None:
    """Until the gate is taken down."""
    url = seat.database
    config: DBOSConfig = {"name": "bench", "system_database_url": url, "log_level": "ERROR"}
    DBOS(config=config)
    consumer = Workflows(seat)
    seat.ready()
    consumer.consume_behind(seat.gate)
    consumer.close()
    DBOS.destroy()
