"""The two consumers of the demo: `orders` takes commands and publishes events, `stock` takes the events."""

from __future__ import annotations

from typing import Final

from pydantic import BaseModel
from sqlalchemy import Column, Integer, MetaData, String, Table

from idemp import App, Context, Idempotent

__all__ = ["OrderPlaced", "PlaceOrder", "metadata", "order", "orders", "reservation", "stock"]

metadata: Final = MetaData()
order: Final = Table("demo_order", metadata, Column("row", Integer, primary_key=True), Column("order_id", Integer))
reservation: Final = Table(
    "demo_reservation",
    metadata,
    Column("row", Integer, primary_key=True),
    Column("order_id", Integer),
    Column("message_id", String(36)),
)

orders = App("demo.orders", policy=Idempotent())
stock = App("demo.stock", policy=Idempotent())


class PlaceOrder(BaseModel):
    """Command to the orders.

    Example:
        >>> PlaceOrder(order_id=7).order_id
        7
    """

    __message_type__ = "demo.PlaceOrder"
    order_id: int


class OrderPlaced(BaseModel):
    """Event of the orders.

    Example:
        >>> OrderPlaced(order_id=7).order_id
        7
    """

    __message_type__ = "demo.OrderPlaced"
    order_id: int


@orders.handler(PlaceOrder, policy=Idempotent(key="order_id"))
def _place_order(command: PlaceOrder, ctx: Context) -> OrderPlaced:
    ctx.connection.execute(order.insert(), {"order_id": command.order_id})
    return OrderPlaced(order_id=command.order_id)


@stock.handler(OrderPlaced)  # by message id: an event under two ids would reserve twice
def _reserve(event: OrderPlaced, ctx: Context) -> None:
    ctx.connection.execute(reservation.insert(), {"order_id": event.order_id, "message_id": ctx.message_id})
