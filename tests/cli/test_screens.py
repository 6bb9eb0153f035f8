"""Screens as an operator sees them, at 80 and at 140 columns. `IDEMP_TEST_SCREENS=write` writes the files anew."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from idemp.identity import Key, output_id
from idemp.messages import Delivery, Output
from idemp.ports import Claim, Handled, Identity, NewRow
from idemp.sql.engine import Database
from idemp.sql.scheduler import SqlScheduler
from idemp.sql.store import SqlStore
from tests.cli.test_commands import run

SCREENS = Path(__file__).parent / "screens"
APP = """
from pydantic import BaseModel
from idemp import App, Idempotent

app = App("orders")

class PlaceOrder(BaseModel):
    __message_type__ = "shop.orders.PlaceOrder"
    order_id: str

@app.handler(PlaceOrder, policy=Idempotent(key="order_id", retention="10m"))
def place_order(message: PlaceOrder) -> None: ...
"""
AT = 1_764_000_000.0
COMMANDS = {
    "doctor": ["doctor", "screened"],
    "inbox-list": ["inbox", "list"],
    "inbox-explain": ["inbox", "explain", "A-1"],
    "inbox-show": ["inbox", "show", "A-1"],
    "dead-list": ["dead", "list"],
    "dead-show": ["dead", "show", "1"],
    "describe": ["describe", "screened"],
}


def fill(url: str) -> None:
    database = Database(url)
    store, scheduler = SqlStore(database, "shop-4711-8c3f2a10"), SqlScheduler(database, "shop-4711-8c3f2a10")
    store.register("orders", ["shop.orders.PlaceOrder"], [Identity("orders", "shop.orders.PlaceOrder", "body:order_id", 600.0)])
    for name in ("A-1", "A-2"):
        original, key = Key.of("order_id").reader("shop.orders.PlaceOrder")({}, {"order_id": name})
        claim = Claim("orders", "shop.orders.PlaceOrder", key, original)
        outputs = [
            Output(
                output_id("orders", key, number),
                "send",
                "",
                to,
                {"type": f"shop.{to}", "timestamp": AT},
                b'{"sku": "\xc3\xa4\x1b[2J"}',
            )
            for number, to in enumerate(("stock", "invoices"))
        ]
        with store.connect() as tx:
            store.claim(tx, [claim])
            store.finish(tx, [Handled("orders", claim, outputs)])
        scheduler.confirm([outputs[0].id])
    with database.short() as connection:
        connection.exec_driver_sql(f"UPDATE idemp_inbox SET claimed_at = {AT}")
        connection.exec_driver_sql(
            f"UPDATE idemp_pending SET quarantined_at = {AT}, due_at = {AT}, attempts = 7, refusals = 7, reason = ?",
            (b"no queue is called 'invoices'",),
        )
    failure = {
        "at": AT,
        "rule": "handler",
        "phase": "handler",
        "times": 5,
        "error": "ValueError: the card was refused by the bank",
    }
    failure |= {
        "worker": "shop-4711-8c3f2a10",
        "trace": 'orders.py:17 in place_order\n    raise ValueError("the card was refused by the bank")',
    }
    for name in ("A-3", "A-4"):
        properties = {
            "type": "shop.orders.PlaceOrder",
            "message_id": f"018f0000-0000-7000-8000-00000000000{name[-1]}",
            "timestamp": AT,
        }
        delivery = Delivery("orders", properties, f'{{"order_id": "{name}"}}'.encode())
        scheduler.settle([NewRow(delivery, None, attempts=5, history=[failure])], [])
    database.close()


@pytest.mark.parametrize("width", [80, 140])
def test_screens(
    url: str, width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "screened.py").write_text(APP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("IDEMP_DATABASE_URL", url)
    fill(url)
    for name, command in COMMANDS.items():
        sys.modules.pop("screened", None)
        run(*command)
        seen, file = capsys.readouterr().out.replace(url, "sqlite:///shop.db"), SCREENS / f"{name}-{width}.txt"
        if os.environ.get("IDEMP_TEST_SCREENS") == "write":
            SCREENS.mkdir(exist_ok=True)
            file.write_text(seen)
        assert seen == file.read_text(), name
        assert "\x1b" not in seen
