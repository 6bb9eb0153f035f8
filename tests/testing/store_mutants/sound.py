"""A sound store that the mutants differ from in one thing, and their table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from typing import Any, NoReturn
from uuid import UUID

from idemp.clock import Clock
from idemp.errors import StoreUnavailable
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

    def reopened(self) -> Store:
        """Another instance on the same data and locks, as another client of one server."""
        return copy(self)

    @contextmanager
    def without_disk(self) -> Iterator[None]:
        """Nothing can be written or read."""
        kept = self.content.handlings
        self.content.handlings = NoDisk(kept)
        try:
            yield
        finally:
            self.content.handlings = kept


class NoDisk(dict[tuple[str, UUID], Handling]):
    """Claims and outputs where neither can be written or read."""

    def update(self, *arguments: Any, **values: Any) -> NoReturn:
        raise StoreUnavailable("no space left on device")

    def get(self, *arguments: Any) -> NoReturn:
        raise StoreUnavailable("input/output error")


def changed_message(outputs: Sequence[Output], **changes: Any) -> list[Output]:
    return [replace(output, message=replace(output.message, **changes)) for output in outputs]


class _AnyName(tuple[str, ...]):
    __slots__ = ()

    def __contains__(self, name: object) -> bool:
        return True


def of_any_type(claim: Claim) -> Claim:
    """The claim, for which all types are one."""
    return replace(claim, aliases=_AnyName())
