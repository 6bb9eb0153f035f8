"""DBOS: a durable workflow for each message, under the message's id; eight at once.

The effect happens once, and the step that publishes runs again after a crash, under another id.
"""

from __future__ import annotations

import threading
from typing import Any

from dbos import DBOS, DBOSConfig, SetWorkflowID, SQLAlchemyDatasource
from kombu import Connection

from benchmarks.consumers.plain import Bare
from benchmarks.place import DONE, Done, Order, new_id
from benchmarks.seats import Seat

AT_ONCE = 8


class Workflows(Bare):
    def __init__(self, seat: Seat) -> None:
        self._seat, self._free, self._links = seat, threading.Semaphore(AT_ONCE), threading.local()
        super().__init__(seat)
        source = SQLAlchemyDatasource.create(seat.place.database, engine=self.engine)

        @source.transaction
        def effect(order_id: str) -> None:
            source.sql_session().execute(seat.place.insert, {"order_id": order_id})

        @DBOS.step()
        def publish(order_id: str, cause: str) -> None:
            self.publish(Done(order_id=order_id).model_dump_json(), cause)

        @DBOS.workflow()
        def handle(order_id: str, cause: str) -> None:
            effect(order_id)
            publish(order_id, cause)
            self._free.release()
            seat.settled()

        self._workflow = handle
        DBOS.launch()

    def _on_message(self, _body: Any, message: Any) -> None:
        order = Order.model_validate_json(message.body)
        self._free.acquire()
        with SetWorkflowID(message.properties["message_id"]):
            DBOS.start_workflow(self._workflow, order.order_id, message.properties["message_id"])
        message.ack()  # it is recorded, and recovered if the process dies

    def publish(self, body: str, cause: str) -> None:
        """Publish on a connection of the thread's own."""
        if not hasattr(self._links, "producer"):
            self._links.producer = Connection(self.place.broker, transport_options={"confirm_publish": True}).Producer()
        options = {"content_type": "application/json", "type": DONE, "delivery_mode": 2, "mandatory": True}
        self._links.producer.publish(body, routing_key=self.place.out, message_id=new_id(), correlation_id=cause, **options)


def consume(seat: Seat) -> None:
    config: DBOSConfig = {"name": "bench", "system_database_url": seat.place.database, "log_level": "ERROR"}
    DBOS(config=config)
    Workflows(seat).run()
    DBOS.destroy()
