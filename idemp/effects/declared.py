"""Effects as they are declared: a name, a function, and when it is tried again."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, get_type_hints

from idemp.codecs import Codec, is_message_class
from idemp.durations import parse_duration
from idemp.errors import ConfigurationError, OutputError
from idemp.findings import nearest
from idemp.identity import MAX_ID_BYTES
from idemp.messages import parse_body
from idemp.retries import exponential, parse_delays
from idemp.showing import described, text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from uuid import UUID

    from idemp.durations import DurationLike
    from idemp.retries import DelaysLike

DEFAULT_RETRY: Final = exponential("1s", longest="1h")
"""Pauses between attempts, each with some jitter: doubling from a second up to an hour, which repeats."""
DEFAULT_ATTEMPTS: Final = 20
"""With the pauses above: about nine hours."""
DEFAULT_TIMEOUT: Final = timedelta(seconds=30)
LONGEST_TIMEOUT: Final = timedelta(minutes=15)
_VALUE_AND_RUN: Final = 2
_BEGIN_ONLY: Final = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectRun:
    """What an effect's function gets beside its value: about this one run.

    Attributes:
        id: the output's id, the same however often it is run: the idempotency key.
        name: what the effect is registered as.
        attempt: 1 for the first run; more if an earlier one failed, or ended with its process, perhaps after it was done.
        timeout: how long it may take, here and now.
        consumer: whose handler declared it.
        correlation_id: that of the handling's outputs.
        causation_id: the id of the message whose handling declared it.
    """

    id: UUID
    name: str
    attempt: int
    timeout: timedelta
    consumer: str
    correlation_id: str | None = None
    causation_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """A registered effect.

    Attributes:
        name: what handlers call it by.
        codec: encodes what `ctx.effect` got, decodes it for the function.
        function: does it.
        retry: pauses between attempts; the last one repeats.
        max_attempts: runs after which it is quarantined.
        timeout: how long a run may take.
    """

    name: str
    codec: Codec
    function: Callable[[Any, EffectRun], object]
    retry: tuple[timedelta, ...] = DEFAULT_RETRY
    max_attempts: int = DEFAULT_ATTEMPTS
    timeout: timedelta = DEFAULT_TIMEOUT

    def pause(self, attempt: int) -> timedelta:
        """How long to wait after the nth attempt, before jitter.

        Example:
            >>> effect = Effect(name="ping", codec=Codec(dict), function=print)
            >>> effect.pause(1), effect.pause(99)
            (datetime.timedelta(seconds=1), datetime.timedelta(seconds=3600))
        """
        return self.retry[min(attempt, len(self.retry)) - 1]


def declare_effect(
    name: str,
    function: Callable[..., object],
    cls: type[Any] | None = None,
    *,
    retry: DelaysLike | None = None,
    max_attempts: int = DEFAULT_ATTEMPTS,
    timeout: DurationLike = DEFAULT_TIMEOUT,
) -> Effect:
    """An effect from a function and what was said about it; the class of its value is read from its annotation if need be.

    Raises:
        ConfigurationError: the function can't be one, or an option makes no sense.

    Example:
        >>> def ping(value: dict[str, str]) -> None: ...
        >>> declare_effect("ping", ping, timeout="5s").timeout
        datetime.timedelta(seconds=5)
    """
    _check_name(name)
    try:
        delays = DEFAULT_RETRY if retry is None else parse_delays(retry)
        longest = parse_duration(timeout)
    except (ValueError, TypeError) as error:
        raise ConfigurationError(f"The effect {name!r}: {error}.") from error
    if not timedelta(0) < longest <= LONGEST_TIMEOUT or isinstance(max_attempts, bool) or max_attempts < 1:
        raise ConfigurationError(
            f"The effect {name!r} has timeout={longest} and max_attempts={max_attempts!r}.",
            fix=f"A timeout is longer than 0 and at most {LONGEST_TIMEOUT}; there is at least one attempt.",
        )
    return Effect(
        name=name,
        codec=Codec(cls or _annotated_class(name, function)),
        function=_with_run(name, function),
        retry=delays,
        max_attempts=max_attempts,
        timeout=longest,
    )


def encode_effect(effects: Mapping[str, Effect], name: str, value: Any) -> bytes:
    """The stored form of an effect's value.

    Raises:
        OutputError: no such effect is registered, or it takes something else.

    Example:
        >>> encode_effect({"ping": Effect(name="ping", codec=Codec(dict), function=print)}, "ping", {"host": "a"})
        b'{"host":"a"}'
    """
    effect = effects.get(name)
    if effect is None:
        hint = nearest(name, effects) if effects else ""
        raise OutputError(
            f"No effect is registered as {name!r}. {hint}".rstrip(),
            fix=f'Register the function that does it with @app.effect("{name}") on the app whose handler this is.',
        )
    if not isinstance(value, effect.codec.cls):
        raise OutputError(f"The effect {name!r} takes a {effect.codec.cls.__name__}, not a {type(value).__name__}.")
    try:
        body = effect.codec.encode(value)
    except (ValueError, TypeError, RecursionError) as error:
        raise OutputError(f"The value of the effect {name!r} can't be written as JSON: {text_of(error)}.") from error
    try:
        effect.codec.decode(*parse_body(body))
    except Exception as error:  # of a validator, which may raise anything
        raise OutputError(
            f"The value of the effect {name!r} could not be read back when the effect runs: {described(error)}",
            fix="Declare the class so that it reads what it writes: mind aliases, excluded fields and serializers.",
        ) from error
    return body


def _check_name(name: str) -> None:
    if not name or name != name.strip() or len(name.encode("utf-8")) > MAX_ID_BYTES or "\x00" in name:
        raise ConfigurationError(
            f"{name!r} can't be an effect's name.", fix=f"Use 1 to {MAX_ID_BYTES} bytes without blanks around them."
        )


def _with_run(name: str, function: Callable[..., object]) -> Callable[[Any, EffectRun], object]:
    called = function if inspect.isroutine(function) else type(function).__call__
    if any(begins_only(each) for each in (function, called) for begins_only in _BEGIN_ONLY):
        raise ConfigurationError(
            f"The effect {name!r} is asynchronous or a generator: calling it does nothing.",
            fix="Effects are plain functions.",
        )
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (ValueError, TypeError) as error:
        raise ConfigurationError(f"The signature of the effect {name!r} can't be read: {error}.") from error
    required = [item for item in parameters if item.default is item.empty and item.kind is not item.VAR_KEYWORD]
    by_name = [item for item in required if item.kind is item.KEYWORD_ONLY]
    if not by_name and (len(required) == _VALUE_AND_RUN or (len(required) == 1 and _takes_run(parameters))):
        return function
    if by_name or len(required) != 1:
        raise ConfigurationError(f"The function of effect {name!r} takes neither (value) nor (value, run).")
    return lambda value, _: function(value)


def _takes_run(parameters: Sequence[inspect.Parameter]) -> bool:
    """Whether its second parameter, which has a default, is for the run all the same."""
    return any(item.name == "run" and item.kind is item.POSITIONAL_OR_KEYWORD for item in parameters[1:_VALUE_AND_RUN])


def _annotated_class(name: str, function: Callable[..., object]) -> type[Any]:
    called = function if inspect.isroutine(function) else type(function).__call__
    try:
        hints = get_type_hints(called)
    except (NameError, TypeError) as error:
        raise ConfigurationError(
            f"The annotations of the effect {name!r} can't be read: {error}.",
            fix=f'Name the class of its value: @app.effect("{name}", TheClass).',
        ) from error
    parameters = list(inspect.signature(function).parameters)
    annotated = hints.get(parameters[0]) if parameters else None
    cls: Any = getattr(annotated, "__origin__", annotated)
    if not is_message_class(cls):
        raise ConfigurationError(
            f"The effect {name!r} does not say what it takes.",
            fix=f'Annotate its first parameter with a message class, or name it: @app.effect("{name}", TheClass).',
        )
    found: type[Any] = cls
    return found
