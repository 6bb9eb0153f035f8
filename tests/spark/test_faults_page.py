"""The how-to "See that your pipeline survives": its tests, as they stand there."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import text

from idemp.inbox.sql import Tables, create_engine_safely
from idemp.inbox.sql.schema import upgrade
from tests.docs.pages import blocks, page

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.slow

PLUGIN, *LANDING, KAFKA = blocks(page("how-to/pipeline-faults.md"), "python")
TESTS = re.findall(r"^def (test_\w+)", "".join(LANDING), re.MULTILINE)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The page's modules, where drivers and workers find them, and its orders."""
    (tmp_path / "shop.py").write_text(blocks(page("how-to/backfill.md"), "python")[0])
    (tmp_path / "landing.py").write_text("".join(LANDING))
    (tmp_path / "orders").mkdir()
    orders = [{"id": f"order-{number}", "sku": sku} for number, sku in enumerate(["A-1", "B-2", "C-3", "A-1"])]
    orders[-1]["id"] = "order-0"
    (tmp_path / "orders/all.json").write_text("\n".join(map(json.dumps, orders)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in ("landing", "shop"):
        sys.modules.pop(name, None)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", TESTS)
def test_of_the_page(name: str, folder: Path, spark: SparkSession, postgresql_url: str) -> None:
    engine = create_engine_safely(postgresql_url)
    upgrade(engine, Tables())
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE sale (sku text)"))

    def sold() -> list[Any]:
        with engine.connect() as connection:
            return list(connection.scalars(text("SELECT sku FROM sale ORDER BY sku")))

    test = getattr(importlib.import_module("landing"), name)
    given = {"spark": spark, "folder": folder, "database": postgresql_url, "sold": sold}
    test(**{argument: given[argument] for argument in inspect.signature(test).parameters})
    engine.dispose()


def test_kafka_and_the_plugin_of_the_page() -> None:
    names: dict[str, Any] = {}
    exec(PLUGIN, names)
    assert [hasattr(importlib.import_module(plugin), "spark") for plugin in names["pytest_plugins"]] == [True]
    exec(KAFKA, names)
    assert len(TESTS) == 3
