"""A consumer some of whose messages end the process that handles them."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from sqlalchemy import Column, Integer, MetaData, String, Table, insert

from idemp import App, Context, Idempotent

metadata = MetaData()
# Written outside of the handling's transaction, so that a start shows even if its process dies.
started = Table(
    "started",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("message_id", String(64), nullable=False),
)
effect = Table(
    "effect",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("message_id", String(64), nullable=False),
)

app = App("killers")


@app.handler(dict, type="killers.Work", policy=Idempotent(attempts=3))
def work(message: dict[str, Any], ctx: Context) -> None:
    """One effect, unless it kills."""
    with ctx.connection.engine.begin() as apart:
        apart.execute(insert(started).values(message_id=ctx.message_id))
    ctx.connection.execute(insert(effect).values(message_id=ctx.message_id))
    if message["kills"] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif message["kills"] == "exits":
        sys.exit(3)
    elif message["kills"] == "memory":
        raise MemoryError
