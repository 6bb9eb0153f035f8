"""A sound store that the mutants differ from in one thing, and their table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from idemp.clock import Clock
from idemp.inbox.memory import InMemoryStore, MemoryUnit
from idemp.inbox.port import Claim, Claimed
from idemp.inbox.small import Content, Handling
from idemp.messages import Output
from tests.testing.mutants import Table

TABLE = Table()
breaks = TABLE.breaks


class Unit(MemoryUnit):
    """Leaves to the store what somebody learns whose id is taken."""

    _store: Store

    def claim(self, claim: Claim) -> Claimed:
        claimed = super().claim(claim)
        former = self._store.content.handlings.get((claim.consumer, claim.id.key))
        return claimed if former is None else self._store.found(former, claim)


class Store(InMemoryStore):
    """Sound; the mutants differ from it in one thing."""

    unit: type[MemoryUnit] = Unit
    contents: type[Content] = Content

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.content = self.contents()

    def begin(self, claims: Sequence[Claim] = (), *, late: bool = False) -> MemoryUnit:
        return self.unit(self)

    def found(self, former: Handling, claim: Claim) -> Claimed:
        return former.answer(claim)


def changed_message(outputs: Sequence[Output], **changes: Any) -> list[Output]:
    return [replace(output, message=replace(output.message, **changes)) for output in outputs]
