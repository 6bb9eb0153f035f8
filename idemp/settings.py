"""Settings: defaults, then a file, then the environment, then arguments; each later one wins.

The file is `idemp.toml`, or `[tool.idemp]` of `pyproject.toml`, in the working directory, or what `IDEMP_CONFIG` names.
The environment's names are `IDEMP_` and the setting's name in capitals; `IDEMP_MESSAGES` is a JSON object.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, SettingsError

from idemp.deadletter import UNKNOWN_VERSION
from idemp.errors import ConfigurationError
from idemp.policy import Duration, describe_errors, nearest

CONFIG_VARIABLE: Final = "IDEMP_CONFIG"
PROCESS_VARIABLE: Final = "IDEMP_PROCESS_NUMBER"
"""Set by `idemp worker --processes N` for its children: 0 to N - 1. A child that is started again keeps its number."""
_PREFIX: Final = "IDEMP_"
_OF_KUBERNETES: Final = re.compile(r"_SERVICE_(HOST|PORT)|_PORT($|_\d)")  # set for a service that is called idemp
_OTHER_VARIABLES: Final = (CONFIG_VARIABLE, PROCESS_VARIABLE, "IDEMP_TEST_")


class _FileSource(PydanticBaseSettingsSource):
    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:
        del field
        return None, field_name, False

    def __call__(self) -> dict[str, Any]:
        return read_file()


class Settings(BaseSettings):
    """What a service with idemp can set. Times are durations: seconds, or text such as "30s".

    Attributes:
        database_url: SQLAlchemy URL of the database with the inbox.
        broker_url: `pyamqp://…` for RabbitMQ, `local://file` for the embedded broker.
        schema_name: database schema of idemp's tables.
        table_prefix: prefix of idemp's tables.
        namespace: keeps output ids of unrelated systems apart.
        exchange: topic exchange for published outputs.
        wire: form of outgoing messages; arriving ones are recognised by themselves.
        source: CloudEvents source of outgoing messages; default `/idemp/<consumer>`.
        max_body_bytes: larger bodies are parked, larger outputs refused.
        prefetch: unsettled deliveries per worker thread.
        threads: consuming threads per worker process.
        relay: whether workers run a relay thread.
        relay_after: how long stored outputs wait for their own dispatch before a relay takes them.
        relay_lease: how long a relay alone has an output; a dead one's work is taken over when it ends.
        output_attempts: how often an output that no queue takes, or the broker never will, is tried before quarantine.
        relay_interval: pause between a relay's looks when nobody wakes it.
        purge_interval: pause between clean-ups of expired claims.
        grace: how long a stopping worker waits for running handlers.
        redelivery_horizon: how late the broker can still redeliver; default by transport.
        app_version: the application's own version, told by dead letters; `App(version=…)` wins.
        allow_at_most_once: accept a transport that loses messages on a crash.
        metrics_port: where workers and relays serve Prometheus metrics, `None` for nowhere, 0 for any free port; the n-th of
            several processes (`--processes`) takes the n-th port from there.
        metrics_host: the address that they listen on.
        traces: whether to trace by OpenTelemetry, where it is installed and a tracer provider is configured.
        messages: policies per message type name.

    Raises:
        ConfigurationError: an unknown or wrong setting, by `load_settings`.

    Example:
        >>> Settings(prefetch=5).prefetch
        5
    """

    model_config = SettingsConfigDict(env_prefix=_PREFIX, extra="forbid", frozen=True)

    database_url: str = Field(default="sqlite:///idemp.db", repr=False)
    broker_url: str = Field(default="local://idemp-broker.db", repr=False)
    schema_name: str | None = None
    table_prefix: str = "idemp_"
    namespace: str = "idemp"
    exchange: str = "idemp"
    wire: Literal["amqp", "cloudevents-binary", "cloudevents-structured"] = "amqp"
    source: str | None = None
    max_body_bytes: int = Field(default=8 * 1024 * 1024, ge=1)
    prefetch: int = Field(default=20, ge=1, le=10_000)
    threads: int = Field(default=1, ge=1, le=256)
    relay: bool = True
    relay_after: Duration = timedelta(seconds=30)
    relay_lease: Duration = timedelta(seconds=30)
    output_attempts: int = Field(default=20, ge=1, le=10_000)
    relay_interval: Duration = timedelta(seconds=1)
    purge_interval: Duration = timedelta(seconds=60)
    grace: Duration = timedelta(seconds=30)
    redelivery_horizon: Duration | None = None
    app_version: str = Field(default=UNKNOWN_VERSION, min_length=1, max_length=200)
    allow_at_most_once: bool = False
    metrics_port: int | None = Field(default=None, ge=0, le=65_535)
    metrics_host: str = "127.0.0.1"
    traces: bool = True
    messages: dict[str, dict[str, Any]] = Field(default_factory=dict)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments over environment over file."""
        del dotenv_settings, file_secret_settings
        return init_settings, env_settings, _FileSource(settings_cls)


def load_settings(**arguments: Any) -> Settings:
    """The settings of this process; arguments that are `None` count as not given.

    Raises:
        ConfigurationError: an unknown or wrong setting; the nearest valid name is given.

    Example:
        >>> load_settings(thread=2)
        Traceback (most recent call last):
        ...
        idemp.errors.ConfigurationError: Settings: unknown option 'thread'. Did you mean 'threads'?
    """
    _check_environment()
    try:
        return Settings(**{name: value for name, value in arguments.items() if value is not None})
    except ValidationError as error:
        raise ConfigurationError("Settings: " + "; ".join(describe_errors(error, Settings.model_fields))) from None
    except SettingsError as error:
        raise ConfigurationError(f"Settings: {error}.", fix="IDEMP_MESSAGES has to be a JSON object.") from None


def read_file(folder: Path | None = None) -> dict[str, Any]:
    """The settings in the file, an empty dictionary without one.

    Raises:
        ConfigurationError: the file is no TOML, or the one that `IDEMP_CONFIG` names is missing.
    """
    named = os.environ.get(CONFIG_VARIABLE)
    folder = folder or Path.cwd()
    candidates = [Path(named)] if named else [folder / "idemp.toml", folder / "pyproject.toml"]
    for path in candidates:
        if not path.exists():
            continue
        try:
            content = tomllib.loads(path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"{path} can't be read: {error}.") from error
        found: Any = content.get("tool", {}).get("idemp") if path.name == "pyproject.toml" else content
        if isinstance(found, Mapping):
            return dict(found)
    if named:
        raise ConfigurationError(f"{CONFIG_VARIABLE} names {named!r}, which does not exist.")
    return {}


def _check_environment() -> None:
    known = {f"{_PREFIX}{name.upper()}" for name in Settings.model_fields}
    for name in os.environ:
        if not name.startswith(_PREFIX) or name.upper() in known or name.startswith(_OTHER_VARIABLES):
            continue
        if not _OF_KUBERNETES.search(name):
            raise ConfigurationError(f"The environment variable {name} is no setting. {nearest(name, known)}")
