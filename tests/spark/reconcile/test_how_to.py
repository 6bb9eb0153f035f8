"""The how-to "Find out what was lost on the way", run as it stands there: on PostgreSQL, after an app that did its work."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from idemp.cli.exits import ExitCode
from idemp.spark.reconcile import Kind
from idemp.spark.testing import jvm
from tests.cli.conftest import Cli
from tests.house import SELL, sale, sql_house

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.slow

PAGE = (Path(__file__).parents[3] / "docs/how-to/reconcile.md").read_text(encoding="utf-8")
LATE = timedelta(hours=1)


@dataclass(frozen=True)
class Service:
    """A folder with the log, and a file that says where the database is."""

    folder: Path
    url: str

    @property
    def url_file(self) -> Path:
        return self.folder / "url"


@pytest.fixture(scope="module")
def service(spark: SparkSession, postgresql: Any, tmp_path_factory: pytest.TempPathFactory) -> Service:
    """Forty messages of three hours ago: three lost, two sent twice, one of them with another body, one stuck, one late."""
    url, folder = postgresql.create_database("reconciled"), tmp_path_factory.mktemp("reconciled")
    (folder / "url").write_text(url)
    sent_at = datetime.now(UTC) - timedelta(hours=3)
    numbers, rows = range(40), []
    with sql_house(url) as house:
        house.sells(outputs=1)
        house.clock.advance(sent_at - house.clock.now())
        for number in numbers:
            rows.append((f"m-{number}", sent_at, SELL, json.dumps({"n": number}), "shop", number))
            if number < 3:
                continue
            if number == 39:
                house.clock.advance(LATE)
            house.script.answers = ["nacked"] if number == 20 else []
            house.deliver(sale(f"m-{number}", {"n": number}))
        house.restart()
    rows.append(("m-30", sent_at, SELL, '{ "n": 30 }', "shop", 40))
    rows.append(("m-31", sent_at, SELL, '{"n": -31}', "shop", 41))
    schema = "message_id string, sent_at timestamp, type string, body string, queue string, number int"
    spark.createDataFrame(rows, schema).write.parquet(str(folder / "log"))
    return Service(folder, url)


FOUND = {"lost": 3, "duplicated": 1, "conflicting": 1, "undispatched": 1, "late": 1, "unknown_origin": 0, "unusable": 0}


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    return found[1]


def quick() -> list[str]:
    """Options for a session of its own, that starts as fast as those of tests."""
    conf = {
        "spark.sql.shuffle.partitions": "2",
        "spark.master": "local[2,4]",
        "spark.driver.extraJavaOptions": jvm.flags(),
    }
    return [part for name, value in conf.items() for part in ("--conf", f"{name}={value}")]


def run(service: Service, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("IDEMP_")}
    return subprocess.run(
        [sys.executable, "-m", "idemp", *arguments],
        cwd=service.folder,
        env={**environment, "IDEMP_DATABASE_URL": service.url},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


@pytest.mark.timeout(420)
def test_the_command_finds_it_and_says_so_by_its_exit_code(service: Service) -> None:
    idemp, *arguments = shlex.split(block("sh").replace("\\\n", ""))
    assert idemp == "idemp"
    done = run(service, *("shop" if each == "orders" else each for each in arguments), *quick(), "--json")
    assert done.returncode == ExitCode.FINDINGS, done.stderr
    told = json.loads(done.stdout)
    assert {kind.value: told["totals"][kind.value] for kind in Kind} == FOUND
    assert {finding["id"] for finding in told["findings"] if finding["kind"] == "lost"} == {"m-0", "m-1", "m-2"}
    assert (service.folder / "report/index.html").exists()
    assert json.loads((service.folder / "report/summary.json").read_text()) == told
    password = re.search(r":([^:@/]+)@", service.url)
    assert password is None or password[1] not in done.stdout + done.stderr


@pytest.mark.timeout(420)
def test_the_frames_say_the_same(spark: SparkSession, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(service.folder)
    code = block("python").replace('["orders"]', '["shop"]')
    # Spark's own processes run elsewhere, and were started before there was this database.
    code = code.replace('"log"', repr(str(service.folder / "log")))
    code = code.replace('"send-again"', repr(str(service.folder / "send-again")))
    assert code.count('.format("idemp")') == 2
    code = code.replace('.format("idemp")', f'.format("idemp").option("url_file", {str(service.url_file)!r})')
    names: dict[str, Any] = {}
    exec(code, names)
    totals = names["summary"].totals
    assert {kind.value: totals.of(kind) for kind in Kind} == FOUND
    again = spark.read.parquet(str(service.folder / "send-again")).collect()
    assert {row.message_id: row.body for row in again} == {
        f"m-{number}": json.dumps({"n": number}) for number in range(3)
    }


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--grace", "soon"], 2, "--grace: 'soon' is no duration"),
        (["--since", "yesterday"], 2, "'yesterday' is neither"),
        (["--allow", "lots"], 2, "lots"),
    ],
)
def test_wrong_command_lines(arguments: list[str], code: int, words: str) -> None:
    told = ["--sent", "log", "--consumer", "shop", "--id", "message_id", "--time", "sent_at"]
    answer = Cli()("pipeline", "reconcile", *told, *arguments)
    assert (answer.code, words in answer.err) == (code, True), answer.err
