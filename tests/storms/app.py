"""The consumer in the storm: an effect that shows when it is doubled, one output sent and one published."""

from __future__ import annotations

from uuid import UUID

from pydantic import BaseModel
from sqlalchemy import BigInteger, Column, Identity, MetaData, String, Table, Uuid, insert

from idemp import App, Context, Idempotent

CONSUMER = "storm"
AUDIT_QUEUE = "storm.audit"

metadata = MetaData()
# No unique key on the order: an effect that happened twice leaves two rows.
effect = Table(
    "effect",
    metadata,
    Column("id", BigInteger, Identity(), primary_key=True),
    Column("order_id", Uuid, nullable=False),
    Column("transport_id", String(64), nullable=False),
)


class Charge(BaseModel):
    """The input."""

    __message_type__ = "storm.Charge"
    order_id: UUID
    cents: int


class Invoice(BaseModel):
    """An output, sent to one queue."""

    __message_type__ = "storm.Invoice"
    order_id: UUID
    cents: int


class Charged(BaseModel):
    """An output, published to whoever listens."""

    __message_type__ = "storm.Charged"
    order_id: UUID


app = App(CONSUMER)


@app.handler(Charge, policy=Idempotent(key="order_id"))
def charge(message: Charge, ctx: Context) -> Charged:
    """Write the effect, send the invoice, publish the event."""
    ctx.connection.execute(insert(effect).values(order_id=message.order_id, transport_id=ctx.message.message_id or ""))
    ctx.send(Invoice(order_id=message.order_id, cents=message.cents), to=AUDIT_QUEUE)
    return Charged(order_id=message.order_id)
