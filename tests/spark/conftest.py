"""One session of Spark a process, whose JVM finds its classes in an archive."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import func, select

from idemp import Settings
from idemp.process import Process
from idemp.sql.engine import Database
from tests.servers.java import java_options
from tests.servers.process import free_port
from tests.spark import shop
from tests.world import effect, metadata

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    from idemp.spark import session

    os.environ["PYTHONPATH"] = str(ROOT)
    log = tmp_path_factory.mktemp("events")
    options = {
        "spark.driver.extraJavaOptions": java_options(),
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": f"file://{log}",
        "spark.eventLog.compress": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",  # a server of Spark Connect, for clients
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(free_port()),
    }
    with session("tests", master="local[2,4]", options=options) as spark:
        yield spark


class Shop:
    """The tables of the app."""

    def __init__(self, url: str) -> None:
        self.database = Database(url)
        metadata.create_all(self.database.engine)

    def effects(self) -> Counter[str]:
        with self.database.engine.connect() as connection:
            return Counter(connection.scalars(select(effect.c.what)))

    def count(self, table: str) -> int:
        with self.database.engine.connect() as connection:
            return int(connection.scalar(select(func.count()).select_from(getattr(self.database.tables, table))) or 0)


@pytest.fixture
def open_shop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Shop]]:
    shops: list[Shop] = []

    def open_shop(url: str) -> Shop:
        monkeypatch.setattr(shop.app, "process", Process(None, Settings(database_url=url)))
        shops.append(Shop(url))
        return shops[-1]

    yield open_shop
    for each in shops:
        each.database.close()


@pytest.fixture
def tables(open_shop: Callable[[str], Shop], url: str) -> Shop:
    return open_shop(url)


def parked(spark: Any, folder: Path) -> Counter[str]:
    """Return the ids of parked rows."""
    return Counter(row.id for row in spark.read.parquet(str(folder)).collect())
