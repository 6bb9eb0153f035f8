"""Prepared messages as one writes them at first, with the failures that services of this kind had. For tests only.

Each failure is marked with its number; `tests/prepared/test_known_failures.py` shows that every one breaks a promise.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

from idemp.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import datetime, timedelta

    from tests.prepared.test_known_failures import World

TRIES = 3


@dataclass
class Half:
    """A message that waits."""

    id: UUID
    key: str
    prepared_at: datetime
    state: str = "prepared"
    checks: int = 0


class NaiveMessages:
    """The naive service: a table of halves, a check of the business store."""

    def __init__(self, world: World, *, check_after: timedelta, max_checks: int) -> None:
        self.world = world
        self.check_after = check_after
        self.max_checks = max_checks
        self.halves: dict[UUID, Half] = {}

    def submit(self, key: str, work: Callable[[], None], after: Callable[[], None]) -> None:
        half = self.prepare(key)
        try:
            with self.local_work(half):
                work()
            after()
        except Exception:
            self.rollback(half)  # 3: the exception may have come after the local commit
            raise
        self.commit(half)

    def prepare(self, key: str) -> Half:
        half = Half(uuid4(), key, self.world.producers_clock.now())
        self.halves[half.id] = half
        return half

    @contextmanager
    def local_work(self, half: Half) -> Iterator[None]:
        yield
        self.world.business.add(half.key)

    def commit(self, half: Half) -> None:
        for _ in range(TRIES):
            with suppress(StoreUnavailable):
                return self._commit(half)
        return None  # 1: swallowed after three tries

    def _commit(self, half: Half) -> None:
        self.world.fail_if_away()
        if half.id not in self.halves:
            return  # 2: "does not exist" is taken for success
        half.state = "committed"  # 6: whatever it was before
        self.world.published.append(str(uuid4()))  # 5: stored anew as the real message, each time
        self.world.keys.append(half.key)

    def rollback(self, half: Half) -> None:
        half.state = "rolled back"

    def check(self) -> None:
        now = self.world.checkers_clock.now()
        for half in list(self.halves.values()):
            if half.state != "prepared" or now - half.prepared_at < self.check_after:  # 8: two clocks
                continue
            half.checks += 1  # 7: counted before anybody was asked
            if half.checks > self.max_checks:
                del self.halves[half.id]  # dropped
                continue
            with suppress(StoreUnavailable):
                self.world.fail_if_unasked()
                # 4: work in flight is taken for work that never was
                (self.commit if half.key in self.world.business else self.rollback)(half)

    def forged(self) -> Any:
        """A half that nobody prepared."""
        return Half(uuid4(), "forged", self.world.producers_clock.now())
