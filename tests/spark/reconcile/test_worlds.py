"""Spark judges small random worlds as plain Python does."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import pytest
from pyspark.sql import functions as f

from idemp.spark.reconcile import Fate, Kind, Sent
from idemp.spark.reconcile.judging import by_message, judged
from idemp.spark.reconcile.rows import rows_of
from tests.spark.reconcile.worlds import TERMS, World, oracle, world

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.slow

WORLDS = [world(seed) for seed in range(400)]


def test_every_fate_and_kind_is_met() -> None:
    verdicts = [verdict for made in WORLDS for verdict in oracle(made).values()]
    assert {fate for fate, _, _ in verdicts} == {fate.value for fate in Fate}
    assert {kind for _, kinds, _ in verdicts for kind in kinds} == {kind.value for kind in Kind}


def test_worlds_are_judged_as_plain_python_judges_them(spark: SparkSession) -> None:
    sent, inbox, outputs = frames(spark, WORLDS)
    log = Sent(
        frame=sent,
        consumers=[made.consumer for made in WORLDS],
        consumer="consumer",
        id="id",
        type="type",
        body="body",
        time="time",
        position="position",
    )
    found = judged(by_message(rows_of(log), inbox, outputs), TERMS)
    answers: dict[str, dict[str, tuple[str, tuple[str, ...], int]]] = defaultdict(dict)
    for row in found.withColumn("name", f.lower(f.hex("key"))).collect():
        answers[row.consumer][row.name] = (row.fate, tuple(row.kinds), row.sends)
    for made in WORLDS:
        expected = oracle(made)
        answer = answers[made.consumer]
        usable = {name: verdict for name, verdict in expected.items() if not name.startswith("(")}
        assert {name: answer.get(name) for name in usable} == usable, made
        # Rows without a usable id have keys of nobody else's.
        faulty = sorted(verdict for name, verdict in expected.items() if name.startswith("("))
        assert sorted(verdict for name, verdict in answer.items() if name not in usable) == faulty, made


def frames(spark: SparkSession, worlds: list[World]) -> tuple[DataFrame, DataFrame, DataFrame]:
    sent = [(made.consumer, r.id, r.type, r.body, r.time, r.position) for made in worlds for r in made.sent]
    claims = [(made.consumer, c.key, c.id, c.type, c.claimed_at, c.fingerprint) for made in worlds for c in made.claims]
    outputs = [(made.consumer, *output) for made in worlds for output in made.outputs]
    return (
        spark.createDataFrame(
            sent, "consumer string, id string, type string, body binary, time timestamp, position string"
        ),
        spark.createDataFrame(
            claims,
            "consumer string, message_key binary, original_id string, type string, claimed_at timestamp, fingerprint binary",
        ),
        spark.createDataFrame(outputs, "consumer string, message_key binary, pending boolean, quarantined boolean"),
    )
