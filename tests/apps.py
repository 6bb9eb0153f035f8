"""An app for real worker processes. `IDEMP_TEST_FOLDER` takes notes of runs, and holds the files that handlers wait for."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from pydantic import BaseModel

from idemp import App, AsyncContext, Context, Idempotent, Retry
from tests.world import QUEUE, Order, effect, insert_and_send

app = App(QUEUE, policy=Idempotent(key="order_id", retry=Retry(attempts=3, delays=(0.0,))))
asynchronous = App(QUEUE, policy=app.policy)
empty = App("empty")
FOLDER = Path(os.environ.get("IDEMP_TEST_FOLDER", "."))


def note(what: str) -> None:
    """Append a line; the transaction does not undo it."""
    with (FOLDER / "runs").open("a") as file:
        file.write(f"{what}\n")


class Blocking(BaseModel):
    __message_type__ = "shop.Blocking"
    order_id: str


class Poison(BaseModel):
    __message_type__ = "shop.Poison"
    order_id: str
    exits: bool = False


@app.handler(Order)
def order(message: Order, ctx: Context) -> None:
    note(message.order_id)
    insert_and_send(message, ctx)


@app.handler(Blocking)
def block(message: Blocking, ctx: Context) -> None:
    note(f"{message.order_id} began")
    while not (FOLDER / "go on").exists():
        time.sleep(0.01)
    insert_and_send(message, ctx)  # type: ignore[arg-type]


@app.handler(Poison)
def poison(message: Poison, ctx: Context) -> None:
    note(message.order_id)
    if message.exits:
        raise SystemExit(5)
    os._exit(9)


@asynchronous.handler(Order)
async def order_async(message: Order, ctx: AsyncContext) -> None:
    note(message.order_id)
    await ctx.connection.execute(effect.insert(), {"what": message.order_id})


@asynchronous.handler(Blocking)
async def block_async(message: Blocking, ctx: AsyncContext) -> None:
    await ctx.connection.execute(effect.insert(), {"what": message.order_id})
    note(f"{message.order_id} began")
    try:
        while not (FOLDER / "go on").exists():  # noqa: ASYNC110 - a test says so
            await asyncio.sleep(0.01)
    except asyncio.CancelledError:
        note(f"{message.order_id} was cancelled")
        raise


@asynchronous.handler(Poison)
async def poison_async(message: Poison, ctx: AsyncContext) -> None:
    poison(message, ctx)  # type: ignore[arg-type]
