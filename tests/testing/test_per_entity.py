"""The redelivery machine on handlers whose inbox is the stream, or the document, that they write."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from examples.accounts import Account, account_of, app
from examples.accounts.messages import Deposit, Withdraw
from idemp import App, Context, Idempotent
from idemp.errors import ConfigurationError
from idemp.identity import EffectiveId
from idemp.inbox.document import DocumentInbox, InMemoryDocuments, document_of
from idemp.inbox.memory import InMemoryStore
from idemp.inbox.sql import SqlStore, SqlStreams, create_engine_safely
from idemp.inbox.stream import InMemoryStreams, StreamInbox
from idemp.testing.machine import redelivery_machine, replay
from idemp.testing.promises import PromiseBroken
from tests.inbox.sql.kept import make_tables

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from idemp.clock import Clock
    from idemp.inbox.stream import Commit, Found

NAMES = ("alice", "bob")
OF_ACCOUNTS = {"command_id": st.sampled_from("abcdef"), "account": st.sampled_from(NAMES)}
COMMANDS = {
    Deposit: st.builds(Deposit, cents=st.just(100), **OF_ACCOUNTS),
    Withdraw: st.builds(Withdraw, cents=st.just(70), **OF_ACCOUNTS),
}


def in_memory(clock: Clock) -> StreamInbox:
    return StreamInbox(InMemoryStreams(), InMemoryStore(clock), clock)


def in_sqlite(clock: Clock) -> StreamInbox:
    engine = create_engine_safely("sqlite://")
    make_tables(engine)
    return StreamInbox(SqlStreams(engine), SqlStore(engine, clock=clock), clock)


def balances(inbox: StreamInbox) -> dict[str, Account]:
    return {name: account_of(inbox.read(name)) for name in NAMES}


def solvent(inbox: StreamInbox) -> bool:
    return all(account.cents >= 0 for account in balances(inbox).values())


def attack(handlers: App, *, examples: int, messages: Any = COMMANDS, **options: Any) -> None:
    machine = redelivery_machine(handlers, messages=messages, **options)
    wanted = settings(machine.TestCase.settings, max_examples=examples, database=None, derandomize=True)
    try:
        run_state_machine_as_test(machine, settings=wanted)
    finally:
        machine.world.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize(("store", "examples"), [(in_memory, 100), (in_sqlite, 15)], ids=["memory", "sqlite"])
def test_correct_handlers_pass(store: Callable[[Clock], StreamInbox], examples: int) -> None:
    attack(app, examples=examples, store=store, state=balances, invariants=[solvent])


CARTS = {"shop.Add": st.fixed_dictionaries({"id": st.integers(0, 5), "cart": st.sampled_from(NAMES)})}


def shop() -> App:
    """Carts as documents, whose ids expire within what the machine lets go by; an id counts within its cart."""
    made = App("shop")

    @made.handler(dict, type="shop.Add", policy=Idempotent(key=["cart", "id"], entity="cart", retention="20m"))
    def add(message: dict[str, Any], ctx: Context) -> None:
        cart = document_of(ctx)
        cart["items"] = [*cart.get("items", ()), message["id"]]
        ctx.send({"of": message["cart"], "items": len(cart["items"])}, to="stock", type="stock.Reserve")

    return made


def in_documents(clock: Clock) -> DocumentInbox:
    return DocumentInbox(InMemoryDocuments(), clock=clock)


def carts(inbox: DocumentInbox) -> dict[str, list[int]]:
    found = {name: inbox.states.read(name) for name in NAMES}
    return {name: document.body.get("items", []) for name, document in found.items() if document is not None}


def test_correct_handlers_on_documents_pass() -> None:
    attack(shop(), examples=100, messages=CARTS, store=in_documents, state=carts)


class NoExpectation(InMemoryDocuments):
    """A fault: the last write wins."""

    def write(self, id: str, body: Mapping[str, Any], expected: str | None) -> str:
        found = self.read(id)
        return super().write(id, body, found.revision if found is not None else None)


def test_documents_without_expected_revisions_are_found() -> None:
    def careless(clock: Clock) -> DocumentInbox:
        return DocumentInbox(NoExpectation(), clock=clock)

    with pytest.raises(PromiseBroken, match="had its effects twice"):
        attack(shop(), examples=100, messages=CARTS, store=careless, state=carts)


class Forgetful(InMemoryStreams):
    """A fault: nobody knows which messages were committed."""

    def find(self, stream: str, consumer: str, key: UUID) -> Found | None:
        return None

    def append(self, commit: Commit, *, pending: bool) -> None:
        anew = replace(commit.claim, id=EffectiveId(uuid4(), commit.claim.id.text))
        super().append(replace(commit, claim=anew), pending=pending)


def forgetful(clock: Clock) -> StreamInbox:
    return StreamInbox(Forgetful(), InMemoryStore(clock), clock)


def test_streams_without_commit_ids_are_found() -> None:
    with pytest.raises(PromiseBroken, match="had its effects twice") as found:
        attack(app, examples=100, store=forgetful, state=balances)
    assert "schedule =" in "".join(found.value.__notes__)


DEPOSIT = ("publish", "accounts.Deposit", '{"command_id":"a","account":"alice","cents":100}')


def test_a_schedule_is_replayed() -> None:
    schedule = [DEPOSIT, ("compete", "before commit")]
    *_, last = replay(app, schedule, store=in_memory, state=balances)
    assert "came again, a duplicate" in last
    assert "Meanwhile, before commit, a second worker got it, too" in last
    with pytest.raises(PromiseBroken, match="had its effects twice"):
        replay(app, schedule, store=forgetful)


def test_an_invariant_is_asked_of_the_inbox() -> None:
    def poor(inbox: StreamInbox) -> bool:
        return balances(inbox)["alice"].cents == 0

    with pytest.raises(PromiseBroken, match="'poor' does not hold"):
        replay(app, [DEPOSIT, ("deliver",)], store=in_memory, invariants=[poor])


def test_what_the_store_can_not_take_is_told() -> None:
    made = App("shop")
    made.handler(dict, type="shop.Sell", policy=Idempotent(key="id"))(lambda message: None)
    with pytest.raises(ConfigurationError, match=r"'shop\.Sell' does not say which entity"):
        replay(made, [], store=in_memory)
