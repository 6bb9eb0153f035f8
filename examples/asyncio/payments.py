"""Code that the consumers share: a message, a table, and the addresses of servers."""

import os

from pydantic import BaseModel
from sqlalchemy import Column, Integer, MetaData, Table

DATABASE = os.environ.get("DATABASE_URL", "postgresql+asyncpg://shop@localhost/shop")
BROKER = os.environ.get("AMQP_URL", "amqp://guest:guest@localhost/")
QUEUE = "payments"

metadata = MetaData()
payment = Table("payment", metadata, Column("row", Integer, primary_key=True), Column("id", Integer), Column("cents", Integer))


class TakePayment(BaseModel):
    __message_type__ = "shop.TakePayment"
    payment_id: int
    cents: int


class PaymentTaken(BaseModel):
    __message_type__ = "shop.PaymentTaken"
    payment_id: int
