"""The app of the storm: a payment in two databases, and an output."""

from __future__ import annotations

import os

from pydantic import BaseModel

from idemp import App, Context, Idempotent, Retry
from idemp.twophase import TwoPhase
from tests.storm_app import QUEUE, SINK, Done, effect
from tests.twophase import booked, engine_of

app = App(QUEUE)
ledger = TwoPhase(app, "ledger", engine_of(os.environ.get("STORM_LEDGER", "postgresql://localhost")))


class Begin(BaseModel):
    __message_type__ = "storm.Begin"
    number: int


@app.handler(Begin, policy=Idempotent(key="number", retry=Retry(attempts=1_000, delays=["0s"])))
def pay(message: Begin, ctx: Context) -> None:
    ctx.connection.execute(effect.insert(), {"number": message.number, "step": 1})
    ledger.session(ctx).execute(booked.insert(), {"what": str(message.number)})
    ctx.send(Done(number=message.number, step=1), to=SINK)
