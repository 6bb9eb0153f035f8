"""Handlers that other processes have to find by their names."""

from __future__ import annotations

import socket
from typing import Any

from idemp import App, Context, Idempotent

app = App("scripts")


@app.handler(dict, type="idioms.Do", policy=Idempotent(key="id"))
def names_its_host(message: dict[str, Any], ctx: Context) -> None:
    for tag in sorted({"a", "b", "c"}):
        ctx.send({"by": socket.gethostname(), "tag": tag}, to="q", type="idioms.Done")
