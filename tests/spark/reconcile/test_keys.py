"""Keys that Spark derives are those of the online consumer, byte for byte."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING
from uuid import UUID

import pytest
from pyspark.sql import functions as f

from idemp.errors import MessageError
from idemp.identity import Key
from idemp.messages import CLOUDEVENT_SOURCE_HEADER, Message
from idemp.spark.reconcile.keys import envelope_fault, envelope_key, envelope_text, is_own_text, key_text
from idemp.spark.reconcile.rows import rows_of, span_of
from idemp.spark.reconcile.sent import Sent
from tests.test_identity import EFFECTIVE_IDS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.slow

Told = tuple[str | None, str | None]

UUID7 = "0192c8a4-7d3e-7000-8000-000000000001"
ODD = ("", " ", "\u2003\x1c", "\x85", "a\0b", "x" * 255, "x" * 256, "é" * 128)
EDGES: list[Told] = [
    *[(text, None) for text in ODD],
    *[(text, "/s") for text in ODD],
    *[("1", source) for source in ("", " ", "\xa0", "x" * 253, "x" * 254)],
    (None, None),
    (None, "/shop"),
    (UUID7, UUID7),
    ("1", UUID7),
    (UUID7.upper(), None),
    (f"{{{UUID7}}}", None),
    (UUID7.replace("-", ""), None),
    (f"{UUID7}\n", None),
    (f" {UUID7}", None),
    (UUID7.replace("7000", "8000"), None),
    (UUID7.replace("7000-8000", "8000-0000"), None),  # not of RFC 9562's variant, so of no version
    (UUID7.replace("7000-8000", "7000-c000"), "/shop"),
    ("e677d21f-dbff-7000-8000-000000000001", "/shop"),  # the calendar's last millisecond
    ("e677d21f-dc00-7000-8000-000000000001", "/shop"),
    ("ffffffff-ffff-ffff-ffff-ffffffffffff", None),
    ("00000000-0000-0000-0000-000000000000", None),
    ("Größe ✓ 💡", "/größe"),
]


def random_ids(seed: int, number: int) -> list[Told]:
    rng = random.Random(seed)
    made: list[Told] = []
    for _ in range(number):
        digits = f"{rng.getrandbits(128):032x}"
        uuid = str(UUID(f"{digits[:12]}{rng.choice('14578')}{digits[13:]}"))
        text = "".join(rng.choices("aä\U0001f600 ,#-0189", k=rng.randint(1, 12)))
        made.append((rng.choice([uuid, text]), rng.choice([None, None, "/shop", uuid, text])))
    return made


def online(id: str | None, source: str | None) -> tuple[bytes | None, str | None, str | None]:
    headers = {} if source is None else {CLOUDEVENT_SOURCE_HEADER: source}
    try:
        effective = Key.message_id().effective(Message(body=b"", message_id=id, headers=headers), None, "shop.Order")
    except MessageError as error:
        return None, None, type(error).__name__
    return effective.key.bytes, effective.text, None


def test_keys_are_those_of_the_online_consumer(spark: SparkSession) -> None:
    golden = [value for scope, value, *_ in EFFECTIVE_IDS if scope == "envelope"]
    told = [
        *EDGES,
        *(value[::-1] if isinstance(value, tuple) else (value, None) for value in golden),
        *random_ids(7, 3000),
    ]
    message_id, source = f.col("id"), f.col("source")
    found = spark.createDataFrame(told, "id string, source string").select(
        "id",
        "source",
        envelope_key(message_id, source).alias("key"),
        envelope_text(message_id, source).alias("text"),
        is_own_text(message_id, source).alias("own"),
        envelope_fault(message_id, source).alias("fault"),
        key_text(envelope_key(message_id, source)).alias("written"),
    )
    rows = found.collect()
    assert len(rows) == len(told)
    for row in rows:
        key, text, fault = online(row.id, row.source)
        assert row.fault == fault, row
        if fault is None:
            assert bytes(row.key) == key, row
            assert row.text == text, row
            assert row.written == str(UUID(bytes=key)), row
            assert row.own == (row.text == row.written), row


def test_a_value_that_python_can_not_read_is_one_rows_trouble(spark: SparkSession) -> None:
    rows = "('80FF', '2026-11-22T10:00:00Z'), ('61', '52026-11-22T10:00:00Z')"
    frame = spark.sql(f"SELECT unhex(col1) AS id, col2 AS at, '{{}}' AS body FROM VALUES {rows}")
    log = Sent(frame=frame, consumers=["shop"], id="id", time="at", body="body")
    assert [moment.year for moment in span_of(log)] == [2026, 2026]
    told = {(row["text"], row["fault"], row["sent_at"] is None) for row in rows_of(log).collect()}
    assert told == {("a", None, True), (None, "MissingId", False)}
