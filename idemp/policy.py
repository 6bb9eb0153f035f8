"""Policies: retries and deduplication of each message type."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from difflib import get_close_matches
from typing import Any, Final, Literal

from idemp.errors import ConfigurationError
from idemp.identity import Key
from idemp.messages import check_text

__all__ = ["Duration", "Idempotent", "Policy", "Previous", "Retry", "configured", "seconds"]

Duration = str | float | timedelta
"""A timedelta, seconds, or text such as "30s", "15m", "12h" or "7d"."""

UNITS: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
LONGEST: Final = 10 * 366 * 86_400.0
"""Seconds of the longest duration; claims with this retention are never purged."""


def seconds(value: Duration, name: str = "duration") -> float:
    """Return a duration in seconds.

    Raises:
        ConfigurationError: The value is not a duration, negative, or longer than ten years.

    Example:
        >>> seconds("15m"), seconds(timedelta(days=1)), seconds(0.5)
        (900.0, 86400.0, 0.5)
        >>> seconds("soon", "delay")
        Traceback (most recent call last):
        idemp.errors.ConfigurationError: delay: 'soon' is not a duration: write 30s, 15m, 12h or 7d
    """
    if isinstance(value, timedelta):
        length = value.total_seconds()
    elif isinstance(value, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", value, re.ASCII)
        length = float(match[1]) * UNITS[match[2] or "s"] if match else math.nan
    else:
        try:
            length = math.nan if isinstance(value, bool) else float(value)
        except (OverflowError, TypeError, ValueError):
            length = math.nan
    if not 0 <= length <= LONGEST:
        raise ConfigurationError(f"{name}: {value!r} is not a duration: write 30s, 15m, 12h or 7d")
    return length


@dataclass(frozen=True, kw_only=True)
class Retry:
    """How often a failing message runs, and how long it waits between its runs.

    Attributes:
        attempts: Runs that may fail before the message becomes a dead letter.
        delays: Pauses between runs; the last one repeats.
        jitter: Share by which a pause is made longer or shorter at random, from 0 to 1.
        retry_on: If given, other errors make a dead letter at once.
        refuse_on: These errors make a dead letter at once. The nearest base class that either tuple names decides.

    Raises:
        ConfigurationError: An option is invalid.

    Example:
        >>> Retry(attempts=3, delays=("1s", "1m"), jitter=0).pause(2)
        60.0
        >>> Retry(retry_on=(OSError,), refuse_on=(FileNotFoundError,)).retries(FileNotFoundError())
        False
    """

    attempts: int = 5
    delays: Sequence[Duration] = ("1s", "5s", "30s", "2m", "10m")
    jitter: float = 0.2
    retry_on: tuple[type[Exception], ...] = ()
    refuse_on: tuple[type[Exception], ...] = ()
    _pauses: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.attempts, bool) or not isinstance(self.attempts, int) or not 1 <= self.attempts <= 1_000:
            raise ConfigurationError(f"Retry: attempts={self.attempts!r} has to be a whole number from 1 to 1000")
        if isinstance(self.jitter, bool) or not isinstance(self.jitter, int | float) or not 0 <= self.jitter <= 1:
            raise ConfigurationError(f"Retry: jitter={self.jitter!r} has to be a number from 0 to 1")
        if isinstance(self.delays, str) or not isinstance(self.delays, Sequence) or not self.delays:
            raise ConfigurationError(f"Retry: delays={self.delays!r} has to be a list of durations, such as ('1s', '30s')")
        for name, rules in (("retry_on", self.retry_on), ("refuse_on", self.refuse_on)):
            if not isinstance(rules, tuple | list):
                raise ConfigurationError(f"Retry: {name}={rules!r} has to be a tuple of exceptions, such as (OSError,)")
        for rule in (*self.retry_on, *self.refuse_on):
            if not (isinstance(rule, type) and issubclass(rule, Exception)):
                raise ConfigurationError(f"Retry: {rule!r} is not an exception class")
        if both := set(self.retry_on) & set(self.refuse_on):
            raise ConfigurationError(f"Retry: retry_on and refuse_on both name {both.pop().__name__}")
        object.__setattr__(self, "_pauses", tuple(seconds(delay, "Retry: delays") for delay in self.delays))

    @property
    def longest(self) -> float:
        """Seconds after which the last run begins, at most, without the runs themselves."""
        pauses = self._pauses[: self.attempts - 1]
        return (sum(pauses) + self._pauses[-1] * (self.attempts - 1 - len(pauses))) * (1 + self.jitter)

    def pause(self, attempt: int) -> float:
        """Return the seconds to wait after a failed run; the first one is attempt 1."""
        pause = self._pauses[min(attempt, len(self._pauses)) - 1]
        return pause * (1 + self.jitter * random.uniform(-1, 1))

    def retries(self, error: BaseException) -> bool:
        """Return whether a failure runs again."""
        for ancestor in type(error).__mro__:  # from the class to its bases, so the nearest rule decides
            if ancestor in self.refuse_on:
                return False
            if ancestor in self.retry_on:
                return True
        return not self.retry_on


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Retries without deduplication: the handler runs on every delivery.

    Attributes:
        retry: How often a failing message runs.
        timeout: Longest run of the handler; a longer one is rolled back, and counts as a failure. None sets no limit. An `async def`
            handler is cancelled then; of a plain one, the server ends statements and idle transactions that last for longer.

    Raises:
        ConfigurationError: An option is invalid.

    Example:
        >>> Policy(retry=Retry(attempts=3), timeout="30s").retry.attempts
        3
    """

    retry: Retry = field(default_factory=Retry)
    timeout: Duration | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.retry, Retry):
            raise ConfigurationError(f"{type(self).__name__}: retry={self.retry!r} has to be Retry(…)")
        if self.timeout is not None and not seconds(self.timeout, f"{type(self).__name__}: timeout"):
            raise ConfigurationError(f"{type(self).__name__}: timeout has to be longer than 0")


@dataclass(frozen=True, kw_only=True)
class Previous:
    """Former identity of a message type. Its messages are claimed under the former and the present identity.

    Attributes:
        key: Former key; by default the present one.
        type: Former type name; messages of this type are handled, too. By default the present one.
        consumer: Former name of the consumer; by default the present one.

    Raises:
        ConfigurationError: No option is given, or one is invalid.

    Example:
        >>> Idempotent(key="order.id", previous=Previous(key="order_id")).previous.key
        'order_id'
    """

    key: Key | str | tuple[str, ...] | None = None
    type: str | None = None
    consumer: str | None = None

    def __post_init__(self) -> None:
        if self.key is None and self.type is None and self.consumer is None:
            raise ConfigurationError("Previous: name the change: key, type or consumer")
        if self.key is not None:
            Key.of(self.key)
        for name in ("type", "consumer"):
            if (value := getattr(self, name)) is not None:
                check_text(value, f"Previous: {name}")


@dataclass(frozen=True, kw_only=True)
class Idempotent(Policy):
    """Opted in: messages are claimed, and their outputs are stored with the claim.

    Attributes:
        key: The place of the id in a message; see `Key`.
        fingerprint: `"body"` compares the payload of a redelivery with the first one's; `"none"` compares nothing.
        on_conflict: Fate of another payload under a known id: it becomes a dead letter (`"park"`), or is skipped
            like a duplicate (`"skip"`).
        retention: Time for which claims and outputs are kept, and redeliveries are recognized.
        late: Fate of a message older than deleted claims: it becomes a dead letter (`"park"`), or runs (`"handle"`).
        redispatch: `"pending"` sends outputs that the broker has not confirmed; `"always"` sends confirmed outputs again, too.
        batch: Maximum number of messages that share a transaction. One that fails is taken out and runs alone.
        previous: Former identity, if key, type or consumer were changed within the retention; `"none"` says that a new type
            is not a former one under another name.

    Raises:
        ConfigurationError: An option is invalid.

    Example:
        >>> Idempotent(key="order_id").key
        'order_id'
        >>> Idempotent(redispatch="never")
        Traceback (most recent call last):
        idemp.errors.ConfigurationError: Idempotent: redispatch='never' has to be one of 'pending', 'always'
    """

    key: Key | str | tuple[str, ...] = Key("message_id")
    fingerprint: Literal["body", "none"] = "body"
    on_conflict: Literal["park", "skip"] = "park"
    redispatch: Literal["pending", "always"] = "pending"
    retention: Duration = "7d"
    late: Literal["park", "handle"] = "park"
    batch: int = 1
    previous: Previous | Literal["none"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        Key.of(self.key)
        if isinstance(self.batch, bool) or not isinstance(self.batch, int) or not 1 <= self.batch <= 1_000:
            raise ConfigurationError(f"Idempotent: batch={self.batch!r} has to be a whole number from 1 to 1000")
        if not isinstance(self.previous, Previous) and self.previous not in (None, "none"):
            raise ConfigurationError(f"Idempotent: previous={self.previous!r} has to be Previous(…) or 'none'")
        choices = {"fingerprint": ("body", "none"), "on_conflict": ("park", "skip"), "redispatch": ("pending", "always")}
        choices["late"] = ("park", "handle")
        if not seconds(self.retention, "Idempotent: retention"):
            raise ConfigurationError("Idempotent: retention has to be longer than 0")
        for name, allowed in choices.items():
            if (value := getattr(self, name)) not in allowed:
                raise ConfigurationError(f"Idempotent: {name}={value!r} has to be one of {', '.join(map(repr, allowed))}")


def configured(policy: Policy, options: Mapping[str, Any], type: str) -> Policy:
    """Return a policy with options that a file, the environment or the command line gives for a message type.

    Args:
        policy: The policy in the code.
        options: Those of `Idempotent`, each replaced as a whole. `key` is a field, a list of fields, or one of
            `{header = "x-id"}`, `{digest = true}`, `{message_id = true}`; `retry` takes `attempts`, `delays` and `jitter`;
            `idempotent = false` opts out, regardless of the other options.
        type: The message type, for texts of errors.

    Raises:
        ConfigurationError: An option is unknown or invalid.

    Example:
        >>> configured(Policy(), {"key": "order_id", "retry": {"attempts": 3}}, "shop.Pay").retry.attempts
        3
        >>> configured(Policy(), {"bach": 10}, "shop.Pay")
        Traceback (most recent call last):
        idemp.errors.ConfigurationError: messages of type 'shop.Pay': bach is not an option: did you mean batch?
    """
    where = f"messages of type {type!r}"
    given = dict(options)
    names = [*(option.name for option in fields(Idempotent)), "idempotent"]
    for name in given:
        if name not in names:
            nearest = get_close_matches(name, names, 1)
            meant = f"did you mean {nearest[0]}?" if nearest else f"there are {', '.join(names)}"
            raise ConfigurationError(f"{where}: {name} is not an option: {meant}")
    opted_in = given.pop("idempotent", isinstance(policy, Idempotent) or bool(set(given) - {"retry", "timeout"}))
    if not isinstance(opted_in, bool):
        raise ConfigurationError(f"{where}: idempotent={opted_in!r} has to be true or false")
    try:
        if "retry" in given:
            if not isinstance(given["retry"], Mapping) or set(given["retry"]) - {"attempts", "delays", "jitter"}:
                raise ConfigurationError(f"retry={given['retry']!r} has to be a table of attempts, delays and jitter")
            given["retry"] = replace(policy.retry, **given["retry"])
        if "key" in given:
            given["key"] = _configured_key(given["key"])
        if isinstance(previous := given.get("previous"), Mapping):
            key = {"key": _configured_key(previous["key"])} if "key" in previous else {}
            given["previous"] = Previous(**{**previous, **key})
        if opted_in:
            opted = policy if isinstance(policy, Idempotent) else Idempotent(retry=policy.retry, timeout=policy.timeout)
            return replace(opted, **given)
        return Policy(retry=given.get("retry", policy.retry), timeout=given.get("timeout", policy.timeout))
    except (TypeError, ValueError) as error:  # TypeError: an unknown option of `Previous`
        raise ConfigurationError(f"{where}: {error}") from None


def _configured_key(value: Any) -> Key | str | tuple[str, ...]:
    if isinstance(value, Mapping):
        match dict(value):
            case {"header": str(name), **others} if not others:
                return Key.header(name)
            case {"digest": True, **others} if not others:
                return Key.digest()
            case {"message_id": True, **others} if not others:
                return Key.message_id()
        known = "{header = 'x-id'}, {digest = true} or {message_id = true}"
        raise ConfigurationError(f"key={dict(value)!r} is not a key: write a field, a list of fields, {known}")
    return tuple(value) if isinstance(value, list) else value
