"""`redelivery_machine` finds what breaks a promise, and says how."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from pydantic import BaseModel
from sqlalchemy import update
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from idemp import App, AsyncContext, ConfigurationError, Context, Idempotent, Policy
from idemp.messages import Delivery
from idemp.testing import MemoryBroker, PromiseBroken, redelivery_machine, replay
from idemp.testing.memory import MemoryReceiver


class Deposit(BaseModel):
    __message_type__ = "bank.Deposit"
    id: int
    amount: int


class Base(DeclarativeBase):
    pass


class Account(Base):
    __tablename__ = "machine_account"
    id: Mapped[int] = mapped_column(primary_key=True)
    balance: Mapped[int]


MESSAGES = [Deposit(id=number, amount=10**number) for number in range(3)]
WORLD: Any = {"messages": MESSAGES, "tables": Base.metadata, "setup": lambda session: session.add(Account(id=1, balance=0))}


def deposit(message: Deposit, ctx: Context) -> None:
    ctx.session.execute(update(Account).values(balance=Account.balance + message.amount))
    ctx.send({"amount": message.amount}, to="mail", type="bank.Deposited")
    ctx.send({"amount": message.amount}, to="mail", type="bank.Thanks", delay="1h")


async def async_deposit(message: Deposit, ctx: AsyncContext) -> None:
    await ctx.session.execute(update(Account).values(balance=Account.balance + message.amount))
    ctx.send({"amount": message.amount}, to="mail", type="bank.Deposited")


def app_of(handler: Any, policy: Policy | None = None) -> App:
    app = App("bank")
    app.handler(Deposit, policy=policy or Idempotent(key="id"))(handler)
    return app


def run(machine: Any, examples: int = 200) -> None:
    run_state_machine_as_test(
        machine, settings=settings(machine.TestCase.settings, max_examples=examples, derandomize=True, database=None)
    )


@pytest.mark.parametrize("handler", [deposit, async_deposit])
def test_a_handler_that_is_right_passes(handler: Any) -> None:
    run(redelivery_machine(app_of(handler), **WORLD), examples=10)


class AcksAtOnce(MemoryBroker):
    """Acknowledges what it delivers."""

    def receiver(self, queue: str, prefetch: int = 40) -> MemoryReceiver:
        receiver = super().receiver(queue, prefetch)
        receive = receiver.receive

        def receive_and_ack(limit: int, timeout: float) -> list[Delivery]:
            deliveries = receive(limit, timeout)
            receiver.ack(deliveries)
            return deliveries

        receiver.receive = receive_and_ack  # type: ignore[method-assign]
        return receiver


@pytest.mark.parametrize(
    ("broker", "policy", "words"),
    [
        (
            AcksAtOnce,
            None,
            r"(?s)at rest, handled messages is \d, but if nothing happens \d\n1\. .*dies: .*Run it again: replay\(machine, \[",
        ),
        (lambda: MemoryBroker(strict=False), Policy(), r"(?s)at rest, state.machine_account is .*2\. .* sent again"),
    ],
    ids=["ack before commit", "not opted in"],
)
def test_what_breaks_a_promise_is_found(broker: Any, policy: Policy | None, words: str) -> None:
    app = app_of(deposit, policy)
    machine = redelivery_machine(app, broker=lambda: _lenient(broker), **WORLD)
    with pytest.raises(PromiseBroken, match=words) as raised:
        run(machine)
    assert len(raised.value.schedule) <= 3
    with pytest.raises(PromiseBroken):
        replay(machine, raised.value.schedule)
    replay(redelivery_machine(app_of(deposit), **WORLD), raised.value.schedule)


def _lenient(kind: Any) -> MemoryBroker:
    return kind(strict=False) if isinstance(kind, type) else kind()


def commits_by_itself(message: Deposit, ctx: Context) -> None:
    ctx.connection.exec_driver_sql("UPDATE machine_account SET balance = balance + 1")
    driver: Any = ctx.connection.connection.dbapi_connection
    driver.commit()


def test_a_handler_that_never_succeeds_is_no_success() -> None:
    with pytest.raises(AssertionError, match="no message is handled, even if nothing happens"):
        redelivery_machine(app_of(commits_by_itself), **WORLD)


def test_arguments_that_test_nothing_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="nothing would be tested"):
        redelivery_machine(app_of(deposit), messages=[], tables=Base.metadata)
    with pytest.raises(ConfigurationError, match=r"has to be a list: write messages="):
        redelivery_machine(app_of(deposit), messages=b"{}", tables=Base.metadata)
    with pytest.raises(ConfigurationError, match="effects would not be compared"):
        redelivery_machine(app_of(deposit), messages=MESSAGES)
