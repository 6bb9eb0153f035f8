"""What is peculiar to Kafka: where id and type stand, several partitions, settings that are not the user's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

import pytest
from confluent_kafka import Producer

from idemp.errors import BrokerUnavailable, ConfigurationError
from idemp.spark.sources import kafka as module
from idemp.spark.sources.kafka import KafkaLog
from idemp.spark.sources.planning import Plan
from idemp.spark.testing import mock_kafka

pytestmark = pytest.mark.slow

HEADERS = {"id_from": "header:id", "type_from": "header:type"}


@pytest.fixture(scope="module")
def servers() -> Iterator[str]:
    with mock_kafka() as kafka:
        yield kafka.servers


@pytest.fixture
def opened(servers: str, unique_name: str) -> Iterator[Callable[..., KafkaLog]]:
    made: list[KafkaLog] = []

    def opened(**places: str) -> KafkaLog:
        made.append(KafkaLog({"bootstrap.servers": servers}, [unique_name], **{**HEADERS, **places}))
        return made[-1]

    yield opened
    for each in made:
        each.close()


def send(
    servers: str,
    topic: str,
    body: bytes | None,
    headers: dict[str, str],
    partition: int = 0,
    *,
    key: bytes = b"k-1",
    timestamp: int = 1_767_323_045_000,
) -> None:
    producer = Producer({"bootstrap.servers": servers, "linger.ms": 0})
    producer.list_topics(topic, timeout=10)  # makes it
    told = [(name, value.encode()) for name, value in headers.items()]
    producer.produce(topic, body, key=key, partition=partition, headers=told, timestamp=timestamp)
    assert producer.flush(10) == 0


def test_plain_record(servers: str, unique_name: str, opened: Callable[..., KafkaLog]) -> None:
    send(
        servers,
        unique_name,
        b"{}",
        {"id": "m-1", "type": "shop.Order", "content-type": "text/plain", "tenant": "north"},
    )
    (row,) = opened().read(f"{unique_name}/0", 0, 1)
    assert row[:3] == ("m-1", "shop.Order", b"{}")
    assert row.time == datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    headers = json.loads(row.headers or "")
    assert (headers["tenant"], headers["idemp-content-type"]) == ("north", "text/plain")


def test_id_from_the_key_and_a_body_that_is_none(
    servers: str, unique_name: str, opened: Callable[..., KafkaLog]
) -> None:
    """What a compacted topic says of a key that was deleted; whoever handles it will park it."""
    send(servers, unique_name, None, {"kind": "shop.Order"})
    (row,) = opened(id_from="key", type_from="header:kind").read(f"{unique_name}/0", 0, 1)
    assert row[:3] == ("k-1", "shop.Order", b"")


def test_values_that_can_not_be_read_are_none(servers: str, unique_name: str, opened: Callable[..., KafkaLog]) -> None:
    """Of keys with replacement characters, two would be one id; and a record must not end the stream for its time."""
    send(servers, unique_name, b"{}", {}, key=b"\x80", timestamp=1_767_323_045_000_000)
    (row,) = opened(id_from="key").read(f"{unique_name}/0", 0, 1)
    assert (row.id, row.time) == (None, None)


@pytest.mark.parametrize("mode", ["binary", "structured"])
def test_cloudevent(servers: str, unique_name: str, opened: Callable[..., KafkaLog], mode: str) -> None:
    event = {"specversion": "1.0", "id": "e-1", "source": "/shop", "type": "shop.Placed"}
    if mode == "binary":
        send(servers, unique_name, b'{"sku":"A"}', {f"ce_{name}": value for name, value in event.items()})
    else:
        body = json.dumps({**event, "data": {"sku": "A"}}).encode()
        send(servers, unique_name, body, {"content-type": "application/cloudevents+json"})
    (row,) = opened().read(f"{unique_name}/0", 0, 1)
    assert row[:3] == ("e-1", "shop.Placed", b'{"sku":"A"}')
    assert json.loads(row.headers or "")["cloudEvents_source"] == "/shop"


def test_all_partitions_are_read(servers: str, unique_name: str, opened: Callable[..., KafkaLog]) -> None:
    for partition in (1, 1, 3):
        send(servers, unique_name, b"{}", {"id": "m"}, partition)
    log = opened()
    plan = Plan(log)
    start = plan.initial()
    assert set(start) == {f"{unique_name}/{number}" for number in range(4)}
    end = plan.latest(start, None)
    rows = [row for each in plan.slices(start, end) for row in log.read(each.partition, each.start, each.end)]
    assert sorted(row.position for row in rows) == [f"{unique_name}/{place}" for place in ("1#0", "1#1", "3#0")]


def test_topic_that_is_missing(opened: Callable[..., KafkaLog]) -> None:
    with pytest.raises(ConfigurationError, match="Kafka has no topic"):
        opened().partitions()


def test_cluster_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ANSWER_SECONDS", 0.5)
    settings = {"bootstrap.servers": "127.0.0.1:1", "sasl.password": "kafka-secret"}
    log = KafkaLog(settings, ["orders"], **HEADERS)
    with pytest.raises(BrokerUnavailable) as raised:
        log.partitions()
    assert "kafka-secret" not in str(raised.value)
    log.close()


@pytest.mark.parametrize(
    ("settings", "places", "match"),
    [
        ({}, {}, "Nothing says where Kafka is"),
        ({"bootstrap.servers": "k", "isolation.level": "read_uncommitted"}, {}, "not yours to set"),
        ({"bootstrap.servers": "k"}, {"id_from": "body"}, "'body' is no place"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, str], places: dict[str, str], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        KafkaLog(settings, ["orders"], **{**HEADERS, **places})


def test_setting_that_librdkafka_does_not_know() -> None:
    settings = {"bootstrap.servers": "k", "sasl.pasword": "kafka-secret"}
    with pytest.raises(ConfigurationError) as raised:
        KafkaLog(settings, ["orders"], **HEADERS).partitions()
    assert "kafka-secret" not in str(raised.value)
