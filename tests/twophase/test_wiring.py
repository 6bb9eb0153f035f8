"""What is refused at start, and how databases are named."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import create_engine
from sqlalchemy.orm import sessionmaker

from idemp import App, ConfigurationError, Idempotent, Inbox, Policy, TwoPhase
from idemp.broker.memory import InMemoryBroker
from idemp.bulk import Bulk, Came, Row
from idemp.inbox.memory import InMemoryStore
from idemp.settings import Settings, load_settings
from idemp.twophase import BranchId

if TYPE_CHECKING:
    from pathlib import Path

LEDGER = "postgresql://me:secret@db/ledger"


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (TwoPhase, "names no database"),
        (lambda: TwoPhase("ledger", "ledger"), "twice"),
        (lambda: TwoPhase(""), "without a name"),
        (lambda: TwoPhase(*map(str, range(9))), "more than 8"),
        (lambda: TwoPhase("ledger", claim="late"), "leave out claim"),
        (lambda: TwoPhase("ledger", batch=2), "batch"),
        (lambda: TwoPhase("ledger", database="x"), "Did you mean 'databases'?"),  # type: ignore[call-arg]
        (lambda: Policy(databases="ledger"), "use TwoPhase"),
    ],
)
def test_policies_that_make_no_sense(made: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said.replace("?", r"\?")):
        made()


def test_policies_that_say_the_same() -> None:
    assert TwoPhase("ledger", key="id").databases == Idempotent(databases=["ledger"]).databases == ("ledger",)
    assert TwoPhase(databases=["ledger"]).idempotent


def app(policy: Policy | None = None, *, settings: Settings | None = None, **options: Any) -> App:
    made = App(
        "orders", **{"database": "sqlite://", **options}, broker=InMemoryBroker(), settings=settings or Settings()
    )
    made.handler(dict, type="orders.Pay", policy=policy or TwoPhase("ledger", key="id"))(lambda message: None)
    return made


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "names the database 'ledger', which is not registered"),
        ({"databases": {"leger": LEDGER}}, "names the database 'ledger', which is not registered"),
        ({"databases": {"ledger": "sqlite:///ledger.db"}}, "is on sqlite, which can't prepare transactions"),
        ({"databases": {"ledger": 7}}, "Give a URL, an engine, or a sessionmaker"),
        ({"databases": {"ledger": sessionmaker()}}, "Give a URL, an engine, or a sessionmaker"),
        ({"databases": {"ledger": LEDGER, "books": LEDGER}}, "is the database 'ledger', too"),
        ({"database": LEDGER, "databases": {"ledger": LEDGER}}, "is the inbox's own database"),
        ({"database": None, "store": InMemoryStore(), "databases": {"ledger": LEDGER}}, "is in no SQL database itself"),
    ],
)
def test_databases_that_make_no_sense(options: dict[str, Any], said: str) -> None:
    made = app(**options)
    with pytest.raises(ConfigurationError, match=said) as caught:
        made.start()
    assert "secret" not in str(caught.value)


def test_databases_of_the_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "idemp.toml").write_text(
        f'[databases]\nledger = "{LEDGER}"\n\n[messages."orders.Pay"]\nredispatch = "pending"\n'
    )
    monkeypatch.setenv("IDEMP_DATABASES__STOCK", "mysql://me:secret@db/stock")
    settings = load_settings()
    assert "secret" not in repr(settings)
    made = app(settings=settings, databases={"books": create_engine("postgresql+psycopg://db/books")})
    assert made.coordinator is not None
    assert sorted(made.coordinator.names) == ["books", "ledger", "stock"]
    monkeypatch.setenv("IDEMP_MESSAGES__X", json.dumps({}))
    with pytest.raises(ConfigurationError, match="IDEMP_MESSAGES__X is no setting"):
        load_settings()


def test_policy_of_the_settings() -> None:
    made = app(
        Idempotent(key="id"),
        settings=Settings(messages={"orders.Pay": {"databases": "ledger"}}, databases={"ledger": LEDGER}),
    )
    made.registry.build(made.settings.messages)
    assert made.registry.registrations()[0].policy.databases == ("ledger",)


def test_wrapped_functions_have_them_too() -> None:
    inbox = Inbox(InMemoryStore())
    with pytest.raises(ConfigurationError, match="is not registered"):
        inbox.wrap(lambda message: None, dict, type="a.B", consumer="a", policy=TwoPhase("ledger"))


def test_chunks_leave_them_out() -> None:
    """A chunk has one transaction: such rows are parked with a word, where their own handler would run."""
    made = App("orders", store=InMemoryStore(), broker=InMemoryBroker(), settings=Settings())
    made.handler(dict, type="orders.Pay", policy=TwoPhase("ledger"))(lambda message: None)
    report = Bulk(made).run([Row(id="m-1", type="orders.Pay", body=b"{}")])
    (parked,) = report.parked
    assert "writes to several databases (TwoPhase)" in parked.reason
    assert Bulk(made, adopt=True).run([Row(id="m-1", type="orders.Pay", body=b"{}")]).counts[Came.NEW] == 1


IDS = st.builds(
    BranchId,
    inbox=st.binary(min_size=8, max_size=8),
    consumer=st.integers(0, 2**32 - 1),
    key=st.uuids(),
    token=st.binary(min_size=8, max_size=8),
    number=st.integers(0, 99),
)


@given(IDS)
def test_names_of_branches(branch: BranchId) -> None:
    assert BranchId.parse(branch.text) == branch
    assert len(branch.text.encode()) <= 64
    assert not set(branch.text) & set("'\"\\ ;")


@given(IDS, st.integers(0, 60), st.characters())
def test_names_of_others(branch: BranchId, place: int, character: str) -> None:
    """Whatever is no name as it is written is nobody's of ours."""
    text = branch.text[:place] + character + branch.text[place + 1 :]
    parsed = BranchId.parse(text)
    assert parsed is None or parsed.text == text
    assert BranchId.parse(branch.text + character) is None or character.isdigit()
