"""A handler raises errors of idemp's own: unless idemp raised them for this handling, they are the handler's failures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from idemp import Context, Idempotent, Inbox, Outcome, Policy, errors
from idemp.broker.port import Park
from idemp.errors import (
    AlreadyHandled,
    BranchUnfinished,
    DispatchIncomplete,
    HandlerError,
    IdempError,
    IdInFlight,
    LateMessage,
    Refuse,
    StoreUnavailable,
    TransactionEnded,
    WorkerDied,
)
from idemp.identity import Key
from idemp.inbox.memory import InMemoryStore
from tests.house import SELL, House, sale
from tests.protocol.test_classification import POLICIES, until_parked


def every() -> Iterator[IdempError]:
    """One error of each public class."""
    for name, kind in vars(errors).items():
        if not (isinstance(kind, type) and issubclass(kind, IdempError)) or name.startswith("_"):
            continue
        if kind is DispatchIncomplete:
            yield kind("mine", committed="yes", reasons=["closed"])
        elif kind is AlreadyHandled:
            yield kind("mine", outputs=[])
        elif kind is WorkerDied:
            yield kind("mine", attempts=1)
        else:
            yield kind("mine")


EVERY = [each for each in every() if not isinstance(each, Refuse)]


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("error", EVERY, ids=lambda error: type(error).__name__)
def test_each_is_counted_and_parked(house: House, error: IdempError, policy: Policy) -> None:
    def sell(message: dict[str, Any]) -> None:
        raise error

    house.app.handler(dict, type=SELL, policy=policy)(sell)
    *retried, reason = until_parked(house, sale())
    assert retried == ["counted", "counted"]
    assert reason in {type(error).__name__, "HandlerError"}


@pytest.mark.parametrize("error", EVERY, ids=lambda error: type(error).__name__)
def test_in_a_batch_it_spoils_no_neighbour(house: House, error: IdempError) -> None:
    def sell(message: dict[str, Any], ctx: Context) -> None:
        if ctx.message_id == "bad":
            raise error

    house.app.handler(dict, type=SELL, policy=Idempotent(attempts=1, batch=10))(sell)
    ended = house.together(sale("good"), sale("bad"), sale("fine"))
    assert [outcome for outcome, _ in ended] == [Outcome.HANDLED, Outcome.PARKED, Outcome.HANDLED]


@pytest.mark.parametrize("error", [StoreUnavailable("mine"), BranchUnfinished("mine"), IdInFlight("mine")])
def test_a_key_that_raises_it_counts(house: House, error: IdempError) -> None:
    def number(message: Any) -> str:
        raise error

    house.app.handler(dict, type=SELL, policy=Idempotent(attempts=3, key=number))(lambda message: None)
    *retried, reason = until_parked(house, sale())
    assert retried == ["counted", "counted"]
    assert reason in {type(error).__name__, "HandlerError"}


def test_the_dead_letter_says_what_was_raised(house: House) -> None:
    def sell(message: dict[str, Any]) -> None:
        raise BranchUnfinished("The archive's branch is open.")

    house.app.handler(dict, type=SELL, policy=Idempotent(attempts=1))(sell)
    _, settlement = house.handle()
    assert isinstance(settlement, Park)
    told = settlement.headers["idemp-dead-error"]
    assert told.startswith("The handler raised BranchUnfinished: The archive's branch is open.")
    assert "in sell" in settlement.headers["idemp-dead-stack"]


@pytest.mark.parametrize("error", EVERY, ids=lambda error: type(error).__name__)
def test_the_dead_letter_does_not_say_what_became_of_another_one(house: House, error: IdempError) -> None:
    def sell(message: dict[str, Any]) -> None:
        raise error

    house.app.handler(dict, type=SELL, policy=Idempotent(attempts=1))(sell)
    _, settlement = house.handle()
    assert isinstance(settlement, Park)
    told = settlement.headers["idemp-dead-error"]
    assert error.message in told
    assert "was committed" not in told
    assert "is unknown" not in told
    assert told.count("The database was not committed.") <= 1


@pytest.mark.parametrize("named", [StoreUnavailable, HandlerError])
def test_a_policy_may_name_it(house: House, named: type[Exception]) -> None:
    def sell(message: dict[str, Any]) -> None:
        raise StoreUnavailable("mine")

    house.app.handler(dict, type=SELL, policy=Idempotent(attempts=9, refuse_on=[named]))(sell)
    outcome, settlement = house.handle()
    assert outcome is (Outcome.PARKED if named is StoreUnavailable else Outcome.RETRIED)
    del settlement


def test_what_another_handling_came_to_is_not_what_this_one_came_to(house: House) -> None:
    """The inner function ended its own transaction, which parks its own message; the outer one only failed."""

    def pay(message: dict[str, Any], ctx: Context) -> None:
        ctx.session.commit()

    paying = Inbox(InMemoryStore()).wrap(pay, type="bank.Pay", consumer="bank", policy=Idempotent(key="id"))

    def sell(message: dict[str, Any], ctx: Context) -> None:
        with pytest.raises(TransactionEnded):
            paying({"id": 1})
        paying({"id": 1})

    house.app.handler(dict, type=SELL, policy=Idempotent(attempts=3))(sell)
    assert until_parked(house, sale()) == ["counted", "counted", "HandlerError"]


def test_what_idemp_raised_for_this_handling_counts_as_before(house: House) -> None:
    """Late messages and ended transactions are parked at once, whatever the handler does with the error."""

    def sell(message: dict[str, Any], ctx: Context) -> None:
        try:
            ctx.session.commit()
        except TransactionEnded as ended:
            raise ended from LateMessage("mine")

    house.app.handler(dict, type=SELL, policy=Idempotent(attempts=3))(sell)
    assert until_parked(house, sale()) == ["TransactionEnded"]


def test_what_no_message_class_takes_is_parked_at_once_though_it_was_read_before(house: House) -> None:
    """A message that is read anew, for another run, is idemp's to read."""
    house.app.handler(dict, type=SELL, policy=Idempotent(key=Key.field("sku")))(lambda message: None)
    assert until_parked(house, sale(body=b"[]")) == ["UndecodableMessage"]
