"""idemp, in the ways that it can be run."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import create_engine, text

from benchmarks.place import Done, Order, Place
from benchmarks.seats import Seat
from idemp import App, Context, Idempotent, Settings
from idemp.twophase import TwoPhase
from idemp.worker import Worker
from idemp.worker.repeated import Repeated

GROUPS = {"group": 20}
BATCHES = {"group": 50, "batch": 50}
BOOK = text("INSERT INTO booked (id) VALUES (:id)")


def make_worker(
    place: Place,
    handle: Callable[..., None] | None = None,
    *,
    group: int = 20,
    batch: int = 1,
    fast: bool = True,
    second: bool = False,
) -> Worker:
    settings = Settings(database_url=place.database, broker_url=place.broker, group=group, fast_path=fast)
    app = App(place.queue, settings=settings)
    other = TwoPhase(app, "second", create_engine(place.database)) if second else None

    def place_order(order: Order, ctx: Context) -> None:
        ctx.connection.execute(place.insert, {"order_id": order.order_id})
        if other is not None:
            other.session(ctx).execute(BOOK, {"id": order.order_id})
        ctx.send(Done(order_id=order.order_id), to=place.out)

    app.handler(Order, policy=Idempotent(batch=batch))(handle or place_order)
    return Worker(app)


def run(seat: Seat, *arguments: Any, **options: Any) -> None:
    worker = make_worker(seat.place, *arguments, **options)
    receiver: Any = worker.intake.receiver
    ack = receiver.ack

    def counted(deliveries: Sequence[Any]) -> None:
        ack(deliveries)
        seat.settled(len(deliveries))

    receiver.ack = counted
    for name, function in (("upkeep", worker.upkeep), ("relay", worker.relay.turn)):
        Repeated(name, function, 1.0, worker.adapters.store.classify, print).start()
    gc.freeze()  # as `idemp worker` does
    seat.ready()
    while not seat.stopped.is_set():
        seat.gate.wait()
        worker.step(poll=0.05)
    worker.close()


def single(seat: Seat) -> None:
    run(seat, group=1)


def groups(seat: Seat) -> None:
    run(seat, **GROUPS)


def core(seat: Seat) -> None:
    run(seat, fast=False)


def second(seat: Seat) -> None:
    """Book in a second database on the same server."""
    with create_engine(seat.place.database).begin() as connection:
        connection.execute(text("CREATE TABLE IF NOT EXISTS booked (id varchar(36))"))
    run(seat, **GROUPS, second=True)


def batches(seat: Seat) -> None:
    run(seat, **BATCHES)


def lists(seat: Seat) -> None:
    place = seat.place

    insert = text(f"INSERT INTO {place.table.name} (order_id) SELECT unnest(CAST(:ids AS varchar[]))")

    def place_orders(orders: list[Order], contexts: list[Context]) -> None:
        contexts[0].connection.execute(insert, {"ids": [order.order_id for order in orders]})
        for order, ctx in zip(orders, contexts, strict=True):
            ctx.send(Done(order_id=order.order_id), to=place.out)

    run(seat, place_orders, group=200, batch=200)
