"""The mock Kafka: what is sent there is there, for other processes as well."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Consumer, TopicPartition

from idemp.spark.testing import mock_kafka

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pyspark.sql import SparkSession

pytestmark = pytest.mark.slow


def read(servers: str, count: int) -> list[tuple[int, bytes]]:
    """So many messages of a partition, from its beginning, with their offsets."""
    consumer = Consumer({"bootstrap.servers": servers, "group.id": "tests", "enable.auto.commit": False})
    try:
        consumer.assign([TopicPartition("orders", 1, 0)])
        messages = consumer.consume(count, timeout=20)
        return [(message.offset() or 0, bytes(message.value() or b"")) for message in messages]
    finally:
        consumer.close()


def test_a_task_reads_what_was_sent(spark: SparkSession) -> None:
    with mock_kafka() as kafka:
        assert all(server.startswith("127.0.0.1:") for server in kafka.servers.split(","))
        sent = kafka.send("orders", [b"first", b"second"], key=b"k", partition=1, headers={"type": "shop.Order"})
        assert sent == ["orders/1#0", "orders/1#1"]
        servers = kafka.servers

        def task(_: Iterable[int]) -> Iterator[tuple[int, bytes]]:
            yield from read(servers, 2)

        assert spark.sparkContext.parallelize([0], 1).mapPartitions(task).collect() == [(0, b"first"), (1, b"second")]


def test_what_is_too_old_is_gone() -> None:
    """As on a cluster whose retention has passed: a reader from the beginning is to notice."""
    with mock_kafka() as kafka:
        kafka.send("orders", [bytes(2**19)] * 20, partition=1)
        consumer = Consumer({"bootstrap.servers": kafka.servers, "group.id": "tests"})
        low, high = consumer.get_watermark_offsets(TopicPartition("orders", 1), timeout=10)
        consumer.close()
    assert high == 20
    assert low > 0
