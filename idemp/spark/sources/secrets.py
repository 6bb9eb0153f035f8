"""Addresses and passwords on their way to the tasks: inside of registered classes, shown nowhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import SecretStr


@dataclass(frozen=True, slots=True)
class Secrets:
    """What a source needs in order to connect.

    Attributes:
        broker_url: RabbitMQ, `pyamqp://…`.
        database_url: the database with the spool.
        schema: database schema of idemp's tables.
        prefix: prefix of idemp's tables.
        kafka: settings of librdkafka, such as `bootstrap.servers` and `sasl.password`.

    Example:
        >>> Secrets(SecretStr("pyamqp://guest:secret@broker"), SecretStr("sqlite:///idemp.db")).broker_url
        SecretStr('**********')
    """

    broker_url: SecretStr
    database_url: SecretStr
    schema: str | None = None
    prefix: str = "idemp_"
    kafka: Mapping[str, SecretStr] = field(default_factory=dict)
