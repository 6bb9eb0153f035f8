"""Fifty commands at once to two accounts, and ten of them twice: on each database."""

from __future__ import annotations

import json
import threading
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import TYPE_CHECKING

import pytest

from examples.accounts import app as accounts
from examples.accounts.ledger import Account, after
from idemp import App, Message, Outcome
from idemp.broker.memory import InMemoryBroker
from idemp.broker.port import Ack, Binding, Delivery, Retry, Topology
from idemp.inbox.sql import SqlStore, SqlStreams
from idemp.inbox.stream import AlreadyCommitted, StreamInbox, WrongVersion
from idemp.settings import Settings
from tests.inbox.stream.conftest import database
from tests.lanes import mostly_slow

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Engine

    from idemp.inbox.stream import Commit, Stream

COMMANDS = 50
DUPLICATES = 10
NAMES = ("alice", "bob")


@pytest.fixture(params=mostly_slow(["postgresql", "sqlite", "mariadb"]))
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with database(request, request.param, pool_size=20, max_overflow=0) as made:
        yield made


class Together(SqlStreams):
    """All threads have read before the first of them appends; who came too late is counted."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.late: Counter[str] = Counter()
        self._all_have_read = threading.Barrier(COMMANDS + DUPLICATES)
        self._waited = threading.local()

    def append(self, commit: Commit, *, pending: bool) -> None:
        if not hasattr(self._waited, "done"):
            self._waited.done = True
            self._all_have_read.wait(60)
        try:
            super().append(commit, pending=pending)
        except (WrongVersion, AlreadyCommitted) as error:
            self.late[type(error).__name__] += 1
            raise


def commands(random: Random) -> list[Message]:
    """Withdrawals that can't all be granted, and a few deposits; one in five comes twice, under another message id."""
    bodies = [
        ("accounts.Deposit" if number % 5 == 0 else "accounts.Withdraw",
         {"command_id": f"command-{number}", "account": NAMES[number % 2], "cents": 100 if number % 5 == 0 else 40})
        for number in range(COMMANDS)
    ]  # fmt: skip
    twice = random.sample(bodies, DUPLICATES)
    made = [
        Message(body=json.dumps(body).encode(), type=type_, message_id=f"message-{number}")
        for number, (type_, body) in enumerate([*bodies, *twice])
    ]
    random.shuffle(made)
    return made


def test_fifty_conflicting_commands(engine: Engine) -> None:
    streams_together, broker = Together(engine), InMemoryBroker()
    inbox = StreamInbox(streams_together, SqlStore(engine))
    app = App("accounts", store=inbox, broker=broker, settings=Settings())
    app.registry = accounts.registry
    app.start()
    broker.declare(Topology(exchange="idemp", queues=("audit", "post"), bindings=(Binding("audit", "accounts.*"),)))
    everything = commands(Random(7))
    outcomes: deque[Outcome] = deque()
    came_back: deque[str] = deque()

    def deliver(message: Message) -> None:
        """As a consumer on a thread of its own: until it is settled."""
        protocol = app.protocol(broker.publisher())
        while True:
            outcome, settlement = protocol.handle(Delivery(message=message, queue="accounts"))
            if isinstance(settlement, Ack):
                outcomes.append(outcome)
                protocol.dispatcher.flush()
                return
            assert isinstance(settlement, Retry), settlement
            assert not settlement.counted, settlement.reason
            came_back.append(settlement.reason)

    with ThreadPoolExecutor(len(everything)) as threads:
        for each in [threads.submit(deliver, message) for message in everything]:
            each.result(120)

    streams = [inbox.read(name) for name in NAMES]
    handled = Counter(commit.claim.id.text for stream in streams for commit in stream.commits)
    assert len(handled) == COMMANDS
    assert set(handled.values()) == {1}, "each commit once"
    assert Counter(outcomes) == {Outcome.HANDLED: COMMANDS, Outcome.REDISPATCHED: DUPLICATES}
    for stream in streams:
        assert [commit.number for commit in stream.commits] == list(range(1, COMMANDS // 2 + 1))
        assert [event.version for event in stream.events] == list(range(1, COMMANDS // 2 + 1)), "versions without gaps"
        account = Account()
        for event in stream.events:
            account = after(account, event)
            assert account.cents >= 0, "decided on a balance that was no longer so"
        assert account.declined > 0
    _published_under_one_id_each(broker, streams)
    assert inbox.upkeep.pending_count() == 0
    late = streams_together.late
    assert late.total() >= COMMANDS + DUPLICATES - len(NAMES), "all but the first on each stream"
    print(
        f"{engine.dialect.name}: {COMMANDS} commands, {DUPLICATES} twice; {dict(late)}; {len(came_back)} came back later"
    )


def _published_under_one_id_each(broker: InMemoryBroker, streams: list[Stream]) -> None:
    sent: dict[str, set[bytes]] = {}
    for message in broker.browse("audit", 10_000):
        sent.setdefault(str(message.message_id), set()).add(message.body)
    events = {str(event.id): {event.message.body} for stream in streams for event in stream.events}
    assert sent == events
