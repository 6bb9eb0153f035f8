"""Two sound stores that the mutants differ from in one thing, and their table."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from types import TracebackType
from typing import Any

from idemp.clock import Clock
from idemp.errors import TransientStoreError
from idemp.inbox.memory import InMemoryStore, MemoryUnit
from idemp.inbox.port import Claim, Claimed, Verdict
from idemp.inbox.small import Content, Handling, PlainUnit, SmallStore
from idemp.messages import Output
from tests.testing.mutants import Table

TABLE = Table()
breaks = TABLE.breaks


class Store(InMemoryStore):
    """Sound; the mutants differ from it in one thing."""

    unit: type[MemoryUnit] = MemoryUnit

    def begin(self, claims: Sequence[Claim] = (), *, late: bool = False) -> MemoryUnit:
        return self.unit(self)


class LastingUnit(PlainUnit):
    def __init__(self, store: LastingStore) -> None:
        self._store = store
        self._content = store.read()
        self.session = self.connection = self._content.data

    def claim(self, claim: Claim) -> Claimed:
        key = (claim.consumer, claim.id.key)
        if key in self._content.handlings:
            return self._content.handlings[key].answer(claim)
        self._content.handlings[key] = Handling(claim, self._store.clock.now())
        return Claimed(Verdict.CLAIMED)

    def store_outputs(self, claim: Claim, outputs: Sequence[Output], relay_after: timedelta) -> None:
        self._content.handlings[claim.consumer, claim.id.key].keep(outputs, relay_after)

    def commit(self) -> None:
        self._store.kept = pickle.dumps(self._content)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._store.writing.release()


class LastingStore(SmallStore):
    """Sound, too: one that keeps what could outlive the process, and lets one unit write at a time."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.kept = pickle.dumps(Content())
        self.writing = threading.Lock()

    def begin(self, claims: Sequence[Claim] = (), *, late: bool = False) -> LastingUnit:
        if not self.writing.acquire(timeout=max((claim.wait.total_seconds() for claim in claims), default=5)):
            raise TransientStoreError("Another unit of work is writing.")
        return LastingUnit(self)

    def read(self) -> Content:
        return pickle.loads(self.kept)

    @contextmanager
    def changing(self) -> Iterator[Content]:
        with self.begin() as unit:
            yield unit._content
            unit.commit()


def changed_message(outputs: Sequence[Output], **changes: Any) -> list[Output]:
    return [replace(output, message=replace(output.message, **changes)) for output in outputs]
