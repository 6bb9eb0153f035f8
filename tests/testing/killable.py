"""An app for `kill_for_real`, which imports it in another process."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Column, Integer, MetaData, Table, insert

from idemp import App, Context, Idempotent

METADATA = MetaData()
SALE = Table("sale", METADATA, Column("number", Integer, primary_key=True), Column("of", Integer, nullable=False))

early = App("early")
late = App("late")


def sell(message: dict[str, Any], ctx: Context) -> None:
    ctx.connection.execute(insert(SALE).values(of=message["id"]))
    ctx.send({"id": message["id"]}, to="stock", type="stock.Reserve")
    ctx.publish({"id": message["id"]}, type="orders.Placed")


early.handler(dict, type="orders.Place", policy=Idempotent(key="id"))(sell)
late.handler(dict, type="orders.Place", policy=Idempotent(key="id", claim="late"))(sell)
