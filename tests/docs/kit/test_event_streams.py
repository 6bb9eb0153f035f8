"""The how-to on event streams: its code runs as it stands there, and the schedule that it prints is what is found."""

from __future__ import annotations

import unittest
from typing import Any

import pytest
from hypothesis import settings

from idemp import Message, Outcome
from idemp.broker.memory import InMemoryBroker
from idemp.broker.port import Binding, Topology
from idemp.inbox.sql import create_engine_safely
from idemp.settings import Settings
from tests.docs.pages import blocks, page
from tests.inbox.sql.kept import make_tables
from tests.simulation.streams import MUTANTS

pytestmark = pytest.mark.slow

PAGE = page("how-to/event-streams.md")
BANK, PROOF, CONFORMANCE = blocks(PAGE, "python")


@pytest.fixture
def names() -> dict[str, Any]:
    """What the page's first block defines, on a database and a broker in memory."""
    assert BANK.count("sqlite:///bank.db") == BANK.count('broker="local://broker.db"') == 1
    broker = InMemoryBroker()
    broker.declare(Topology(exchange="idemp", queues=("audit", "post"), bindings=(Binding("audit", "bank.*"),)))
    known: dict[str, Any] = {"BROKER": broker}
    code = BANK.replace("sqlite:///bank.db", "sqlite://").replace('"local://broker.db"', "BROKER")
    exec(code, known)
    known["app"].configure(Settings())
    make_tables(known["engine"])
    return known


def test_the_bank(names: dict[str, Any]) -> None:
    app, inbox, balance = names["app"], names["inbox"], names["balance"]
    app.start()
    protocol = app.protocol(app.broker.publisher())

    def handle(type_: str, command: str, cents: int) -> Outcome:
        body = f'{{"command_id": "{command}", "account": "alice", "cents": {cents}}}'
        outcome: Outcome = protocol.process(Message(body=body.encode(), type=f"bank.{type_}", message_id="any"))
        return outcome

    assert handle("Deposit", "1", 100) is Outcome.HANDLED
    assert handle("Withdraw", "2", 70) is Outcome.HANDLED
    assert handle("Withdraw", "3", 70) is Outcome.HANDLED
    assert [handle("Withdraw", command, 70) for command in "23"] == [Outcome.REDISPATCHED] * 2
    stream = inbox.read("alice")
    assert [event.data["cents"] for event in stream.events] == [100, -70]
    assert stream.fold(balance, 0) == 30
    assert (stream.version, stream.number) == (2, 3), "the third sent a letter, and is no event"
    assert len({message.message_id for message in app.broker.browse("post", 10)}) == 1
    (statement,) = blocks(PAGE, "sql")
    with names["engine"].connect() as connection:
        assert len(connection.exec_driver_sql(statement).all()) == 3


def test_the_proof(names: dict[str, Any]) -> None:
    exec(PROOF, names)
    case = names["TestBank"]
    case.settings = settings(case.settings, max_examples=10, database=None, derandomize=True)
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
    assert result.testsRun == 1
    assert result.wasSuccessful(), result.errors + result.failures


def test_the_suite_for_other_stores(names: dict[str, Any]) -> None:
    exec(PROOF.partition("\nIDS")[0], names)
    exec(CONFORMANCE, names)
    assert [name for name in dir(names["TestMyStreams"]) if name.startswith("test_taken")]


def test_the_schedule_of_the_page_is_what_the_simulation_finds() -> None:
    (mutant,) = [each for each in MUTANTS if each.name == "appends at any version"]
    (printed,) = blocks(PAGE, "text")
    assert str(mutant.simulation.explore().violation) == printed.rstrip()


def test_the_tables_of_the_page_are_those_that_are_made() -> None:
    engine = create_engine_safely("sqlite://")
    make_tables(engine)
    with engine.connect() as connection:
        for name in ("commit", "unconfirmed"):
            connection.exec_driver_sql(f"SELECT * FROM idemp_{name}")
    assert "the tables commit and unconfirmed, of version 0008" in PAGE
