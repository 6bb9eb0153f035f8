"""From the blocks of a run to figures: paired ratios with quartiles, and a bound that luck alone would not pass."""

from __future__ import annotations

import random
import statistics
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

RESAMPLES: Final = 2000
CONFIDENCE: Final = 0.95


def paired(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Ratios of what was measured in the same rounds.

    Example:
        >>> paired([2.0, 9.0], [1.0, 3.0])
        [2.0, 3.0]
    """
    return [one / other for one, other in zip(above, below, strict=True)]


def bounds(values: Sequence[float]) -> tuple[float, float]:
    """Between which the median lies: each bound is on the right side with 95 per cent, by a bootstrap of the rounds.

    Example:
        >>> bounds([1.0] * 9)
        (1.0, 1.0)
    """
    dice = random.Random(1)  # the same blocks, the same bounds
    medians = sorted(statistics.median(dice.choices(values, k=len(values))) for _ in range(RESAMPLES))
    cut = round(RESAMPLES * (1 - CONFIDENCE))
    return medians[cut], medians[-cut - 1]


def spread(values: Sequence[float], digits: int = 3) -> dict[str, float]:
    """Median, quartiles and bounds.

    Example:
        >>> spread([1.0, 2.0, 3.0])["median"]
        2.0
    """
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    lower, upper = bounds(values)
    found = {
        "median": middle,
        "lower_quartile": low,
        "upper_quartile": high,
        "lower_bound": lower,
        "upper_bound": upper,
    }
    return {name: round(value, digits) for name, value in found.items()}


def machine() -> dict[str, Any]:
    """What the figures were measured on: no names of hosts, no paths."""
    import os
    import platform

    import psutil

    return {
        "cpus": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": platform.system(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
    }


def versions(*names: str) -> dict[str, str]:
    """Of the packages that took part, as far as they are installed."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in names or ("idemp", "sqlalchemy", "psycopg", "pymysql", "kombu", "amqp", "redis", "pydantic"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
