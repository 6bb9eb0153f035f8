"""`idemp prepared`, and what `idemp doctor` says about prepared messages."""

from __future__ import annotations

import itertools
import json
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from idemp.cli.loading import load_app
from idemp.inbox.sql import create_engine_safely
from idemp.prepared import PreparedMessages, State
from idemp.prepared.producing import MAX_CHECKS
from tests.cli.conftest import Cli, cli, folder  # noqa: F401 - fixtures
from tests.inbox.sql.kept import make_tables

if TYPE_CHECKING:
    from pathlib import Path

_numbers = itertools.count()

MODULE = """
from datetime import timedelta

from idemp import App
from idemp.inbox.sql import create_engine_safely
from idemp.prepared import PreparedMessages
from idemp.prepared.sql import SqlBarrier, SqlHome

app = App("shop")
prepared = PreparedMessages(
    app,
    SqlHome(create_engine_safely("sqlite:///prepared.db")),
    barrier=SqlBarrier(create_engine_safely("sqlite:///{business}.db")),
    check_after=timedelta(0),
)
"""
WHERE = {"to": "shop", "type": "shop.Order"}


def write(folder: Path, business: str) -> str:  # noqa: F811
    """A module of its own with an app; its databases have idemp's tables."""
    module = f"preparing{next(_numbers)}"
    (folder / f"{module}.py").write_text(MODULE.replace("{business}", business))
    for name in {"prepared", business, "shop"}:
        engine = create_engine_safely(f"sqlite:///{folder}/{name}.db")
        make_tables(engine)
        engine.dispose()
    app = load_app(f"{module}:app")
    app.broker.declare(app.topology())
    return f"{module}:app"


@pytest.fixture
def where(folder: Path) -> str:  # noqa: F811
    return write(folder, "business")


@pytest.fixture
def prepared(where: str) -> PreparedMessages:
    made = load_app(where).prepared
    assert made is not None
    return made


def test_describe(cli: Cli, where: str) -> None:  # noqa: F811
    told = cli("describe", where, "--json").data["prepared"]
    assert told["home"] == "SqlHome"
    assert told["place"].endswith("prepared.db")
    assert told["barrier"].endswith("business.db")
    assert (told["checker"], told["check_after"], told["max_checks"]) == (None, 0.0, MAX_CHECKS)
    (line,) = (line for line in cli("describe", where).out.splitlines() if line.startswith("prepared"))
    assert line == (
        f"prepared messages in SqlHome {told['place']}, barrier in {told['barrier']}, checked after 0s, 15 times at most"
    )


def waiting(prepared: PreparedMessages, key: str, *, work: bool) -> str:
    """One that its producer left; whether its work is committed."""
    half = prepared.make({"order": key}, key=key, **WHERE)
    prepared.home.prepare(half, prepared.check_after)
    barrier = prepared.needed_barrier()
    if work:
        with barrier.begin() as session:
            barrier.pass_(session, half.id)
    return str(half.id)


def test_looking(cli: Cli, where: str, prepared: PreparedMessages) -> None:  # noqa: F811
    ids = [waiting(prepared, f"order-{number}", work=False) for number in range(2)]
    rows = cli("prepared", "list", where, "--json").data
    assert [(row["id"], row["state"], row["key"]) for row in rows] == [
        (ids[0], "prepared", "order-0"),
        (ids[1], "prepared", "order-1"),
    ]
    cut = cli("prepared", "list", where, "--limit", "1", "--json")
    assert (cut.data, json.loads(cut.err)["note"]["more"]) == (rows[:1], True)
    assert cli("prepared", "list", where, "--state", "parked", "--json").data == []
    assert "order-1" in cli("prepared", "list", where).out
    for name in (ids[1], "order-1"):
        shown = cli("prepared", "show", where, name, "--json").data
        assert (shown["id"], shown["body"], shown["destination"]) == (ids[1], '{"order":"order-1"}', "shop")
    assert "order-1" in cli("prepared", "show", where, "order-1").out
    for nobodys in ("order-7", "", "x" * 256):
        answer = cli("prepared", "show", where, nobodys)
        assert (answer.code, f"No message {nobodys!r} is prepared" in answer.err) == (1, True)


def test_parking_and_resuming(cli: Cli, where: str, prepared: PreparedMessages) -> None:  # noqa: F811
    ids = [waiting(prepared, f"order-{number}", work=True) for number in range(2)]
    assert cli("prepared", "park", where, "order-0", "--reason", "asks the lawyers").code == 0
    assert cli("prepared", "park", where, ids[0], "--json").data == {"id": ids[0], "parked": False}
    (row,) = cli("prepared", "list", where, "--state", "parked", "--json").data
    assert (row["id"], row["reason"]) == (ids[0], "asks the lawyers")
    doctor = cli("doctor", where, "--json").data["checks"]
    assert ["1 message parked" in each["detail"] for each in doctor if each["name"] == "prepared messages"] == [True]
    done = cli("prepared", "check", where, "--json").data
    assert (done["taken"], done["published"]) == (1, 1)
    assert cli("prepared", "resume", where).code == 2
    assert cli("prepared", "resume", where, "order-0").code == 0
    assert cli("prepared", "resume", where, "order-0").code == 1
    assert "1 taken, 1 committed, 1 published." in cli("prepared", "check", where).out
    assert "None is parked." in cli("prepared", "resume", where, "--all").out
    assert cli("prepared", "park", where, "order-0").code == 1, "it is published"
    messages = load_app(where).broker.browse("shop", 10)
    assert sorted(message.message_id or "" for message in messages) == sorted(ids)
    assert "Nothing was due." in cli("prepared", "check", where).out


def test_check_says_what_is_left(cli: Cli, where: str, prepared: PreparedMessages) -> None:  # noqa: F811
    """What no queue takes stays committed."""
    half = prepared.make({}, to="nowhere", type="shop.Order")
    prepared.home.prepare(half, prepared.check_after)
    barrier = prepared.needed_barrier()
    with barrier.begin() as session:
        barrier.pass_(session, half.id)
    answer = cli("prepared", "check", where, "--json")
    assert (answer.code, answer.data["refused"]) == (1, 1)
    found = prepared.home.find(half.id)
    assert found is not None
    assert found.state is State.COMMITTED


def test_check_forgets_what_is_old(cli: Cli, where: str, prepared: PreparedMessages) -> None:  # noqa: F811
    """Where it runs from cron instead of a worker nobody else does."""
    waiting(prepared, "order-0", work=True)
    first = cli("prepared", "check", where, "--json").data
    assert (first["published"], first["forgotten"]) == (1, 0)
    prepared.retention = timedelta(0)
    assert cli("prepared", "check", where, "--json").data["forgotten"] == 1
    assert "Nothing was due." in cli("prepared", "check", where).out


def test_app_without_prepared_messages(cli: Cli, folder: Path) -> None:  # noqa: F811
    (folder / "plainshop.py").write_text('from idemp import App\napp = App("shop")\n')
    answer = cli("prepared", "list", "plainshop:app")
    assert (answer.code, "prepares no messages" in answer.err) == (3, True)


def test_doctor_says_where_nobody_has_to_prepare(cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Home, local work and inbox in one database: an initiation does it."""
    monkeypatch.setenv("IDEMP_DATABASE_URL", "sqlite:///prepared.db")
    where = write(folder, "prepared")
    doctor = cli("doctor", where, "--json").data["checks"]
    (said,) = [each for each in doctor if each["name"] == "prepared messages"]
    assert (said["verdict"], "app.initiate" in said["fix"]) == ("warning", True)
