"""Settings: the configuration that differs between the environments in which an app runs.

Read from environment variables `IDEMP_…`, else from `idemp.toml` or `[tool.idemp]` of `pyproject.toml` in the current folder.
An empty variable counts as unset, because compose files often define empty ones.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from idemp.errors import ConfigurationError
from idemp.policy import seconds

__all__ = ["Settings"]

# Kubernetes sets these for a service of the name idemp; tests have names of their own.
FOREIGN: Final = re.compile(r"IDEMP_(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_\w+)?|TEST_\w+)", re.ASCII)

TABLES: Final = ("key", "retry", "previous")  # options that are tables

Seconds = Annotated[float, BeforeValidator(lambda value: seconds(value, "duration"))]


def _whole(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("has to be a whole number")  # noqa: TRY004 - pydantic reports ValueErrors
    return value


Whole = Annotated[int, BeforeValidator(_whole)]


class Settings(BaseSettings):
    """Settings of a process. Arguments come before environment variables, which come before the file and then the defaults.

    Attributes:
        database_url: URL of the database: SQLite, PostgreSQL, MariaDB or MySQL.
        broker_url: `sql://` keeps queues in the database; `amqp://…` and `amqps://…` are RabbitMQ.
        table_prefix: Prefix of the name of each table.
        group: Deliveries that are received, sent and acknowledged together.
        concurrency: `async def` handlers that run at once in a process.
        fast_path: Whether idemp's own statements are two messages to the server, where the database can (PostgreSQL).
        commits: Whether a group of transactions waits for the disk once (`group`), or each one by itself (`each`), where the database
            can (PostgreSQL, with `fast_path`). No message is acked, and no output sent, before its transaction is on disk.
        lease: Time for which a worker owns a leased message; after it, other workers take over the messages of a dead one.
        publish_timeout: Time to wait for the broker's confirms; shorter than the 15 s for which other workers leave outputs alone.
        grace: Time that a stopping worker gives running handlers to finish.
        patience: Time that a starting worker or relay waits for an unreachable database; then it ends with exit code 4.
        messages: Options of policies by message type, which come before those in the code: see `idemp.policy.configured`.
        health_host: Address of `/health` and `/ready`.
        health_port: TCP port of `/health` and `/ready`; they are off by default, and 0 takes a free port.
        metrics_host: Address of `/metrics`, for Prometheus.
        metrics_port: TCP port of `/metrics`; off by default, and 0 takes a free port.

    Raises:
        ConfigurationError: A setting is unknown or invalid.

    Example:
        >>> Settings(lease="10s").lease, Settings().broker_url
        (10.0, 'sql://')
    """

    model_config = SettingsConfigDict(
        env_prefix="IDEMP_", env_ignore_empty=True, extra="forbid", frozen=True, hide_input_in_errors=True
    )

    database_url: str = Field("sqlite:///idemp.db", repr=False)  # both may have a password
    broker_url: str = Field("sql://", repr=False)
    table_prefix: str = Field("idemp_", pattern=r"^[a-z][a-z0-9_]{0,20}$")
    group: Whole = Field(20, ge=1, le=1000)
    concurrency: Whole = Field(20, ge=1, le=1000)
    fast_path: bool = True
    commits: Literal["each", "group"] = "group"
    lease: Seconds = Field(30.0, ge=1, le=3600)
    publish_timeout: Seconds = Field(10.0, gt=0, lt=15)
    grace: Seconds = Field(30.0, ge=0)
    patience: Seconds = Field(300.0, ge=0)
    messages: dict[str, dict[str, Any]] = Field(default_factory=dict)
    health_host: str = "127.0.0.1"
    health_port: Whole | None = Field(None, ge=0, le=65_535)
    metrics_host: str = "127.0.0.1"
    metrics_port: Whole | None = Field(None, ge=0, le=65_535)

    def __init__(self, **values: Any) -> None:
        known = {f"IDEMP_{name.upper()}" for name in type(self).model_fields}
        for name in os.environ:
            if name.startswith("IDEMP_") and name not in known and not FOREIGN.fullmatch(name):
                raise ConfigurationError(f"{name} is not a setting: {_meant(name, known)}")
        where, file = _read_file()
        for name, value in file.items():
            if name not in type(self).model_fields:
                raise ConfigurationError(f"{where}: {name} is not a setting: {_meant(name, type(self).model_fields)}")
            if not os.environ.get(f"IDEMP_{name.upper()}"):  # pydantic would prefer a value given here to the environment
                values.setdefault(name, value)
        in_file, given = file.get("messages", {}), values.pop("messages", {})
        values["messages"] = _merged({where: in_file, "IDEMP_MESSAGES": _variable(), "messages": given})
        try:
            super().__init__(**values)
        except ValidationError as error:
            problems = (f"{'.'.join(map(str, part['loc']))} ({part['msg']})" for part in error.errors(include_input=False))
            raise ConfigurationError(f"invalid settings or IDEMP_… variables: {'; '.join(problems)}") from None


def _meant(name: str, known: Iterable[str]) -> str:
    nearest = difflib.get_close_matches(name, known, 1)
    return f"did you mean {nearest[0]}?" if nearest else f"there are {', '.join(sorted(known))}"


def _read_file() -> tuple[str, dict[str, Any]]:
    """Return the name and the content of the configuration file of the current folder."""
    tables = {}
    for name in ("idemp.toml", "pyproject.toml"):
        try:
            document = tomllib.loads(Path(name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigurationError(f"{name} cannot be read: {error}") from None
        tool = document.get("tool")
        table = document if name == "idemp.toml" else tool.get("idemp") if isinstance(tool, dict) else None
        if table is not None and not isinstance(table, dict):
            raise ConfigurationError(f"{name}: [tool.idemp] has to be a table")
        if table is not None:
            tables[name] = table
    if len(tables) > 1:
        raise ConfigurationError("there are settings in idemp.toml and in [tool.idemp] of pyproject.toml: keep one of them")
    return next(iter(tables.items()), ("idemp.toml", {}))


def _variable() -> Any:
    try:
        return json.loads(os.environ.get("IDEMP_MESSAGES") or "{}")
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"IDEMP_MESSAGES is not JSON: {error}") from None


def _merged(sources: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the options of each type; later sources replace an option as a whole."""
    merged: dict[str, dict[str, Any]] = {}
    for where, source in sources.items():
        if not isinstance(source, Mapping) or not all(isinstance(options, Mapping) for options in source.values()):
            raise ConfigurationError(f"{where}: messages has to be a table of options by message type")
        for type, options in source.items():
            for name, value in options.items():
                if isinstance(value, Mapping) and name not in TABLES:
                    raise ConfigurationError(f'{where}: quote names with dots: [messages."{type}.{name}"]')
            merged[type] = {**merged.get(type, {}), **options}
    return merged
