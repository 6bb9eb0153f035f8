"""The example in `examples/accounts`: each command changes its account once, whatever the broker does."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from examples.accounts import Account, account_of, make_inbox
from examples.accounts import app as accounts
from idemp import App, Outcome
from idemp.broker.memory import InMemoryBroker
from idemp.broker.port import Binding, Topology
from idemp.cli.describe import described
from idemp.inbox.sql import create_engine_safely
from idemp.messages import Message
from idemp.settings import Settings
from tests.inbox.sql.kept import make_tables

if TYPE_CHECKING:
    from collections.abc import Iterator

    from idemp.inbox.stream import StreamInbox
    from idemp.protocol import Protocol


class World:
    """The consumer on streams of the test's own, and who listens."""

    def __init__(self, inbox: StreamInbox) -> None:
        self.inbox, self.broker = inbox, InMemoryBroker()
        self.broker.declare(
            Topology(exchange="idemp", queues=("audit", "post"), bindings=(Binding("audit", "accounts.*"),))
        )
        self.app = App("accounts", store=inbox, broker=self.broker, settings=Settings())
        self.app.registry = accounts.registry
        self.app.start()
        self.protocol: Protocol = self.app.protocol(self.broker.publisher())

    def handle(self, type_: str, number: int, cents: int) -> Outcome:
        body: dict[str, Any] = {"command_id": f"command-{number}", "account": "alice", "cents": cents}
        return self.protocol.process(
            Message(body=json.dumps(body).encode(), type=f"accounts.{type_}", message_id="any")
        )

    @property
    def alice(self) -> Account:
        return account_of(self.inbox.read("alice"))


@pytest.fixture
def world() -> Iterator[World]:
    engine = create_engine_safely("sqlite://")
    make_tables(engine)
    yield World(make_inbox(engine))
    engine.dispose()


def test_a_command_that_comes_twice_changes_the_account_once(world: World) -> None:
    assert world.handle("Deposit", 1, 100) is Outcome.HANDLED
    assert [world.handle("Withdraw", 2, 70) for _ in range(2)] == [Outcome.HANDLED, Outcome.REDISPATCHED]
    assert world.alice == Account(cents=30)
    assert [event.type for event in world.inbox.read("alice").events] == ["accounts.Deposited", "accounts.Withdrawn"]
    ids = [message.message_id for message in world.broker.browse("audit", 10)]
    assert ids[1] == ids[2], "published twice, under one id"
    assert ids == [str(event.id) for event in world.inbox.read("alice").events] + ids[2:]


def test_the_command_line_looks_at_its_database(world: World) -> None:
    """Streams stand beside an inbox in tables: doctor and describe find it there."""
    assert described(world.app)["database"] == "sqlite://"
    assert described(world.app)["tables"] == "idemp_"


def test_what_was_declined_stays_declined(world: World) -> None:
    """The decision is an event: money that comes later does not change what a redelivery answers."""
    world.handle("Withdraw", 1, 70)
    world.handle("Deposit", 2, 100)
    assert world.handle("Withdraw", 1, 70) is Outcome.REDISPATCHED
    assert world.alice == Account(cents=100, declined=1)
    letters = {(message.message_id, message.type) for message in world.broker.browse("post", 10)}
    assert [type_ for _, type_ in letters] == ["post.SendLetter"], "one, under one id"
