"""When a failed handling runs again: which exceptions, after which pauses."""

from __future__ import annotations

import builtins
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from importlib import import_module
from typing import Final

from idemp.durations import DurationLike, parse_duration
from idemp.showing import ancestors_of, described

DelaysLike = DurationLike | Sequence[DurationLike] | Mapping[str, DurationLike]
ExceptionLike = type[Exception] | str

MAX_DELAYS: Final = 32
LONGEST_DELAY: Final = timedelta(days=30)
JITTER_STEPS: Final = 4
"""Into how many delays one is spread: each is a queue on brokers that wait by queue, so they must be few."""


def exponential(
    first: DurationLike = "1s", *, factor: float = 2.0, longest: DurationLike = "10m"
) -> tuple[timedelta, ...]:
    """Pauses that grow by a factor up to the longest one, which repeats.

    Args:
        first: the first pause.
        factor: how much longer each is than the one before; more than 1.
        longest: where they stop to grow.

    Raises:
        ValueError: no duration, a factor that does not grow, or more than 32 different pauses.

    Example:
        >>> [delay.total_seconds() for delay in exponential("1s", factor=3, longest="20s")]
        [1.0, 3.0, 9.0, 20.0]
    """
    delay, limit = parse_duration(first), parse_duration(longest)
    if not 1 < factor < math.inf or delay <= timedelta(0):
        raise ValueError("exponential delays need a first one above 0 and a finite factor above 1")
    delays: list[timedelta] = []
    while delay < limit and len(delays) <= MAX_DELAYS:
        delays.append(delay)
        delay = delay * factor if factor < limit / delay else limit
    return parse_delays([*delays, limit])


def parse_delays(value: object) -> tuple[timedelta, ...]:
    """Pauses from one duration, a list of them, or `{first, factor, longest}` for exponential ones.

    Raises:
        ValueError: they are none.

    Example:
        >>> parse_delays("5s") == parse_delays(["5s"]) == (timedelta(seconds=5),)
        True
        >>> parse_delays({"first": "1s", "longest": "2s"}) == parse_delays(["1s", "2s"])
        True
    """
    if isinstance(value, Mapping):
        unknown = sorted(set(value) - {"first", "factor", "longest"})
        if unknown:
            raise ValueError(f"exponential delays have first, factor and longest, not {', '.join(map(repr, unknown))}")
        return exponential(**{**value, "factor": float(value.get("factor", 2))})
    items = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    delays = tuple(parse_duration(item) for item in items)
    if not 1 <= len(delays) <= MAX_DELAYS:
        raise ValueError(f"there have to be 1 to {MAX_DELAYS} delays")
    if min(delays) < timedelta(0) or max(delays) > LONGEST_DELAY:
        raise ValueError(f"delays can't be negative, nor longer than {LONGEST_DELAY.days} days")
    return delays


def spread(delay: timedelta, jitter: float) -> tuple[timedelta, ...]:
    """The delays that one becomes by jitter: evenly from `1 - jitter` to `1 + jitter` times as long.

    Example:
        >>> [each.total_seconds() for each in spread(timedelta(seconds=10), 0.3)]
        [7.0, 9.0, 11.0, 13.0]
        >>> spread(timedelta(seconds=10), 0) == (timedelta(seconds=10),)
        True
    """
    if not jitter:
        return (delay,)
    last = JITTER_STEPS - 1
    return tuple(delay * (1 - jitter + 2 * jitter * step / last) for step in range(JITTER_STEPS))


def parse_exceptions(value: object) -> tuple[type[Exception], ...]:
    """Exception classes from one or several classes or names such as `ValueError` or `shop.errors.SoldOut`.

    Raises:
        ValueError: there is no such class, or it is no exception.

    Example:
        >>> parse_exceptions(["KeyError", "json.JSONDecodeError", TimeoutError])
        (<class 'KeyError'>, <class 'json.decoder.JSONDecodeError'>, <class 'TimeoutError'>)
    """
    items = value if isinstance(value, Iterable) and not isinstance(value, str) else [value]
    return tuple(_exception(item) for item in items)


def retries(error: BaseException, retry_on: Sequence[type[Exception]], refuse_on: Sequence[type[Exception]]) -> bool:
    """Whether a failure runs again: the nearest ancestor of the exception's class that a rule names decides.

    Without a rule for it, it does, unless `retry_on` names others.

    Example:
        >>> retries(FileNotFoundError(), [OSError], [FileNotFoundError]), retries(OSError(), [OSError], [])
        (False, True)
        >>> retries(KeyError(), [OSError], []), retries(KeyError(), [], [OSError])
        (False, True)
    """
    return refusing_rule(error, retry_on, refuse_on) is None


def refusing_rule(
    error: BaseException, retry_on: Sequence[type[Exception]], refuse_on: Sequence[type[Exception]]
) -> str | None:
    """The rule by which a failure does not run again, in words; `None` if it does.

    Example:
        >>> refusing_rule(FileNotFoundError(), [], [OSError]), refusing_rule(KeyError(), [OSError], [])
        ('refuse_on names OSError', 'retry_on names others')
    """
    for ancestor in ancestors_of(error):
        if any(ancestor is each for each in refuse_on):
            return f"refuse_on names {ancestor.__name__}"
        if any(ancestor is each for each in retry_on):
            return None
    return "retry_on names others" if retry_on else None


def _exception(item: object) -> type[Exception]:
    found = _named(item) if isinstance(item, str) else item
    if isinstance(found, type) and issubclass(found, Exception):
        return found
    raise ValueError(f"{item!r} is no exception class; write ValueError or package.module.Class")


def _named(name: str) -> object:
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(import_module(module) if module else builtins, attribute, None)
    except (Exception, SystemExit) as error:  # whatever the module does when it is imported
        raise ValueError(f"{name!r} can't be imported: {described(error)}") from error
