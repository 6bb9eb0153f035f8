"""Conditions of a run: the time, random values, and the number of the attempt."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import time_machine

__all__ = ["Conditions", "conditions"]

MOST: Final = 200  # extreme values; a loop that draws until one fits has to end
SMALL: Final = 64  # bits; larger draws are ids, not decisions


@dataclass(frozen=True)
class Conditions:
    """Equal conditions mean equal runs, unless a handler depends on something else.

    Attributes:
        at: The time that the clock shows, in seconds since 1970.
        seed: Of the random values.
        draws: `any` values, or the `lowest` or `highest` ones, so that each decision is taken both ways.
        attempt: As the context says it.

    Example:
        >>> with conditions(Conditions(seed=1)):
        ...     one = random.random(), os.urandom(4), time.time()
        >>> with conditions(Conditions(seed=1)):
        ...     one == (random.random(), os.urandom(4), time.time())
        False
        >>> with conditions(Conditions(seed=1, draws="lowest")):
        ...     random.random(), random.choice("abc")
        (0.0, 'a')
    """

    at: float = field(default_factory=time.time)
    seed: int = 0
    draws: Literal["any", "lowest", "highest"] = "any"
    attempt: int = 1


@contextmanager
def conditions(given: Conditions) -> Iterator[None]:
    """Stop the clock, and choose what `random`, `secrets`, `uuid` and `os.urandom` return.

    Generators in C that were imported by name, and those of other libraries, are not reached.

    Example:
        >>> with conditions(Conditions(at=0.0)):
        ...     time.time()
        0.0
    """
    shared: Any = random._inst  # noqa: SLF001 - what random.choice and its like draw from
    module, kept_urandom, state = vars(random), os.urandom, shared.getstate()
    kept = {name: module[name] for name in ("_urandom", "random", "getrandbits")}
    draws = _Draws(given)
    shared.seed(given.seed)
    os.urandom = module["_urandom"] = draws.octets
    if given.draws != "any":
        module["random"] = shared.random = draws.number
        module["getrandbits"] = shared.getrandbits = draws.integer
    try:
        with time_machine.travel(given.at, tick=False):
            yield
    finally:
        for name in ("random", "getrandbits"):
            vars(shared).pop(name, None)
        module.update(kept)
        os.urandom = kept_urandom
        shared.setstate(state)


class _Draws:
    def __init__(self, given: Conditions) -> None:
        self._values, self._draws, self._count = random.Random(given.seed), given.draws, 0

    def number(self) -> float:
        return self.integer(53) / (1 << 53)

    def integer(self, count: int) -> int:
        self._count += 1
        if self._draws == "any" or count > SMALL or self._count > MOST:
            return self._values.getrandbits(count)
        # random.choice draws again if a value is too high for it: half of the highest one fits.
        return 0 if self._draws == "lowest" else ((1 << count) - 1) >> (1 - self._count % 2)

    def octets(self, count: int) -> bytes:
        return self.integer(8 * count).to_bytes(count, "big")
