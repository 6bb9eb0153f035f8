"""The consumers in the soak: one whose handler may fail, and one each of whose messages ends its process."""

from __future__ import annotations

import os
import signal
from typing import Literal
from uuid import UUID

from pydantic import BaseModel
from sqlalchemy import BigInteger, Column, Identity, Integer, MetaData, Table, insert

from idemp import App, Context, Idempotent

CONSUMER = "soak"
KILLERS = "soak-killers"
INVOICES = "soak.invoices"
CHARGES = "soak.charges"

Kind = Literal["fine", "once", "always"]

metadata = MetaData()
# No unique key on the number: an effect that happened twice leaves two rows.
effect = Table(
    "effect",
    metadata,
    Column("id", BigInteger, Identity(), primary_key=True),
    Column("number", Integer, nullable=False),
)


class Doomed(Exception):
    """What handlers raise for messages that are made to fail."""


class Charge(BaseModel):
    """The input; its kind says how often its handler fails."""

    __message_type__ = "soak.Charge"
    order_id: UUID
    number: int
    kind: Kind


class Invoice(BaseModel):
    """An output, sent to a queue that may be full."""

    __message_type__ = "soak.Invoice"
    number: int


class Charged(BaseModel):
    """An output, published to an exchange that may be gone."""

    __message_type__ = "soak.Charged"
    number: int


class Kill(BaseModel):
    """An input that ends the process which handles it."""

    __message_type__ = "soak.Kill"


OUTPUT_TYPES = (Invoice.__message_type__, Charged.__message_type__)  # in the order in which they are emitted

app = App(CONSUMER)
killers = App(KILLERS)


@app.handler(Charge, policy=Idempotent(key="order_id", attempts=3, retry_delays="1s"))
def charge(message: Charge, ctx: Context) -> Charged:
    """Write the effect and emit both outputs, and then fail if the message says so."""
    ctx.connection.execute(insert(effect).values(number=message.number))
    ctx.send(Invoice(number=message.number), to=INVOICES)
    if message.kind == "always" or (message.kind == "once" and ctx.attempt == 1):
        raise Doomed(message.kind)
    return Charged(number=message.number)


@killers.handler(Kill, policy=Idempotent(attempts=3, retry_delays="1s"))
def kill(message: Kill, ctx: Context) -> None:
    """End this process."""
    del message, ctx
    os.kill(os.getpid(), signal.SIGKILL)
