"""What the cases of the store port share: fixtures, and what a store can say about itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar
from uuid import uuid4

import pytest

from idemp.testing.clock import FakeClock
from idemp.testing.store_bench import MESSAGE_TYPE, Bench, Effects, NoEffects

if TYPE_CHECKING:
    from idemp.inbox.port import InboxStore


class StoreSuite:
    """Fixtures and options. A subclass gives the fixture `store`."""

    one_writer: ClassVar[bool] = False
    asks_again: ClassVar[bool] = False
    outlives_process: ClassVar[bool] = True
    patience: ClassVar[float] = 30.0
    quiet: ClassVar[float] = 0.1

    @pytest.fixture
    def clock(self) -> FakeClock:
        """The store's time."""
        return FakeClock()

    @pytest.fixture
    def effects(self) -> Effects:
        """Nothing is known about effects."""
        return NoEffects()

    @pytest.fixture
    def bench(self, store: InboxStore, effects: Effects, clock: FakeClock) -> Bench:
        """The store, with a consumer that nobody else uses."""
        return self.make_bench(store, effects, clock)

    def make_bench(self, store: InboxStore, effects: Effects, clock: FakeClock) -> Bench:
        """The same without fixtures."""
        consumer = f"conformance-{uuid4().hex[:12]}"
        store.prepare(consumer, [MESSAGE_TYPE])
        return Bench(store, effects, clock, consumer, self.asks_again, self.patience, self.quiet)
