"""What the commands show of inboxes that are event streams or documents."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from idemp import Message, Outcome
from idemp.broker.port import Topology
from idemp.cli.loading import load_app
from idemp.inbox.document.port import size_of
from idemp.inbox.sql import create_engine_safely
from idemp.inbox.sql.schema import upgrade
from idemp.inbox.sql.tables import Tables
from idemp.testing.clock import FakeClock
from tests.cli.conftest import Cli

_NUMBERS = count()
HANDLER = """

@app.handler(dict, type="bank.Deposit", policy=Idempotent(key="command", entity="account"))
def deposit(message, ctx):
    if message.get("quiet"):
        return
    ctx.publish({"cents": message["cents"]}, type="bank.Moved", mandatory=False)
    ctx.send({}, to="post", type="post.Send")
"""
STREAMS = """
from idemp import App, Idempotent
from idemp.inbox.sql import SqlStore, SqlStreams, create_engine_safely
from idemp.inbox.stream import StreamInbox

engine = create_engine_safely("sqlite:///bank.db")
app = App("bank", store=StreamInbox(SqlStreams(engine), beside=SqlStore(engine)), broker="local://broker.db")
"""
DOCUMENTS = """
from idemp import App, Idempotent
from idemp.inbox.document import DocumentInbox, InMemoryDocuments

accounts = InMemoryDocuments(largest=8_000)
app = App("bank", store=DocumentInbox(accounts, InMemoryDocuments()), broker="local://broker.db")
"""


class Bank:
    """An app in a module of its own, and its inbox."""

    def __init__(self, module: str) -> None:
        self.where = f"{module}:app"
        self.app = load_app(self.where)
        self.app.start()
        self.app.broker.declare(Topology(exchange="idemp", queues=("post",)))

    def deposit(self, command: str, account: str = "alice", *, recorded: bool = True, **others: Any) -> None:
        body = json.dumps({"command": command, "account": account, "cents": 5, **others}).encode()
        protocol = self.app.protocol(publisher := self.app.broker.publisher())
        outcome = protocol.process(Message(body=body, type="bank.Deposit", message_id=f"message-{command}"))
        assert outcome is Outcome.HANDLED
        if recorded:
            protocol.dispatcher.flush()
        publisher.close()


@pytest.fixture
def bank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Bank]]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("IDEMP_DATABASE_URL", "sqlite:///bank.db")
    monkeypatch.setenv("IDEMP_BROKER_URL", "local://broker.db")
    opened: list[Bank] = []

    def make(code: str) -> Bank:
        module = f"bank_{next(_NUMBERS)}"
        (tmp_path / f"{module}.py").write_text(code + HANDLER)
        engine = create_engine_safely("sqlite:///bank.db")
        upgrade(engine, Tables())
        engine.dispose()
        opened.append(Bank(module))
        return opened[-1]

    yield make
    for each in opened:
        each.app.close()
        each.app.store.close()
        del sys.modules[each.where.partition(":")[0]]


def checks(answer: Any) -> dict[str, tuple[str, str]]:
    return {each["name"]: (each["verdict"], each["detail"]) for each in answer.data["checks"]}


def test_a_commit_is_explained(cli: Cli, bank: Callable[[str], Bank]) -> None:
    """By the database alone and by the app; by its key, and by the id that it is stored under."""
    service = bank(STREAMS)
    service.deposit("first")
    service.deposit("second")
    service.deposit("third", quiet=True)
    by_app = ("--app", service.where)
    for known_as in ("second", "bank.Deposit#second"):
        for options in ((), by_app, ("--consumer", "bank")):
            (story,) = cli("inbox", "explain", known_as, "--json", *options).data
            assert story["claim"]["consumer"] == "bank"
            assert story["place"] == "commit 2 of the stream 'alice', events 2 to 2"
            assert [(each["kind"], each["state"]) for each in story["outputs"]] == [
                ("publish", "confirmed"),
                ("send", "confirmed"),
            ]
            assert story["pending"] == 0
    text = cli("inbox", "explain", "third").out
    assert "with 0 outputs, as commit 3 of the stream 'alice', without events" in text
    for options in ((), by_app):
        assert cli("inbox", "explain", "fourth", *options).code == cli("inbox", "explain", "nobody").code != 0
    assert cli("inbox", "explain", "second", "--consumer", "shop").code != 0


def test_a_document_is_explained(cli: Cli, bank: Callable[[str], Bank]) -> None:
    """With outputs and without."""
    service = bank(DOCUMENTS)
    service.deposit("first")
    service.deposit("second", "bob", quiet=True)
    (story,) = cli("inbox", "explain", "first", "--json", "--app", service.where).data
    assert story["place"].startswith("attempt ")
    assert story["place"].endswith("of the document 'alice'")
    assert [each["state"] for each in story["outputs"]] == ["confirmed", "confirmed"]
    text = cli("inbox", "explain", "second", "--app", service.where).out
    assert "committed, with 0 outputs, as an id in the document 'bob'" in text
    assert cli("inbox", "explain", "third", "--app", service.where).code != 0


@pytest.mark.parametrize("code", [STREAMS, DOCUMENTS], ids=["streams", "documents"])
def test_doctor_sees_what_nobody_recorded(cli: Cli, bank: Callable[[str], Bank], code: str) -> None:
    """From an age on at which a worker would have sent it again; until then it is underway."""
    service = bank(code)
    clock = FakeClock()
    app, store = service.app, service.app.store
    app.clock = store.clock = clock  # type: ignore[attr-defined]
    answer = checks(cli("doctor", service.where, "--json"))
    assert answer["unconfirmed outputs"] == ("ok", "none")
    service.deposit("first", recorded=False)
    clock.advance(timedelta(minutes=5))
    answer = checks(cli("doctor", service.where, "--json"))
    assert answer["unconfirmed outputs"] == ("ok", "2 outputs without a recorded confirm, the oldest for 5 minutes")
    clock.advance(timedelta(minutes=15))
    answer = checks(cli("doctor", service.where, "--json"))
    assert answer["unconfirmed outputs"] == (
        "warning",
        "2 outputs without a recorded confirm, the oldest for 20 minutes",
    )


def test_doctor_sees_streams_of_a_database(cli: Cli, bank: Callable[[str], Bank]) -> None:
    """Without an app, if something pends in them."""
    service = bank(STREAMS)
    service.deposit("first")
    assert "unconfirmed outputs" not in checks(cli("doctor", "--json"))
    service.deposit("second", recorded=False)
    assert checks(cli("doctor", "--json"))["unconfirmed outputs"][0] == "ok"


def test_doctor_sees_attempts_and_sizes(cli: Cli, bank: Callable[[str], Bank]) -> None:
    service = bank(DOCUMENTS)
    service.deposit("0")
    seen = checks(cli("doctor", service.where, "--json"))
    assert seen["attempts"] == ("ok", "1 attempt read; 0 of them did not count, and the cleaner deletes them in time")
    verdict, detail = seen["document sizes"]
    assert (verdict, "largest of 1 is 'alice'" in detail) == ("ok", True)
    store: Any = service.app.store
    while size_of(store.states.read("alice").body) < 6_600:
        service.deposit(str(next(_NUMBERS)))
    answer = cli("doctor", service.where, "--json")
    verdict, detail = checks(answer)["document sizes"]
    assert (verdict, "'alice'" in detail) == ("warning", True)
    assert answer.code == 0, "a warning, and no failure"


def test_describe_says_which_inbox_it_is(cli: Cli, bank: Callable[[str], Bank]) -> None:
    streams, documents = bank(STREAMS), bank(DOCUMENTS)
    assert "inbox: event streams in SqlStreams('sqlite:///bank.db')" in cli("describe", streams.where).out
    assert cli("describe", streams.where, "--json").data["inbox"]["kind"] == "streams"
    assert "inbox: documents in InMemoryDocuments()" in cli("describe", documents.where).out
    assert cli("describe", documents.where, "--json").data["inbox"]["kind"] == "documents"
