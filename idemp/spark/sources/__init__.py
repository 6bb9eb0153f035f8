"""Sources that can be read again: stream queues of RabbitMQ, the spool of other queues, Kafka.

All give the pipeline's columns (id, type, body, headers, time, position) and count offsets by partition. `register` them
with a session, then `spark.readStream.format("idemp-stream")`, `"idemp-spool"` or `"idemp-kafka"`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import SecretStr

from idemp.errors import ConfigurationError
from idemp.settings import load_settings
from idemp.spark import require
from idemp.spark.sources.secrets import Secrets

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import SparkSession

    from idemp.spark.sources.reading import LogSource

__all__ = ["register"]


def register(
    spark: SparkSession,
    *,
    broker: str | None = None,
    database: str | None = None,
    kafka: Mapping[str, str] | None = None,
) -> None:
    """Make the sources known to a session, with what they need in order to connect.

    Addresses and passwords are read here, from arguments, environment and file as everywhere (`IDEMP_BROKER_URL`,
    `IDEMP_DATABASE_URL`, `idemp.toml`), and travel to the tasks inside of the registered classes: neither a plan nor a page
    of Spark's shows them, and executors need none of these settings. Register again to change them.

    Args:
        spark: the session.
        broker: RabbitMQ, `pyamqp://…`; default from the settings.
        database: the database with the spool; default from the settings.
        kafka: settings of librdkafka for `idemp-kafka`, such as `{"bootstrap.servers": "…", "sasl.password": "…"}`.

    Raises:
        ConfigurationError: a wrong setting, or an older PySpark than 4.2, which has no admission control for such sources.
    """
    secrets = secrets_of(broker, database, kafka)
    for source in _sources():
        spark.dataSource.register(knowing(source, secrets))


def secrets_of(broker: str | None, database: str | None, kafka: Mapping[str, str] | None) -> Secrets:
    """What arguments and settings say.

    Raises:
        ConfigurationError: a wrong setting.
    """
    settings = load_settings(broker_url=broker, database_url=database)
    return Secrets(
        SecretStr(settings.broker_url),
        SecretStr(settings.database_url),
        settings.schema_name,
        settings.table_prefix,
        {name: SecretStr(value) for name, value in (kafka or {}).items()},
    )


def knowing(source: type[LogSource], secrets: Secrets) -> type[LogSource]:
    """A source that knows how to connect.

    It is a class of its own that no module has, so that it travels with what it knows, and not by its name.
    """
    return type(f"{source.__name__}WithSecrets", (source,), {"secrets": secrets, "__module__": "__main__"})


def _sources() -> list[type[LogSource]]:
    require()
    try:
        from idemp.spark.sources.kafka import KafkaSource
        from idemp.spark.sources.rabbitmq import StreamSource
        from idemp.spark.sources.spool import SpoolSource
    except ImportError as error:
        raise ConfigurationError(
            f"The sources can't be loaded ({error}): admission control for them came with PySpark 4.2.",
            fix="Run `pip install --upgrade 'idemp[spark]' 'pyspark>=4.2'`.",
        ) from error
    return [StreamSource, SpoolSource, KafkaSource]
