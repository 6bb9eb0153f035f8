"""One consumer, whose handlers decide on an account by its events and publish the next ones.

What a handler publishes is appended to the stream of the account that its command is about, and sent, always under one id.
If another command was faster, the handler runs again on what the account is then; if the same command came twice, the
second delivery finds the first one's events and publishes those.
"""

from __future__ import annotations

import os

from sqlalchemy import Engine

from idemp import App, Context, Idempotent
from idemp.inbox.sql import SqlStore, SqlStreams, create_engine_safely
from idemp.inbox.stream import StreamInbox, stream_of

from .ledger import account_of
from .messages import Declined, Deposit, Deposited, SendLetter, Withdraw, Withdrawn

DATABASE = os.environ.get("IDEMP_DATABASE_URL", "sqlite:///idemp.db")


def make_inbox(engine: Engine) -> StreamInbox:
    """Streams in a database, and beside them what a consumer keeps that is no event."""
    return StreamInbox(SqlStreams(engine), beside=SqlStore(engine))


app = App("accounts", store=make_inbox(create_engine_safely(DATABASE)))
COMMAND = Idempotent(key="command_id", entity="account", retention="7d")


@app.handler(Deposit, policy=COMMAND)
def deposit(command: Deposit, ctx: Context) -> None:
    """It need not look: whatever the account is, money may come."""
    ctx.publish(
        Deposited(account=command.account, cents=command.cents), mandatory=False
    )  # it is fine if nobody listens


@app.handler(Withdraw, policy=COMMAND)
def withdraw(command: Withdraw, ctx: Context) -> None:
    """It decides by what the account is, which is still so when its event is appended."""
    if account_of(stream_of(ctx)).cents >= command.cents:
        ctx.publish(Withdrawn(account=command.account, cents=command.cents), mandatory=False)
        return
    ctx.publish(Declined(account=command.account, cents=command.cents), mandatory=False)
    ctx.send(SendLetter(account=command.account, text="There is not enough on your account."), to="post")
