"""Each case of `StoreConformance` can fail: a store with that very fault is noticed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

from idemp.testing.clock import FakeClock
from idemp.testing.store_bench import MemoryEffects
from idemp.testing.store_conformance import CoreStoreConformance, StoreConformance
from tests.testing.mutants import Mutant, cases_of, failure
from tests.testing.store_mutants import TABLE, Store, upkeep

pytestmark = pytest.mark.slow


class Sound(StoreConformance):
    """How another instance is opened, and how COMMIT fails."""

    def reopen(self, store: Any) -> Any:
        return store.reopened()

    def failing_commits(self, store: Any) -> AbstractContextManager[object]:
        made: AbstractContextManager[object] = store.without_disk()
        return made


class Quick(Sound):
    """A mutant shows itself soon."""

    patience = 1.5
    quiet = 1.0


class Core(CoreStoreConformance):
    outlives_process = False


class Passing(StoreConformance):
    outlives_process = False


class PassingStore(upkeep.WindowsByTheClock, upkeep.IdentitiesIgnored):
    """Nothing of it outlives the process, so it neither knows standstills nor former keys."""


class WithoutUpkeep(Store):
    """It does what the protocol asks for, and no more."""

    @property
    def upkeep(self) -> Any:
        raise AttributeError("This store has no upkeep.")


def fails(suite: CoreStoreConformance, case: str, made: Callable[[FakeClock], Any]) -> BaseException | None:
    @contextmanager
    def fixtures() -> Iterator[Mapping[str, Any]]:
        clock = FakeClock()
        store = made(clock)
        yield {"store": store, "bench": suite.make_bench(store, MemoryEffects(store), clock)}

    return failure(suite, case, fixtures)


@pytest.mark.parametrize("mutant", TABLE.mutants, ids=str)
def test_mutant_is_noticed(mutant: Mutant) -> None:
    assert fails(Quick(), mutant.case, mutant.made), f"{mutant.case} does not notice: {mutant.breaks}"


@pytest.mark.parametrize("case", sorted(cases_of(StoreConformance)))
@pytest.mark.parametrize(("suite", "made"), [(Sound, Store), (Passing, PassingStore)])
def test_sound_store_passes(suite: type[StoreConformance], made: Callable[[FakeClock], Any], case: str) -> None:
    """The same way of calling: it is the fault that is noticed."""
    assert fails(suite(), case, made) is None


@pytest.mark.parametrize("case", sorted(cases_of(CoreStoreConformance)))
def test_core_asks_for_no_upkeep(case: str) -> None:
    assert fails(Core(), case, WithoutUpkeep) is None


def test_what_outlives_its_process_is_opened_again() -> None:
    """A suite that says so has to say how, else nothing would be known of it."""
    told = fails(StoreConformance(), "test_another_instance_sees_what_was_committed", Store)
    assert "method reopen(self, store)" in str(told)
    assert "outlives_process = False" in str(told)


def test_each_case_has_a_mutant() -> None:
    assert TABLE.cases == cases_of(StoreConformance)
