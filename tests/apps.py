"""An app for real worker processes. `IDEMP_TEST_FOLDER` takes notes of runs, and holds the files that handlers wait for."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from pydantic import BaseModel

from idemp import App, AsyncContext, Context, Idempotent, Key, Policy, Retry
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


# Messages that look alike, and are not the same: by a header, by the source of an event, or because each delivery counts.


class ByHeader(BaseModel):
    __message_type__ = "shop.ByHeader"


class ByEvent(BaseModel):
    __message_type__ = "shop.ByEvent"


class Counted(BaseModel):
    __message_type__ = "shop.Counted"


LOOKALIKES: dict[type[BaseModel], Policy] = {
    ByHeader: Idempotent(key=Key.header("x-id"), retry=app.policy.retry),
    ByEvent: Idempotent(retry=app.policy.retry),
    Counted: Policy(retry=app.policy.retry),
}
lookalikes, lookalikes_async = App(QUEUE), App(QUEUE)


def begin_lookalike(ctx: Context | AsyncContext) -> str:
    """Fail once for each message, if that is wanted."""
    headers = ctx.headers
    what = headers.get("x-id") or headers.get("ce-source") or "counted"
    with (FOLDER / "runs").open("a+") as file:
        file.seek(0)
        runs = file.read().splitlines().count(what) + 1
        file.write(f"{what}\n")
    if (FOLDER / "fail").exists() and runs <= (3 if what == "counted" else 1):
        raise RuntimeError("for the first time")
    return what


def lookalike(message: BaseModel, ctx: Context) -> None:
    what = begin_lookalike(ctx)
    while (FOLDER / "hold").exists():
        time.sleep(0.01)
    ctx.connection.execute(effect.insert(), {"what": what})


async def lookalike_async(message: BaseModel, ctx: AsyncContext) -> None:
    what = begin_lookalike(ctx)
    while (FOLDER / "hold").exists():  # noqa: ASYNC110 - a test says so
        await asyncio.sleep(0.01)
    await ctx.connection.execute(effect.insert(), {"what": what})


for _model, _policy in LOOKALIKES.items():
    lookalikes.handler(_model, policy=_policy)(lookalike)
    lookalikes_async.handler(_model, policy=_policy)(lookalike_async)


class Steady(BaseModel):
    __message_type__ = "shop.Steady"
    order_id: str


ONCE = Idempotent(key="order_id", retry=Retry(attempts=1))
once, once_async = App(QUEUE, policy=ONCE), App(QUEUE, policy=ONCE)


@once.handler(Steady)
def steady(message: Steady, ctx: Context) -> None:
    note(message.order_id)
    time.sleep(0.2)
    ctx.connection.execute(effect.insert(), {"what": message.order_id})


@once_async.handler(Steady)
async def steady_async(message: Steady, ctx: AsyncContext) -> None:
    note(message.order_id)
    await asyncio.sleep(0.2)
    await ctx.connection.execute(effect.insert(), {"what": message.order_id})
