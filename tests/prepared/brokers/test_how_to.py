"""The how-to on prepared messages on a broker: its code runs as it stands there, and so do the commands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from idemp.broker.port import Topology
from idemp.inbox.sql import create_engine_safely
from idemp.prepared.rabbitmq import LARGEST_TEXT, RabbitMQHome
from idemp.prepared.sqs import home as sqs_home
from idemp.prepared.sqs.queue import KEPT_SECONDS, LARGEST, LONGEST_DELAY
from idemp.prepared.sqs.wire import KEPT_FREE
from tests.cli.conftest import Cli, cli, folder  # noqa: F401 - fixtures
from tests.docs.pages import blocks, page
from tests.inbox.sql.kept import make_tables
from tests.servers.documents import Moto
from tests.servers.process import wait_until

pytestmark = pytest.mark.slow

PAGE = page("how-to/prepared-on-a-broker.md")
RABBITMQ, SQS = blocks(PAGE, "python")


@pytest.fixture
def shop(cli: Cli, folder: Path, moto: Moto, rabbitmq_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:  # noqa: F811
    """The page as a module in a directory of its own, with shorter delays, and Moto's server for Amazon's."""
    monkeypatch.setenv("IDEMP_BROKER_URL", rabbitmq_url)
    monkeypatch.setenv("AWS_ENDPOINT_URL_SQS", moto.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-so-secret")
    code = re.sub(r"seconds=60|minutes=5", "seconds=1", RABBITMQ + SQS)
    (folder / "brokershop.py").write_text(code)
    engine = create_engine_safely(f"sqlite:///{folder}/shop.db")
    make_tables(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE orders (id TEXT PRIMARY KEY, sku TEXT)")
    engine.dispose()
    import brokershop  # type: ignore[import-not-found]

    brokershop.app.broker.declare(Topology(exchange="idemp", queues=("stock",)))
    for messages in (brokershop.prepared, brokershop.invoices):
        messages.verify()
    yield brokershop
    for messages in (brokershop.prepared, brokershop.invoices):
        messages.close()
    brokershop.shop.dispose()


def test_the_page(cli: Cli, shop: Any) -> None:  # noqa: F811
    """One is published by its producer; others are left to the checker, and looked at on the way."""
    shop.place_order("order-1", "A-1")
    where = {"to": "stock", "type": "stock.Reserve"}
    for app, messages in (("brokershop:app", shop.prepared), ("brokershop:invoicing", shop.invoices)):
        left = [messages.make({"order_id": key}, key=key, **where) for key in ("left", "by-hand")]
        for half in left:
            messages.home.prepare(half, messages.check_after)
        with messages.barrier.begin() as work:
            messages.barrier.pass_(work, left[1].id)
        wait_until(lambda app=app: cli("prepared", "park", app, "by-hand").code == 0, "it can be parked")
        rows = {row["key"]: row["state"] for row in cli("prepared", "list", app, "--json").data}
        assert rows.items() >= {"by-hand": "parked"}.items()
        assert cli("prepared", "show", app, "by-hand", "--json").data["body"] == '{"order_id":"by-hand"}'
        assert cli("prepared", "resume", app, "by-hand").code == 0
        total = {"published": 0, "rolled_back": 0}
        wait_until(lambda app=app, total=total: checked(cli, app, total), "both are decided")
        assert cli("prepared", "list", app, "--state", "parked", "--json").data == []
    bodies = sorted(message.body for message in shop.app.broker.browse("stock", 10))
    assert bodies == [b'{"order_id":"by-hand"}', b'{"order_id":"by-hand"}', b'{"order_id":"order-1","sku":"A-1"}']


def checked(cli: Cli, app: str, total: dict[str, int]) -> bool:  # noqa: F811
    done = cli("prepared", "check", app, "--json").data
    for name in total:
        total[name] += done[name]
    return total == {"published": 1, "rolled_back": 1}


def test_numbers_of_the_page() -> None:
    assert f"have {LARGEST_TEXT:,} bytes" in PAGE
    assert f"{LARGEST // 1024} KiB" in PAGE
    assert f"{KEPT_FREE:,} bytes kept free" in PAGE
    assert f"after {KEPT_SECONDS // 86400} days" in PAGE
    assert f"{LONGEST_DELAY // 60} minutes at most" in PAGE
    assert (sqs_home.NOTED_SECONDS, "Kept for an hour" in PAGE) == (3600, True)
    assert RabbitMQHome("pyamqp://localhost", "orders").check_after == timedelta(seconds=60)
