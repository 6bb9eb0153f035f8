"""The how-to "Read queues and topics from Spark": its code is what it says, its tables are those of the code."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from idemp.cli import root
from idemp.spark.sources.options import COMMON
from tests.spark.sources.grounds import StreamGround, declare, messages

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/how-to/sources.md").read_text(encoding="utf-8")


def test_code_of_the_page(
    spark: SparkSession, rabbitmq_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ground = StreamGround(rabbitmq_url)
    ground.put(messages(5))
    ground.close()
    monkeypatch.setenv("IDEMP_BROKER_URL", rabbitmq_url)
    seen: list[str] = []

    def handle(frame: DataFrame, _: int) -> None:
        seen.extend(row.id for row in frame.collect())

    names: dict[str, Any] = {"spark": spark, "handle": handle, "checkpoint": str(tmp_path / "checkpoint")}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(block, names)
    assert seen == [f"m-{number}" for number in range(5)]


def test_command_of_the_page(rabbitmq_url: str, postgresql_url: str) -> None:
    declare(rabbitmq_url, "orders", {"x-queue-type": "quorum"})
    (line,) = re.findall(r"```bash\nidemp (.*?)\n```", PAGE)
    where = ["--broker", rabbitmq_url, "--database", postgresql_url]
    done = CliRunner().invoke(root, [*line.split(), "--until-empty", "--json", *where])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["spool"]["messages"] == 0


def test_options_of_the_page() -> None:
    from idemp.spark.sources.kafka import KafkaSource
    from idemp.spark.sources.rabbitmq import StreamSource
    from idemp.spark.sources.spool import SpoolSource

    named = {StreamSource: "stream", SpoolSource: "spool", KafkaSource: "Kafka"}
    table = re.findall(r"^\| (`[^|]*) \| (stream|spool|Kafka|all) \|", PAGE, re.MULTILINE)
    told = {(name, where) for cell, where in table for name in re.findall(r"`(\w+)`", cell)}
    assert told == {(option, where) for source, where in named.items() for option in source.own_options} | {
        (option, "all") for option in COMMON
    }
    assert all(f"`{source.name()}`" in PAGE for source in named)
