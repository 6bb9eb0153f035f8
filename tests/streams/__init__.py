"""A bank whose accounts are streams."""

from __future__ import annotations

from pydantic import BaseModel

from idemp import App, Context, Idempotent, Retry, Settings
from idemp.streams import FOREVER, Event, Streams

VERSION = "1"
QUEUE, AUDIT = "storm", "storm.sink"
POLICY = Idempotent(key="id", retention=FOREVER, retry=Retry(attempts=1_000, delays=["0s"], jitter=0))


class Move(BaseModel):
    __message_type__ = "bank.Move"
    id: int
    account: str
    cents: int


class Moved(BaseModel):
    __message_type__ = "bank.Moved"
    id: int
    cents: int


def balance(cents: int, event: Event, fee: int = 0) -> int:
    return cents + int(event.data["cents"]) - fee


def bank(settings: Settings | None = None) -> tuple[App, Streams]:
    app = App(QUEUE, policy=POLICY, settings=settings)
    streams = Streams(app)

    @app.handler(Move)
    def move(command: Move, ctx: Context) -> Moved | None:
        account = streams.open(ctx, command.account, balance, 0, version=VERSION)
        if account.state + command.cents < 0:
            return None
        return Moved(id=command.id, cents=command.cents)

    return app, streams
