"""Time that stands still while a handler is rehearsed, but not for ever: one that waits for a deadline must get there."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import time_machine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime

_PATIENCE: Final = 2.0  # real seconds
_PACE: Final = 0.02
_FIRST_STEP: Final = timedelta(milliseconds=20)
_LONGEST_STEP: Final = timedelta(hours=1)


class StoppedClock:
    """Stops the time at a given moment. When a block takes long, time runs, faster and faster.

    A handler that had to be waited for once gets its time at once in later blocks.

    Example:
        >>> from datetime import UTC, datetime
        >>> clock, moment = StoppedClock(patience=0.01), datetime(2026, 1, 1, tzinfo=UTC)
        >>> with clock.at(moment):
        ...     print(datetime.now(UTC).isoformat())
        2026-01-01T00:00:00+00:00
        >>> with clock.at(moment):
        ...     while datetime.now(UTC) < moment + timedelta(hours=1):
        ...         pass
    """

    def __init__(self, *, patience: float = _PATIENCE) -> None:
        self._patience = patience

    @contextmanager
    def at(self, moment: datetime) -> Iterator[None]:
        """Stop it while the block runs."""
        ended = threading.Event()
        with time_machine.travel(moment, tick=False) as traveller:
            runner = threading.Thread(
                target=self._run, args=(traveller, ended), name="clock of a rehearsal", daemon=True
            )
            runner.start()
            try:
                yield
            finally:
                ended.set()
                runner.join()

    def _run(self, traveller: time_machine.Traveller, ended: threading.Event) -> None:
        step = _FIRST_STEP
        if ended.wait(self._patience):
            return
        self._patience = _PACE
        while not ended.wait(_PACE):
            traveller.shift(step)
            step = min(step * 2, _LONGEST_STEP)
