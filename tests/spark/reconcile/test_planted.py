"""What a script planted is found, and nothing else; and what is found comes out in every form."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from typing import TYPE_CHECKING

import pytest

from benchmarks.planting import AS_OF, CONSUMER, FAULTS, HARMLESS, RETENTION, Planted, expected, plant
from idemp.errors import ConfigurationError
from idemp.spark.reconcile import Kind, Sent, Summary, reconcile

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

    from idemp.spark.reconcile.reconciliation import Reconciliation

pytestmark = pytest.mark.slow

ROWS = int(os.environ.get("IDEMP_TEST_PLANTED", "30000"))
"""A million is what `python -m benchmarks reconcile` is for."""


def log_of(planted: Planted, **columns: str) -> Sent:
    mapped = {"id": "id", "type": "type", "time": "time", "position": "position", **columns}
    return Sent(frame=planted.sent, consumers=[CONSUMER], **mapped)


@pytest.fixture(scope="module")
def planted(spark: SparkSession) -> Planted:
    return plant(spark, ROWS)


@pytest.fixture(scope="module")
def found(planted: Planted) -> Iterator[Reconciliation]:
    log = log_of(planted, digest="digest")
    with reconcile(log, planted.inbox, planted.outputs, as_of=AS_OF, retention=RETENTION) as reconciliation:
        yield reconciliation


def test_exactly_what_was_planted_is_found(planted: Planted, found: Reconciliation) -> None:
    ids = defaultdict(set)
    for row in found.findings.collect():
        ids[row.kind].add(row.id)
    assert {kind: len(each) for kind, each in ids.items()} == FAULTS
    assert {kind: planted.ids(kind) for kind in FAULTS} == ids


def test_the_same_by_bodies(planted: Planted) -> None:
    """Parsed in Python, and compared with the fingerprints in the inbox."""
    log = log_of(planted, body="body")
    with reconcile(log, planted.inbox, planted.outputs, as_of=AS_OF, retention=RETENTION) as found:
        totals = found.summary(examples=0).totals
    assert {kind.value: totals.of(kind) for kind in Kind} == expected(Kind)


def test_the_summary_adds_up_to_the_input(planted: Planted, found: Reconciliation) -> None:
    summary = found.summary()
    totals = summary.totals
    assert totals.sends == planted.sent.count()
    assert totals.messages == ROWS
    fates = ("handled", "initiated", "not_yet", "unknown", "outside", "lost", "unknown_origin", "unusable")
    assert sum(getattr(totals, fate) for fate in fates) == totals.messages
    assert (totals.not_yet, totals.unknown) == (HARMLESS["not yet"], HARMLESS["expired"])
    assert totals.outputs == planted.outputs.count()
    for parts in (summary.types, summary.hours):
        for name in type(totals).model_fields:
            assert sum(getattr(part, name) for part in parts) == getattr(totals, name)


def test_all_that_is_saved_says_the_same(spark: SparkSession, found: Reconciliation, tmp_path: Path) -> None:
    summary = found.save(tmp_path / "report")
    saved = spark.read.parquet(str(tmp_path / "report/findings"))
    assert dict(saved.groupBy("kind").count().collect()) == FAULTS
    counts = spark.read.parquet(str(tmp_path / "report/counts"))
    assert counts.selectExpr("sum(messages)", "sum(lost)").collect()[0][:] == (ROWS, FAULTS["lost"])
    told = (tmp_path / "report/summary.json").read_text()
    assert Summary.model_validate_json(told) == summary
    assert json.loads(told)["version"] == 1
    page = (tmp_path / "report/index.html").read_text()
    assert all(f"<strong>{number}</strong><b>{kind}</b>" in page for kind, number in FAULTS.items())
    found.save(tmp_path / "report")  # over what was there
    assert spark.read.parquet(str(tmp_path / "report/findings")).count() == sum(FAULTS.values())


def test_a_column_that_is_missing_is_named(planted: Planted) -> None:
    with pytest.raises(ConfigurationError, match=r"no time 'sent_at'.*columns id, type, body"):
        reconcile(log_of(planted, time="sent_at"), planted.inbox, planted.outputs, as_of=AS_OF)


def test_an_empty_log_is_no_clean_log(planted: Planted) -> None:
    empty = Sent(frame=planted.sent.where("false"), consumers=[CONSUMER], id="id", time="time")
    with pytest.raises(ConfigurationError, match="right log"):
        reconcile(empty, planted.inbox, planted.outputs, as_of=AS_OF)
