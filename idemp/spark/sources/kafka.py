"""Kafka as a source, through librdkafka: no jar."""

from __future__ import annotations

import time
from contextlib import closing
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, ClassVar, Final

from idemp.columns import Columns, check_source, columns_of, position
from idemp.errors import BrokerUnavailable, ConfigurationError, OffsetsLost
from idemp.messages import JSON_CONTENT_TYPE, Message
from idemp.spark.sources.reading import LogSource

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from confluent_kafka import Consumer
    from confluent_kafka import Message as Record

FORMAT: Final = "idemp-kafka"
_CLOUDEVENTS: Final = "ce_"
_ANSWER_SECONDS: Final = 10.0
_PATIENCE: Final = 30.0  # seconds without a record, though there must be one
_AT_ONCE: Final = 500  # records
_OURS: Final = {
    # Offsets stand in Spark's checkpoint; the group is only a name that rights can be given to.
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "auto.offset.reset": "error",
    "enable.partition.eof": True,
    "isolation.level": "read_committed",
}


class KafkaSource(LogSource):
    """`spark.readStream.format("idemp-kafka").option("topics", "orders")`: partitions are `orders/0`, `orders/1` and so on.

    Options `idFrom` and `typeFrom` say where id and type of what is no CloudEvent stand: `header:NAME` or `key`.
    """

    own_options: ClassVar = ("topics", "idFrom", "typeFrom")

    @classmethod
    def name(cls) -> str:
        """The format."""
        return FORMAT

    def open(self) -> KafkaLog:
        """The topics that the options name."""
        settings = {name: value.get_secret_value() for name, value in self.secrets.kafka.items()}
        return KafkaLog(
            settings,
            self.said.texts("topics"),
            id_from=self.said.text("idFrom", "header:id"),
            type_from=self.said.text("typeFrom", "header:type"),
        )


class KafkaLog:
    """Some topics of one cluster. Only what is committed is read; records of transactions that were aborted have no place.

    Args:
        settings: librdkafka's, at least `bootstrap.servers`.
        topics: which topics.
        id_from: where the message id stands.
        type_from: where the message type stands.

    Raises:
        ConfigurationError: a setting is missing or would break what is promised, or confluent-kafka is not installed.
    """

    def __init__(self, settings: Mapping[str, str], topics: Sequence[str], *, id_from: str, type_from: str) -> None:
        if not settings.get("bootstrap.servers"):
            raise ConfigurationError(
                "Nothing says where Kafka is.", fix='Say sources.register(spark, kafka={"bootstrap.servers": "…"}).'
            )
        ours = next((name for name in _OURS if name in settings), None)
        if ours is not None:
            raise ConfigurationError(
                f"{ours} is not yours to set: offsets and order depend on it.", fix="Leave it out."
            )
        for place in (id_from, type_from):
            if place != "key" and not place.startswith("header:"):
                raise ConfigurationError(f"{place!r} is no place in a record.", fix="Write header:NAME or key.")
        for topic in topics:
            check_source(f"{topic}/{2**31}")
        self._settings = {"group.id": "idemp", **settings, **_OURS}
        self._topics = tuple(topics)
        self._id_from = id_from
        self._type_from = type_from
        self._planner: Consumer | None = None

    def partitions(self) -> Sequence[str]:
        """The partitions of all topics, those that came later among them."""
        found = []
        for topic in self._topics:
            described = self._asked(
                lambda consumer, topic=topic: consumer.list_topics(topic, _ANSWER_SECONDS).topics[topic]
            )
            if described.error is not None:
                raise ConfigurationError(f"Kafka has no topic {topic!r} for us: {described.error.str()}.")
            found += [f"{topic}/{number}" for number in sorted(described.partitions)]
        return found

    def first(self, partition: str) -> int | None:
        """The offset of the oldest record kept; an empty partition has the one that the next record will get."""
        return self._watermarks(partition)[0]

    def end(self, partition: str) -> int | None:
        """The offset after the newest committed record."""
        return self._watermarks(partition)[1]

    def read(self, partition: str, start: int, end: int) -> Iterator[Columns]:
        """The records of a range of offsets; gaps are those of compaction and transactions."""
        if start >= end:
            return
        from confluent_kafka import TopicPartition

        topic, number = _split(partition)
        first = self._watermarks(partition)[0]
        if first > start:
            raise OffsetsLost.trimmed(partition, start, first)
        with closing(_consumer(self._settings)) as consumer:
            consumer.assign([TopicPartition(topic, number, start)])
            for record in self._records(consumer, partition, start):
                offset = record.offset()
                if offset is None or offset >= end:
                    return
                yield self._columns(record, partition)
                if offset == end - 1:
                    return

    def release(self, offsets: Mapping[str, int]) -> None:
        """Nothing: the topic's own retention says how long it keeps records."""

    def close(self) -> None:
        """Close the planner's connections."""
        if self._planner is not None:
            self._planner.close()
            self._planner = None

    def _records(self, consumer: Consumer, partition: str, start: int) -> Iterator[Record]:
        """All records up to the partition's end, as it is when we come there."""
        from confluent_kafka import KafkaError

        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline:
            for record in consumer.consume(_AT_ONCE, timeout=1.0):
                error = record.error()
                if error is None:
                    yield record
                    deadline = time.monotonic() + _PATIENCE
                elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - librdkafka's own codes are named so
                    return
                elif error.code() == KafkaError._AUTO_OFFSET_RESET:  # noqa: SLF001
                    raise OffsetsLost.trimmed(partition, start, self._watermarks(partition)[0])
                elif error.fatal() or not error.retriable():
                    raise _away(error.str())
        raise _away(f"{partition} has records and sends none")

    def _columns(self, record: Record, partition: str) -> Columns:
        sent = dict(record.headers() or ())
        headers = {name: _text(value) for name, value in sent.items()}
        offset = record.offset()
        assert offset is not None  # noqa: S101 - it was read from there
        message = Message(
            body=record.value() or b"",
            type=_shown(_found(record, sent, self._type_from)),
            message_id=_text(_found(record, sent, self._id_from)),
            content_type=headers.get("content-type") or JSON_CONTENT_TYPE,
            headers={_name(name): value for name, value in headers.items() if value is not None},
            timestamp=_time(record),
        )
        return columns_of(message, position(partition, offset))

    def _watermarks(self, partition: str) -> tuple[int, int]:
        from confluent_kafka import TopicPartition

        topic, number = _split(partition)
        found: tuple[int, int] = self._asked(
            lambda consumer: consumer.get_watermark_offsets(TopicPartition(topic, number), timeout=_ANSWER_SECONDS)
        )
        if found is None:
            raise _away("no answer in time")
        return found

    def _asked(self, question: Any) -> Any:
        from confluent_kafka import KafkaException

        if self._planner is None:
            self._planner = _consumer(self._settings)
        try:
            return question(self._planner)
        except KafkaException as error:
            raise _away(str(error.args[0].str() if error.args else error)) from error


def _consumer(settings: Mapping[str, Any]) -> Consumer:
    try:
        from confluent_kafka import Consumer, KafkaException
    except ImportError as error:
        raise ConfigurationError(
            "idemp-kafka needs confluent-kafka.", fix="Run `pip install 'idemp[kafka]'`."
        ) from error
    try:
        return Consumer(dict(settings))
    except KafkaException as error:
        # Its text names the setting; the values, passwords among them, stay out of it.
        raise ConfigurationError(f"librdkafka takes not these settings: {error.args[0].code()}.") from error


def _away(why: str) -> BrokerUnavailable:
    return BrokerUnavailable(f"Kafka: {why}.", fix="Nothing is lost: whatever was not handled is read again.")


def _split(partition: str) -> tuple[str, int]:
    topic, _, number = partition.rpartition("/")
    return topic, int(number)


def _name(header: str) -> str:
    """CloudEvents attributes under the names that they have on AMQP, where every consumer looks for them."""
    return f"cloudEvents_{header.removeprefix(_CLOUDEVENTS)}" if header.startswith(_CLOUDEVENTS) else header


def _found(record: Record, headers: Mapping[str, bytes | str | None], place: str) -> bytes | str | None:
    return record.key() if place == "key" else headers.get(place.removeprefix("header:"))


def _shown(value: bytes | str | None) -> str | None:
    """A text, whatever the bytes: a type that can't be read is unknown, where none would be the app's default."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _text(value: bytes | str | None) -> str | None:
    """A text; none where there are other bytes. Replaced, two ids would be one."""
    try:
        return value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError:
        return None


def _time(record: Record) -> datetime | None:
    from confluent_kafka import TIMESTAMP_NOT_AVAILABLE

    kind, milliseconds = record.timestamp()
    try:
        return None if kind == TIMESTAMP_NOT_AVAILABLE else datetime.fromtimestamp(milliseconds / 1000, UTC)
    except (ValueError, OverflowError, OSError):  # beyond the year 9999, such as of a producer that sends microseconds
        return None
