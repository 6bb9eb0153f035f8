"""Settings: defaults, then a file, then the environment, then arguments; each later one wins.

The file is `idemp.toml`, or `[tool.idemp]` of `pyproject.toml`, in the working directory, or what `IDEMP_CONFIG` names.
The environment's names are `IDEMP_` and the setting's name in capitals; `IDEMP_MESSAGES` is a JSON object.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args, get_origin

from pydantic import BaseModel, Field, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, SettingsError

from idemp.deadletter import UNKNOWN_VERSION
from idemp.errors import ConfigurationError
from idemp.findings import describe_finding, nearest
from idemp.fingerprint import Fingerprint
from idemp.identity import Key
from idemp.inbox.port import DEFAULT_BROKER
from idemp.overrides import check_override
from idemp.policy import Duration, Whole

CONFIG_VARIABLE: Final = "IDEMP_CONFIG"
PROCESS_VARIABLE: Final = "IDEMP_PROCESS_NUMBER"
"""Set by `idemp worker --processes N` for its children: 0 to N - 1. A child that is started again keeps its number."""
_PREFIX: Final = "IDEMP_"
_MESSAGES_VARIABLE: Final = "IDEMP_MESSAGES"
_DATABASES_VARIABLE: Final = "IDEMP_DATABASES__"
_OF_KUBERNETES: Final = re.compile(r"_SERVICE_(HOST|PORT)|_PORT($|_\d)")  # set for a service that is called idemp
_KINDS: Final[Mapping[Any, str]] = {
    str: "text", bool: "true or false", int: "whole number", float: "number", timedelta: "duration", dict: "table",
    Path: "path",
}  # fmt: skip
_OTHER_VARIABLES: Final = (CONFIG_VARIABLE, PROCESS_VARIABLE, "IDEMP_TEST_", "IDEMP_SPARK_")


class _FileSource(PydanticBaseSettingsSource):
    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:
        del field
        return None, field_name, False

    def __call__(self) -> dict[str, Any]:
        content = read_file()
        said, later = content.get("messages"), self.current_state.get("messages")
        if isinstance(said, Mapping) and isinstance(later, Mapping):
            # An option is said again as a whole: pydantic would make one table of two, such as {header = …, field = …}.
            content["messages"] = {name: _without(options, later.get(name)) for name, options in said.items()}
        return content


def _without(options: Any, later: Any) -> Any:
    if isinstance(options, Mapping) and isinstance(later, Mapping):
        return {name: value for name, value in options.items() if name not in later}
    return options


class Settings(BaseSettings):
    """What a service with idemp can set. Times are durations: seconds, or text such as "30s".

    Attributes:
        database_url: SQLAlchemy URL of the database with the inbox.
        broker_url: `pyamqp://…` for RabbitMQ, `stomp://…` for ActiveMQ, `local://file` for the embedded broker.
        broker_name: name of that broker in the database; set it where apps of several brokers share a database, in all
            processes of an app.
        schema_name: database schema of idemp's tables.
        table_prefix: prefix of idemp's tables.
        namespace: keeps output ids of unrelated systems apart.
        exchange: topic exchange for published outputs.
        wire: form of outgoing messages; arriving ones are recognised by themselves.
        source: CloudEvents source of outgoing messages; default `/idemp/<consumer>`.
        max_body_bytes: larger bodies are parked, larger outputs refused.
        prefetch: unsettled deliveries per worker thread: sent ahead by the broker, or handled while their outputs' confirms
            are on their way.
        threads: consuming threads per worker process.
        relay: whether workers run a relay thread.
        relay_after: how long stored outputs wait for their own dispatch before a relay takes them.
        relay_lease: how long a relay alone has an output; a dead one's work is taken over when it ends.
        output_attempts: how often a relay tries an output that no queue takes, or the broker never will, before quarantine;
            the worker's own try, which comes first, and tries that failed for other reasons do not count.
        relay_interval: pause between a relay's looks when nobody wakes it.
        effect_threads: threads of a worker process that run effects, per app that has any; of these one a time may be done
            twice when the process dies.
        purge: whether workers delete expired claims; not where `idemp pipeline archive` does, once it has archived them.
        purge_interval: pause between clean-ups of expired claims.
        guard: the file that types with `late = "guard"` ask, as `idemp pipeline archive --guard` makes it.
        grace: how long a stopping worker waits for running handlers.
        redelivery_horizon: how late the broker can still redeliver; default by transport.
        app_version: the application's own version, told by dead letters; `App(version=…)` wins.
        allow_at_most_once: accept a transport that loses messages on a crash.
        metrics_port: where workers and relays serve Prometheus metrics, `None` for nowhere, 0 for any free port; the n-th of
            several processes (`--processes`) takes the n-th port from there.
        metrics_host: the address that they listen on.
        health_timeout: how long a consuming thread, or a relay, may show no sign of life before `/health` fails; a thread
            that runs a handler is judged by the next setting alone.
        health_handler_timeout: how long a handler may run before `/health` fails; `None`: as long as it likes.
        traces: whether to trace by OpenTelemetry, where it is installed and a tracer provider is configured.
        databases: URLs of other databases that handlers write to, by name (see `TwoPhase`); as variables
            `IDEMP_DATABASES__LEDGER` and so on.
        recover_interval: pause between a worker's looks for what is left in doubt in those.
        messages: policies per message type name.

    Raises:
        ConfigurationError: an unknown or wrong setting, by `load_settings`.

    Example:
        >>> Settings(prefetch=5).prefetch
        5
    """

    model_config = SettingsConfigDict(env_prefix=_PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True)

    database_url: str = Field(default="sqlite:///idemp.db", repr=False)
    broker_url: str = Field(default="local://idemp-broker.db", repr=False)
    broker_name: str = Field(default=DEFAULT_BROKER, min_length=1, max_length=100, pattern=r"^\S+$")
    schema_name: str | None = None
    table_prefix: str = "idemp_"
    namespace: str = "idemp"
    exchange: str = "idemp"
    wire: Literal["amqp", "cloudevents-binary", "cloudevents-structured"] = "amqp"
    source: str | None = None
    max_body_bytes: Whole = Field(default=8 * 1024 * 1024, ge=1)
    prefetch: Whole = Field(default=20, ge=1, le=10_000)
    threads: Whole = Field(default=1, ge=1, le=256)
    relay: bool = True
    relay_after: Duration = timedelta(seconds=30)
    relay_lease: Duration = timedelta(seconds=30)
    output_attempts: Whole = Field(default=20, ge=1, le=10_000)
    relay_interval: Duration = timedelta(seconds=1)
    effect_threads: Whole = Field(default=1, ge=1, le=64)
    purge: bool = True
    purge_interval: Duration = timedelta(seconds=60)
    guard: Path | None = None
    grace: Duration = timedelta(seconds=30)
    redelivery_horizon: Duration | None = None
    app_version: str = Field(default=UNKNOWN_VERSION, min_length=1, max_length=200)
    allow_at_most_once: bool = False
    metrics_port: Whole | None = Field(default=None, ge=0, le=65_535)
    metrics_host: str = "127.0.0.1"
    health_timeout: Duration = timedelta(seconds=60)
    health_handler_timeout: Duration | None = None
    traces: bool = True
    databases: dict[str, str] = Field(default_factory=dict, repr=False)
    recover_interval: Duration = timedelta(seconds=30)
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
    given = {name: value for name, value in arguments.items() if value is not None}
    _check_policies(given.get("messages"), "arguments", toml=False)
    _check_policies(_policies_of_environment(), _MESSAGES_VARIABLE, toml=False)
    path, content = _file()
    _check_policies(content.get("messages"), _place(path), toml=True)
    try:
        return Settings(**given)
    except ValidationError as error:
        raise ConfigurationError(_described(error, given, path, content)) from None
    except SettingsError as error:
        raise ConfigurationError(f"Settings: {error}.") from None


def read_file(folder: Path | None = None) -> dict[str, Any]:
    """The settings in the file, an empty dictionary without one.

    Raises:
        ConfigurationError: the file is no TOML, or the one that `IDEMP_CONFIG` names is missing.
    """
    return _file(folder)[1]


def _file(folder: Path | None = None) -> tuple[Path | None, dict[str, Any]]:
    """Which file it is, `None` without one, and what it says."""
    named = os.environ.get(CONFIG_VARIABLE)
    folder = folder or Path.cwd()
    candidates = [folder / named] if named else [folder / "idemp.toml", folder / "pyproject.toml"]
    for path in candidates:
        if not path.exists():
            continue
        try:
            content = _parsed(path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"{path} can't be read: {error}.") from error
        found: Any = content.get("tool", {}).get("idemp") if path.name == "pyproject.toml" else content
        if isinstance(found, Mapping):
            return path, dict(found)
    if named:
        raise ConfigurationError(f"{CONFIG_VARIABLE} names {named!r}, which does not exist.")
    return None, {}


@lru_cache(maxsize=4)
def _parsed(text: str) -> Mapping[str, Any]:
    """A service reads its file for each `Settings`, and a long one takes milliseconds."""
    return tomllib.loads(text)


def _place(path: Path | None) -> str:
    return f"{path} [tool.idemp]" if path is not None and path.name == "pyproject.toml" else f"{path}"


def _check_policies(messages: object, where: str, *, toml: bool) -> None:
    """Each place by itself, so that an error says where; what is no table of tables is left to pydantic."""
    if isinstance(messages, Mapping):
        for name, options in messages.items():
            if isinstance(options, Mapping):
                check_override(str(name), options, where, toml=toml)


def _policies_of_environment() -> object:
    text = next((value for name, value in os.environ.items() if name.upper() == _MESSAGES_VARIABLE), None)
    if text is None:
        return None
    try:
        found: object = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigurationError(f"{_MESSAGES_VARIABLE} has to be a JSON object: {error}.") from None
    if not isinstance(found, dict):
        raise ConfigurationError(f"{_MESSAGES_VARIABLE} has to be a JSON object, not {text[:40]!r}.")
    return found


def _described(error: ValidationError, given: Mapping[str, Any], path: Path | None, content: Mapping[str, Any]) -> str:
    """What is wrong, and where that stands: the last of file, environment and arguments that says it."""
    variables = {name.upper() for name in os.environ}
    sentences = []
    for finding in error.errors(include_url=False):
        name = str(finding["loc"][0]) if finding["loc"] else ""
        variable = f"{_PREFIX}{name.upper()}"
        if name in given:
            sentences.append(f"Settings: {describe_finding(finding, Settings.model_fields)}")
        elif variable in variables:
            sentences.append(describe_finding(finding, Settings.model_fields, f"{variable}: "))
        elif name in content:
            sentences.append(f"{_place(path)}: {describe_finding(finding, Settings.model_fields)}")
        else:
            sentences.append(f"Settings: {describe_finding(finding, Settings.model_fields)}")
    return "; ".join(sentences)


def _check_environment() -> None:
    known = {f"{_PREFIX}{name.upper()}" for name in Settings.model_fields}
    for name in os.environ:
        if not name.startswith(_PREFIX) or name.upper() in known or name.startswith(_OTHER_VARIABLES):
            continue
        if name.upper().startswith(_DATABASES_VARIABLE) and len(name) > len(_DATABASES_VARIABLE):
            continue
        if not _OF_KUBERNETES.search(name):
            raise ConfigurationError(f"The environment variable {name} is no setting. {nearest(name, known)}")


# The reference page ---------------------------------------------------------------------------------------------------


def markdown(model: type[BaseModel], heading: str) -> str:
    """The table of the reference page: each setting or option with type, default and meaning, from the class itself.

    Args:
        model: `Settings` or `idemp.policy.Policy`.
        heading: what its first column is called.

    Example:
        >>> print(markdown(Settings, "setting").splitlines()[0])
        | setting | type | default | meaning |
    """
    meanings = _meanings(model)
    lines = [f"| {heading} | type | default | meaning |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        default = _written(field.get_default(call_default_factory=True))
        cells = [f"`{name}`", _kind(field.annotation, field.metadata), default, meanings[name]]
        lines.append(f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def _meanings(model: type[BaseModel]) -> dict[str, str]:
    """The `Attributes` section of a docstring."""
    section = (inspect.getdoc(model) or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    found = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def _kind(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    bounds = {name: getattr(item, name) for item in metadata for name in ("ge", "le") if hasattr(item, name)}
    if "ge" in bounds:
        span = f", {bounds['ge']} to {bounds['le']}" if "le" in bounds else f", at least {bounds['ge']}"
    else:
        span = ""
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{json.dumps(choice)}`" for choice in get_args(annotation))
    if get_origin(annotation) is Annotated:
        return _kind(get_args(annotation)[0]) + span
    if get_origin(annotation) is tuple and _is_model(get_args(annotation)[0]):
        return "list of tables"
    if get_origin(annotation) is tuple:
        return f"{_kind(get_args(annotation)[0])}, one or a list{span}"
    if get_origin(annotation) is type:
        return "exception class"
    if type(None) in get_args(annotation):
        (some,) = (each for each in get_args(annotation) if each is not type(None))
        return _kind(some) + span
    kind = get_origin(annotation) or annotation
    return _KINDS.get(kind, str(kind.__name__).lower()) + span


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _written(value: Any) -> str:
    """A default as it is written in a file."""
    match value:
        case None | () | {}:
            return "none"
        case Key():
            return f'`"{value.name}()"`'
        case Fingerprint():
            return f'`"{value.mode}"`'
        case timedelta():
            return f"`{_duration(value)}`"
        case tuple():
            return f"`[{', '.join(map(_duration, value))}]`"
    return f"`{json.dumps(value)}`"


def _duration(value: timedelta) -> str:
    for unit, length in (("d", timedelta(days=1)), ("m", timedelta(minutes=1)), ("s", timedelta(seconds=1))):
        if value >= length and not value % length:
            return f'"{value // length}{unit}"'
    return f'"{value.total_seconds():g}s"'
