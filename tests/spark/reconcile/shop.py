"""An app whose types have their ids in all the places where ids can be. Spark's Python workers import it."""

from __future__ import annotations

from uuid import UUID

from pydantic import BaseModel

from idemp import App, Idempotent
from idemp.identity import Key
from idemp.policy import Previous


class Order(BaseModel):
    """An order."""

    order_id: UUID
    sku: str = ""


app = App("shop", database="sqlite://", broker="local://nowhere.db")


@app.handler(Order, type="shop.Order", aliases=["shop.OldOrder"], policy=Idempotent(key="order_id", retention="2d"))
def order(message: Order) -> None:
    """By a field of the body, read as a UUID."""


@app.handler(dict, type="shop.Payment", policy=Idempotent(key=Key.header("x-payment")))
def payment(message: dict[str, object]) -> None:
    """By a header."""


@app.handler(dict, type="shop.Count", policy=Idempotent(key=Key.digest(), fingerprint="off"))
def count(message: dict[str, object]) -> None:
    """By the whole body."""


@app.handler(dict, type="shop.Event", policy=Idempotent(fingerprint={"except": ["at"]}))
def event(message: dict[str, object]) -> None:
    """By the message id, or a CloudEvent's."""


@app.handler(dict, type="shop.Ping")
def ping(message: dict[str, object]) -> None:
    """Not opted in."""


renamed = App("renamed", database="sqlite://", broker="local://nowhere.db")


@renamed.handler(dict, type="shop.Order", policy=Idempotent(key="order_id", previous=[Previous(key="order_no")]))
def renamed_order(message: dict[str, object]) -> None:
    """In the inbox under two ids."""
