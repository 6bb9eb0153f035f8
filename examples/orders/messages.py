"""The messages. `__message_type__` is the name on the wire: it stays when a class moves or is renamed."""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel


class PlaceOrder(BaseModel):
    """A customer orders; `order_id` is the shop's own number, the same however often the shop sends this."""

    __message_type__: ClassVar[str] = "orders.PlaceOrder"
    order_id: int
    sku: str
    quantity: int


class OrderPlaced(BaseModel):
    """Something happened: whoever is interested may listen."""

    __message_type__: ClassVar[str] = "orders.OrderPlaced"
    order_id: int


class ReserveStock(BaseModel):
    """A command to the stock."""

    __message_type__: ClassVar[str] = "stock.ReserveStock"
    order_id: int
    sku: str
    quantity: int


class StockReserved(BaseModel):
    """The stock's answer."""

    __message_type__: ClassVar[str] = "stock.StockReserved"
    order_id: int
    sku: str
    quantity: int


class OrderConfirmed(BaseModel):
    """The end of the story."""

    __message_type__: ClassVar[str] = "orders.OrderConfirmed"
    order_id: int


class GetOrder(BaseModel):
    """A question."""

    __message_type__: ClassVar[str] = "orders.GetOrder"
    order_id: int


class OrderView(BaseModel):
    """Its answer."""

    __message_type__: ClassVar[str] = "orders.OrderView"
    order_id: int
    status: str
