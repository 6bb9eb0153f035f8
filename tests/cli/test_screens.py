"""What commands print at 80, 100 and 140 columns, held against the files in `screens`.

`IDEMP_TEST_DRAW=1 python -m pytest -n 0 tests/cli/test_screens.py` writes these files anew: look at the difference.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from idemp.cli.loading import load_app
from idemp.inbox.sql import SqlStore, create_engine_safely
from idemp.messages import Message
from idemp.testing.clock import FakeClock
from tests.cli.conftest import Shop
from tests.cli.test_dead_brokers import put
from tests.inbox.sql.kept import make_tables

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cli.conftest import Cli

ERROR = """(psycopg.errors.ForeignKeyViolation) insert or update on table invoice violates foreign key constraint \
invoice_customer_id_fkey
DETAIL: Key (customer_id)=(4711) is not present in table customer."""
SCREENS = Path(__file__).parent / "screens"
WIDTHS = (80, 100, 140)
ID = "01890a5d-ac96-774b-bcce-b302099a8057"
OTHER_ID = "01890a5d-ac96-774b-bcce-b302099a8058"
MODULE = """
from datetime import timedelta

from idemp import App, Idempotent
from idemp.prepared import PreparedMessages
from idemp.prepared.sql import SqlBarrier, SqlHome
from idemp.inbox.sql import create_engine_safely

app = App("shop")
prepared = PreparedMessages(
    app,
    SqlHome(create_engine_safely("sqlite:///shop.db")),
    barrier=SqlBarrier(create_engine_safely("sqlite:///business.db")),
    check_after=timedelta(0),
)


@app.handler(dict, type="shop.billing.OrderPlaced", policy=Idempotent(key="order_id", retention="30d", late="handle"))
def bill_the_order(message, ctx):
    ctx.send({"order_id": message["order_id"]}, to="billing.invoices", type="shop.billing.InvoiceIssued")
    ctx.send({}, to="nowhere", type="shop.billing.CustomerNotified")


@app.handler(dict, type="shop.billing.OrderCancelled")
def cancel_the_order(message):
    pass
"""
COMMANDS = {
    "dead-list": "dead list --queue shop",
    "dead-replay": f"dead replay {ID} --dry-run --queue shop",
    "dead-show": f"dead show {ID} --queue shop",
    "describe": "describe screened_shop:app",
    "inbox-list": "inbox list",
    "inbox-pending": "inbox list --pending",
    "inbox-show": "inbox show 42",
    "inbox-explain": "inbox explain 42",
    "prepared-list": "prepared list screened_shop:app",
    "db-check": "db check",
}


@pytest.fixture
def screened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    """A shop whose lists have the same content, and content of the same width, in each run."""
    monkeypatch.setenv("IDEMP_DATABASE_URL", "sqlite:///shop.db")
    monkeypatch.setenv("IDEMP_BROKER_URL", "local://broker.db")
    (folder / "screened_shop.py").write_text(MODULE)
    for name in ("shop", "business"):
        make_tables(create_engine_safely(f"sqlite:///{name}.db"))
    app = load_app("screened_shop:app")
    app._store = app._store_given = SqlStore(
        create_engine_safely("sqlite:///shop.db"), clock=FakeClock(), worker="billing-7d9f8b6c5-x2x4q:1:a1b2c3"
    )
    shop = Shop(folder, "screened_shop")
    shop.declare()
    app.broker.declare(type(app.topology())(exchange="idemp", queues=("billing.invoices",)))
    story = {
        "reason": "IntegrityError",
        "error": ERROR,
        "attempts": 5,
        "first-at": "2025-01-01T10:00:00.123456+00:00",
        "last-at": "2025-01-01T13:30:00.5+02:00",
        "host": "billing-7d9f8b6c5-x2x4q:1",
    }
    headers = {f"idemp-dead-{name}": value for name, value in story.items()}
    put(
        app.broker,
        "shop.dead",
        [
            Message(body=b'{"order_id": 4711}', message_id=name, type="shop.billing.OrderPlaced", headers=headers)
            for name in (ID, OTHER_ID)
        ],
    )
    for order in (42, 43):
        shop.send({"order_id": order}, type="shop.billing.OrderPlaced")
    shop.work()
    prepared = app.prepared.make({}, key="order-42", to="billing.invoices", type="shop.billing.InvoiceIssued")
    app.prepared.home.prepare(prepared, app.prepared.check_after)
    yield shop
    del sys.modules["screened_shop"]


def steady(text: str) -> str:
    """What differs from run to run, by something of the same width."""
    text = re.sub(r"(?ms)^broker .*?(?=\n  at least once)", "broker …", text)  # as long as the folder's name
    text = re.sub(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", ID, text)
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "2025-01-01 10:00:00", text)
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_screens(cli: Cli, screened: Shop, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    drawn = ""
    for width in WIDTHS:
        monkeypatch.setenv("COLUMNS", str(width))
        answer = cli(*COMMANDS[name].split())
        assert answer.code == 0, answer.err
        drawn += f"{' ' + str(width) + ' ':=^{width}}\n{steady(answer.out)}"
    file = SCREENS / f"{name}.txt"
    if os.environ.get("IDEMP_TEST_DRAW"):
        file.write_text(drawn)
    assert drawn == file.read_text()


_NAMES = re.compile(r"[\w-]+[.:@/_-][\w.:@/_-]*\w")
LISTS = ("dead-list", "dead-replay", "describe", "inbox-list", "inbox-pending", "prepared-list", "db-check")


def test_names_ids_and_times_of_lists_stay_in_one_piece(
    cli: Cli, screened: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They can be copied from a pipe and from a narrow terminal, and no line that could be wrapped is too long."""
    for name in LISTS:
        monkeypatch.setenv("COLUMNS", "100000")
        whole = cli(*COMMANDS[name].split()).out
        wanted = set(_NAMES.findall(whole)) - set(_NAMES.findall(ERROR))  # errors of a table are cut
        for width in (40, *WIDTHS, 200):
            monkeypatch.setenv("COLUMNS", str(width))
            drawn = cli(*COMMANDS[name].split()).out
            assert {word for word in wanted if word not in drawn} == set(), f"{name} at {width}"
            beside = len("id of the input") + 2
            for line in drawn.splitlines():
                assert len(line) <= max(width, 80) or len(line[beside:].split()) < 2, f"{name} at {width}: {line}"
