"""Messages and tables that the apps share."""

import os
from pathlib import Path

from pydantic import BaseModel
from sqlalchemy import Column, Integer, MetaData, String, Table

MAILS = Path(os.environ.get("SHOP_MAILS", "mails.jsonl"))

metadata = MetaData()
order = Table("orders", metadata, Column("id", String, primary_key=True), Column("state", String))
stock = Table("stock", metadata, Column("sku", String, primary_key=True), Column("left", Integer))


class PlaceOrder(BaseModel):
    __message_type__ = "shop.PlaceOrder"
    order_id: str
    sku: str


class ReserveStock(BaseModel):
    __message_type__ = "shop.ReserveStock"
    order_id: str
    sku: str


class StockReserved(BaseModel):
    __message_type__ = "shop.StockReserved"
    order_id: str


class StockMissing(BaseModel):
    __message_type__ = "shop.StockMissing"
    order_id: str


class SendMail(BaseModel):
    __message_type__ = "shop.SendMail"
    order_id: str
    text: str
