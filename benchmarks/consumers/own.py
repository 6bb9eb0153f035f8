"""idemp, in the ways that it can be run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.place import Done, Order
from benchmarks.seats import Seat
from idemp import App, Context, Idempotent, Settings
from idemp.worker import Worker


def run(seat: Seat, *, group: int = 20, batch: int = 1) -> None:
    place = seat.place
    app = App(place.queue, settings=Settings(database_url=place.database, broker_url=place.broker, group=group))

    def handle(order: Order, ctx: Context) -> None:
        ctx.connection.execute(place.insert, {"order_id": order.order_id})
        ctx.send(Done(order_id=order.order_id), to=place.out)

    app.handler(Order, policy=Idempotent(batch=batch))(handle)
    worker = Worker(app)
    receiver: Any = worker._receiver
    ack = receiver.ack

    def counted(deliveries: Sequence[Any]) -> None:
        ack(deliveries)
        seat.settled(len(deliveries))

    receiver.ack = counted
    for thread in worker._threads:
        thread.start()
    seat.ready()
    while not seat.stopped.is_set():
        seat.gate.wait()
        worker.step(poll=0.05)
    worker.close()


def single(seat: Seat) -> None:
    run(seat, group=1)


def groups(seat: Seat) -> None:
    run(seat)


def batches(seat: Seat) -> None:
    run(seat, group=50, batch=50)
