"""Random values chosen by the kit: what `random`, `secrets`, `uuid` and `os.urandom` return while a handler runs.

Under one choice two runs of a handler draw the same values, so that they differ for other reasons only. Under another choice
they draw other values. "low" and "high" drive every decision both ways: the first draw at each place in the code is the
lowest or highest value; draws after it vary, so that a loop which draws until a value fits comes to its end.

Not reached: functions written in C that were imported by name (`from os import urandom`), and other libraries' generators.
"""

from __future__ import annotations

import functools
import itertools
import os
import random
import sys
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

First = Literal["low", "high"]

_THROUGH: Final = {"random", "secrets", "uuid", __name__}
_DECISION_BITS: Final = 16
_FLOAT_BITS: Final = 53
_FLOAT_BYTES: Final = 7  # what random.SystemRandom.random() reads
_EXTREME: Final = 0.001
_FORCED: Final = (1, 2)  # draws at one place
_base: Any = random.Random.__mro__[1]
_shared: Any = random._inst  # noqa: SLF001 - what random.choice and its like draw from


class Chance:
    """One choice of random values.

    Args:
        seed: equal seeds choose equal values.
        first: what the first draw at each place in the code returns.

    Example:
        >>> with Chance("a").chosen():
        ...     one = random.random(), random.randrange(1000)
        >>> with Chance("a").chosen():
        ...     one == (random.random(), random.randrange(1000))
        True
        >>> with Chance("a", "low").chosen():
        ...     random.random() < 0.001
        True
    """

    def __init__(self, seed: str, first: First | None = None) -> None:
        self._first = first
        self._values = random.Random(seed)  # noqa: S311 - no secret
        self._draws: Counter[tuple[int, int]] = Counter()
        self._begun: Any = None

    @contextmanager
    def chosen(self) -> Iterator[None]:
        """Return the chosen values while the block runs; then everything is as it was before."""
        module, names = vars(random), ("_urandom", "random", "getrandbits")
        kept, system, seeding = {name: module[name] for name in names}, os.urandom, random.Random.seed
        state, numbers = _shared.getstate(), _numpy_state()
        chance = self

        def seed(generator: random.Random, a: Any = None, version: int = 2) -> None:
            seeding(generator, chance._seed() if a is None else a, version)

        generators: Any = random.Random
        generators.seed = seed
        _shared.seed()
        self._begun = _shared.getstate()
        os.urandom = module["_urandom"] = self._bytes
        module["random"] = _shared.random = self._float
        module["getrandbits"] = _shared.getrandbits = self._bits
        if numbers is not None:
            numbers[0].seed(self._values.getrandbits(32))
        try:
            yield
        finally:
            del _shared.random, _shared.getrandbits
            module.update(kept)
            os.urandom = system
            generators.seed = seeding
            _shared.setstate(state)
            if numbers is not None:
                numbers[0].set_state(numbers[1])

    def _seed(self) -> int:
        """A seed whose generator begins as `first` says."""
        return self._values.getrandbits(64) if self._first is None else _seed_of(self._first)

    def _seeded(self) -> bool:
        """Whether the handler itself seeded the shared generator, from its message for instance."""
        return bool(_shared.getstate() != self._begun)

    def _float(self) -> float:
        if self._seeded():
            return float(_base.random(_shared))
        draw = self._draw()
        return self._extreme(_FLOAT_BITS) / (1 << _FLOAT_BITS) if draw == 1 else self._values.random()

    def _bits(self, k: int) -> int:
        if self._seeded():
            return int(_base.getrandbits(_shared, k))
        draw = self._draw() if 0 < k <= _DECISION_BITS else 0
        return self._extreme(k, draw) if draw in _FORCED else self._values.getrandbits(k)

    def _bytes(self, n: int) -> bytes:
        draw = self._draw() if n == _FLOAT_BYTES or 0 < n * 8 <= _DECISION_BITS else 0
        return self._extreme(n * 8, draw).to_bytes(n, "big") if draw in _FORCED else self._values.randbytes(n)

    def _extreme(self, bits: int, draw: int = 1) -> int:
        """The lowest or highest value. `random.choice` draws again if that is too high for it: then half of that."""
        return 0 if self._first == "low" else ((1 << bits) - 1) >> (draw - 1)

    def _draw(self) -> int:
        """The number of this draw at its place in the code; 0 if nothing is forced."""
        if self._first is None:
            return 0
        frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the caller decides
        while frame is not None and frame.f_globals.get("__name__") in _THROUGH:
            frame = frame.f_back
        if frame is None:
            return 0
        place = (id(frame.f_code), frame.f_lasti)
        self._draws[place] += 1
        return self._draws[place]


@functools.cache
def _seed_of(first: First) -> int:
    for seed in itertools.count():
        value = random.Random(seed).random()  # noqa: S311
        if value < _EXTREME if first == "low" else value > 1 - _EXTREME:
            return seed
    raise AssertionError


def _numpy_state() -> tuple[Any, Any] | None:
    numbers: Any = sys.modules.get("numpy.random")
    return (numbers, numbers.get_state()) if numbers is not None and hasattr(numbers, "get_state") else None
