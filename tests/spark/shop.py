"""An app whose messages say what is to go wrong with their first run."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

from pydantic import BaseModel
from sqlalchemy import insert

from idemp import App, Context, Idempotent, Key
from tests.world import effect


class Order(BaseModel):
    __message_type__ = "shop.Order"
    order_id: str
    kills: str = ""  # `always`; or `worker:FILE`, `executor:FILE` in the first run, which makes the file; `job:FILE` in four runs


class Keyed(BaseModel):
    __message_type__ = "shop.Keyed"
    order_id: int


app = App("shop")


@app.handler(Order, policy=Idempotent(retention="7d"), default=True)
def ship(message: Order, ctx: Context) -> None:
    if message.order_id.startswith("bad"):
        raise ValueError("bad")
    ctx.session.execute(insert(effect).values(what=message.order_id))
    ctx.publish({"order_id": message.order_id}, type="shop.Shipped")
    if message.kills == "always":
        os.kill(os.getpid(), signal.SIGKILL)
    elif message.kills.startswith("job:"):  # Spark gives a task four attempts; it counts on the death of its worker
        file = Path(message.kills.removeprefix("job:"))
        file.write_text(file.read_text() + "." if file.exists() else ".")
        if len(file.read_text()) <= 4:
            os.kill(os.getppid() if multiprocessing.parent_process() else os.getpid(), signal.SIGKILL)
    elif message.kills:
        who, _, file = message.kills.partition(":")
        try:
            os.close(os.open(file, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        ctx.session.flush()
        os.kill(os.getpid() if who == "worker" else _parent(os.getppid()), signal.SIGKILL)
        signal.pause()


@app.handler(Keyed, policy=Idempotent(key="order_id"))
def keep(message: Keyed, ctx: Context) -> None:
    ctx.session.execute(insert(effect).values(what=f"keyed-{message.order_id}"))


class Pair(BaseModel):
    __message_type__ = "shop.Pair"
    shop: str
    number: int


KEYS = {"shop.Pair": ("shop", "number"), "shop.Noted": Key.header("x-id"), "shop.Whole": Key.digest()}
"""Types that are claimed in other ways."""


def note(message: Pair) -> None:
    """Do nothing."""


for type, key in KEYS.items():
    app.handler(Pair, type=type, policy=Idempotent(key=key))(note)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
