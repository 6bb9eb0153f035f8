"""What the cases of the store port share: fixtures, and what a store can say about itself."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar
from uuid import uuid4

import pytest

from idemp.inbox.port import Mark
from idemp.testing.clock import FakeClock
from idemp.testing.store_bench import MESSAGE_TYPE, Bench, Effects, NoEffects, make_outputs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from idemp.inbox.port import Claim, InboxStore


class StoreSuite:
    """Fixtures, hooks and options. A subclass gives the fixture `store`, and `reopen` where data outlives the process."""

    one_writer: ClassVar[bool] = False
    asks_again: ClassVar[bool] = False
    outlives_process: ClassVar[bool] = True
    waits: ClassVar[bool] = True
    purges_bare: ClassVar[bool] = True
    patience: ClassVar[float] = 30.0
    quiet: ClassVar[float] = 0.1
    shortest_wait: ClassVar[float] = 1.0
    largest_output: ClassVar[int] = 1024 * 1024

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

    def reopen(self, store: InboxStore) -> InboxStore:
        """Another instance on the data of `store`, on its clock, opened as another process opens it; both stay open."""
        if self.outlives_process:
            pytest.fail(
                f"Nothing shows that {type(store).__name__} outlives its process, as {type(self).__name__} says. Give the "
                "method reopen(self, store), which opens another instance on the same data, or set outlives_process = False."
            )
        return store

    def failing_commits(self, store: InboxStore) -> AbstractContextManager[object] | None:
        """Within its `with` block each COMMIT of `store` fails; `None` where that can't be brought about."""
        del store
        return None

    def handled(self, bench: Bench, claim: Claim) -> None:
        """A handling that the cleaner may take once it is past its window: nothing of it pends."""
        outputs = [] if self.purges_bare else make_outputs(1)
        bench.handle(claim, outputs)
        bench.store.record([Mark(claim, tuple(output.id for output in outputs))] if outputs else [])

    @contextmanager
    def another(self, bench: Bench) -> Iterator[Bench]:
        """The same consumer and data through another instance, which is closed at the end."""
        store = self.reopen(bench.store)
        store.prepare(bench.consumer, [MESSAGE_TYPE])
        try:
            yield replace(bench, store=store, effects=bench.effects_on(store))
        finally:
            if store is not bench.store:
                store.close()
