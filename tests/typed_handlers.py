"""Handlers as type checkers see them: `make check` looks at this file, and an error that is expected has to be one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import assert_type

from pydantic import BaseModel

from idemp import App, AsyncContext, Context


class Order(BaseModel):
    id: int


class Placed(BaseModel):
    id: int


app = App("typed")
handler = app.handler(Order)


def plain(message: Order, ctx: Context) -> Placed:
    return Placed(id=message.id)


async def asynchronous(message: Order, ctx: AsyncContext) -> AsyncIterator[Placed]:
    yield Placed(id=message.id)


async def listed(messages: list[Order], contexts: list[AsyncContext]) -> None: ...


def takes_async_context(message: Order, ctx: AsyncContext) -> None: ...


def of_another_message(message: Placed) -> None: ...


def check() -> None:
    assert_type(handler(plain)(Order(id=1), Context("", {}, None, None)), Placed)
    assert_type(handler(asynchronous)(Order(id=1), AsyncContext("", {}, None, None)), AsyncIterator[Placed])
    handler(listed)
    handler(takes_async_context)  # type: ignore[arg-type]  # pyright: ignore[reportCallIssue, reportArgumentType]
    handler(of_another_message)  # type: ignore[arg-type]  # pyright: ignore[reportCallIssue, reportArgumentType]
