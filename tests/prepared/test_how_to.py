"""The how-to on prepared messages: its code runs as it stands there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import event
from sqlalchemy.exc import IntegrityError

from idemp import App
from idemp.broker.port import Topology
from idemp.errors import ConfigurationError
from idemp.prepared import PreparedMessages, State
from tests.docs.pages import blocks, page
from tests.inbox.sql.kept import make_tables

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PAGE = page("how-to/prepared-messages.md")
ONE_CALL, STEPS, CHECKER = blocks(PAGE, "python")


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What the page defines, in a directory of its own."""
    monkeypatch.chdir(tmp_path)
    known: dict[str, Any] = {"printed": {"invoice-1": True, "invoice-2": False}}
    for block in (ONE_CALL, STEPS, CHECKER):
        exec(block, known)
    for engine in (known["shop"], known["messages"]):
        make_tables(engine)
    with known["shop"].begin() as connection:
        connection.exec_driver_sql("CREATE TABLE orders (id TEXT PRIMARY KEY, sku TEXT)")
    known["app"].broker.declare(Topology(exchange="idemp", queues=("stock",)))
    yield known
    for engine in (known["shop"], known["messages"]):
        engine.dispose()


def test_orders(names: dict[str, Any]) -> None:
    for number, place in enumerate((names["place_order"], names["place_order_in_steps"])):
        place(f"order-{number}", "A-1")
    names["place_order"]("order-0", "A-1")
    with pytest.raises(IntegrityError):  # another key, the same order
        names["prepared"].submit_after(
            lambda session: session.execute(names["text"]("INSERT INTO orders (id) VALUES ('order-0')")),
            {},
            to="stock",
            type="stock.Reserve",
        )
    keys = [message.causation_id for message in names["app"].broker.browse("stock", 10)]
    assert keys == ["order-0", "order-1"]
    assert len(names["prepared"].home.browse(State.ROLLED_BACK, 10)) == 1


def test_what_an_order_costs(names: dict[str, Any]) -> None:
    """As the page says: three short transactions of one statement each, and two statements around the work's own."""
    place_order, counts = names["place_order"], {"shop": 0, "messages": 0}
    place_order("order-0", "A-1")
    for name in counts:

        def note(_c: object, _k: object, statement: str, *_: object, name: str = name) -> None:
            counts[name] += not statement.startswith("BEGIN")

        event.listen(names[name], "before_cursor_execute", note)
    place_order("order-1", "A-1")
    assert counts == {"shop": 3, "messages": 3}


def test_invoices(names: dict[str, Any]) -> None:
    invoices = names["invoices"]
    for number in range(3):
        half = invoices.make({}, to="stock", type="invoices.Send", key=f"invoice-{number}")
        invoices.home.prepare(half, invoices.check_after * 0)
    done = invoices.run_once()
    assert (done.rolled_back, done.unknown, done.published) == (1, 1, 1)


def test_commands_are_those_that_there_are() -> None:
    from idemp.cli.prepared import commands

    known = {command.name for command in commands.registered_commands}
    (block,) = blocks(PAGE, "sh")
    assert {line.split()[2] for line in block.splitlines()} == known


def test_apps_that_share_a_table_keep_out_of_each_others_way(names: dict[str, Any]) -> None:
    """Who checks the orders knows nothing of invoices: it would roll back what was printed, and the other way round."""
    orders, invoices = names["prepared"], names["invoices"]
    printed = invoices.make({}, to="stock", type="invoices.Send", key="invoice-1")
    invoices.home.prepare(printed, invoices.check_after * 0)
    assert orders.run_once().taken == 0
    assert orders.home.browse(None, 10) == []
    assert invoices.run_once().published == 1
    assert orders.home.expired(invoices.retention * 0, 10) == []
    assert list(invoices.home.expired(invoices.retention * 0, 10)) == [printed.id]
    with pytest.raises(ConfigurationError, match="SqlHome of its own"):
        PreparedMessages(App("parcels", broker="local://broker.db"), orders.home)


def test_work_that_rolls_back_by_itself_sends_nothing(names: dict[str, Any]) -> None:
    """Though it returns as if all were well."""
    with pytest.raises(ConfigurationError, match="itself"):
        names["prepared"].submit_after(lambda session: session.rollback(), {}, to="stock", type="stock.Reserve")
    assert names["app"].broker.browse("stock", 10) == []
    assert len(names["prepared"].home.browse(State.ROLLED_BACK, 10)) == 1
