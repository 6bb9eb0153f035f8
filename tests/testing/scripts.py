"""Handlers that other processes have to find by their names."""

from __future__ import annotations

import socket
from typing import Any
from uuid import uuid4

from sqlalchemy import text

from idemp import App, Context, Idempotent

app = App("scripts")


@app.handler(dict, type="idioms.Do", policy=Idempotent(key="id"))
def names_its_host(message: dict[str, Any], ctx: Context) -> None:
    for tag in sorted({"a", "b", "c"}):
        ctx.send({"by": socket.gethostname(), "tag": tag}, to="q", type="idioms.Done")


number = str(uuid4())
limit = str(7 * 100_003)
kept: dict[str, str] = {}


def sends_its_processes_number(message: dict[str, Any], ctx: Context) -> None:
    ctx.send({"by": number}, to="q", type="idioms.Done")


def keeps_the_first_address(message: dict[str, Any], ctx: Context) -> None:
    ctx.send({"to": kept.setdefault("email", message["email"])}, to="q", type="idioms.Done")


def sends_what_each_process_has(message: dict[str, Any], ctx: Context) -> None:
    ctx.send({"limit": limit, "email": message["email"]}, to="q", type="idioms.Done")


def writes_what_it_made_first(message: dict[str, Any], ctx: Context) -> None:
    made = {"email": kept.setdefault("id", str(uuid4()))}
    ctx.session.execute(text("INSERT INTO idiom_customers (email) VALUES (:email)"), made)
