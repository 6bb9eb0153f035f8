"""The app that storms run: an effect and an output to a queue outside, then a message to itself with the same again.

One message in 40 takes a second, and those with a negative number always fail.
"""

from __future__ import annotations

import asyncio
import time

from pydantic import BaseModel
from sqlalchemy import Column, Integer, MetaData, Table

from idemp import App, AsyncContext, Context, Idempotent, Retry

QUEUE, SINK = "storm", "storm.sink"
metadata = MetaData()
# No unique constraint: it would hide a second effect.
effect = Table("effect", metadata, Column("row", Integer, primary_key=True), Column("number", Integer), Column("step", Integer))


class Begin(BaseModel):
    __message_type__ = "storm.Begin"
    number: int


class GoOn(BaseModel):
    __message_type__ = "storm.GoOn"
    number: int


class Done(BaseModel):
    __message_type__ = "storm.Done"
    number: int
    step: int


ATTEMPTS, SLOW = 5, 40
RETRY = Retry(attempts=ATTEMPTS, delays=["0s"])
app = App(QUEUE, policy=Idempotent(key="number", retry=RETRY))
asynchronous = App(QUEUE, policy=app.policy)
BATCHES = Idempotent(key="number", batch=10, retry=RETRY)


def takes_long(message: Begin) -> bool:
    if message.number < 0:
        raise RuntimeError("always")
    return message.number % SLOW == SLOW - 1


@app.handler(Begin)
def begin(message: Begin, ctx: Context) -> None:
    if takes_long(message):
        time.sleep(1)
    ctx.connection.execute(effect.insert(), {"number": message.number, "step": 1})
    ctx.send(Done(number=message.number, step=1), to=SINK)
    ctx.send(GoOn(number=message.number), to=QUEUE)


@app.handler(GoOn, policy=BATCHES)
def go_on(message: GoOn, ctx: Context) -> None:
    ctx.connection.execute(effect.insert(), {"number": message.number, "step": 2})
    ctx.send(Done(number=message.number, step=2), to=SINK)


@asynchronous.handler(Begin)
async def begin_async(message: Begin, ctx: AsyncContext) -> None:
    if takes_long(message):
        await asyncio.sleep(1)
    await ctx.connection.execute(effect.insert(), {"number": message.number, "step": 1})
    ctx.send(Done(number=message.number, step=1), to=SINK)
    await asyncio.sleep(0.005)
    ctx.send(GoOn(number=message.number), to=QUEUE)


@asynchronous.handler(GoOn, policy=BATCHES)
async def go_on_async(message: GoOn, ctx: AsyncContext) -> None:
    await ctx.session.execute(effect.insert(), {"number": message.number, "step": 2})
    ctx.send(Done(number=message.number, step=2), to=SINK)
