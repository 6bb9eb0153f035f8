"""What type checkers say about handlers. `# expect:` names a word of the error on that line; `# reveal:` what is revealed.

Not run: checked, with mypy and with pyright.
"""

from __future__ import annotations

from typing import reveal_type

from pydantic import BaseModel

from idemp import App, BatchContext, Context, Idempotent
from idemp.testing import context


class Place(BaseModel):
    order_id: int


class Cancel(BaseModel):
    order_id: int


app = App("orders")


@app.handler(Place, policy=Idempotent(key="order_id"))
def place(command: Place, ctx: Context) -> Cancel:
    return Cancel(order_id=command.order_id)


@app.batch_handler(Place, policy=Idempotent(key="order_id"))
def several(commands: list[Place], ctx: BatchContext) -> list[Cancel]:
    reveal_type(ctx.each[0])  # reveal: Context
    return [Cancel(order_id=command.order_id) for command in commands]


@app.batch_handler(Place, policy=Idempotent())  # expect: error
def one_only(command: Place) -> None: ...


@app.handler
def bare(command: Place) -> None: ...


@app.handler(type="orders.Cancel")
def options(command: Cancel, ctx: Context) -> list[Place]:
    return []


@app.handler(Place)  # expect: error
def other_type(command: Cancel, ctx: Context) -> None: ...


@app.handler(Place)
def wider(command: BaseModel) -> int:
    return 1


app.handler(Place, polcy=Idempotent())  # expect: error
app.handler(Place, policy="early")  # expect: error

reveal_type(place)  # reveal: Place Context Cancel
reveal_type(bare)  # reveal: Place
reveal_type(options)  # reveal: Cancel Context list[
reveal_type(wider)  # reveal: int

cancelled: Cancel = place(Place(order_id=1), context())
wrong: Place = place(Place(order_id=1), context())  # expect: error
place(Cancel(order_id=1), context())  # expect: error
place("text")  # expect: error

Idempotent(key="order_id", retention="7d", claim="late")
Idempotent(claim="sometimes")  # expect: error


def uses(ctx: Context) -> None:
    reveal_type(ctx.session)  # reveal: Session
    reveal_type(ctx.connection)  # reveal: Connection
    reveal_type(ctx.message_id)  # reveal: str None
    reveal_type(ctx.send({}, to="stock", type="x"))  # reveal: UUID
    ctx.send({})  # expect: error
    ctx.publish({}, type=7)  # expect: error
