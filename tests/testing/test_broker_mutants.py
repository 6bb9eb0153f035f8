"""Each case of `BrokerConformance` can fail: a broker with that very fault is noticed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from idemp.broker.memory import InMemoryBroker
from idemp.errors import BrokerError
from idemp.testing.broker_conformance import BrokerConformance
from tests.testing.broker_mutants import TABLE, Broker, Modest
from tests.testing.mutants import Mutant, cases_of, failure

pytestmark = pytest.mark.slow


class Sound(BrokerConformance):
    quiet = 0.1
    delay = 0.1

    def reopen(self, broker: Any) -> Any:
        return broker.reopened()


class Quick(Sound):
    """A mutant shows itself soon."""

    patience = 0.6
    delay = 0.3


class Declared(Sound):
    largest_body = Modest.largest
    tells_redelivered = False


def fails(suite: BrokerConformance, case: str, made: type[InMemoryBroker]) -> BaseException | None:
    @contextmanager
    def fixtures() -> Iterator[Mapping[str, Any]]:
        broker = made()
        bench = suite.make_bench(broker, "mutants")
        with suppress(BrokerError), bench:  # of some mutants nothing can be closed
            yield {"broker": broker, "bench": bench}

    return failure(suite, case, fixtures)


@pytest.mark.parametrize("mutant", TABLE.mutants, ids=str)
def test_mutant_is_noticed(mutant: Mutant) -> None:
    assert fails(Quick(), mutant.case, mutant.made), f"{mutant.case} does not notice: {mutant.breaks}"


@pytest.mark.parametrize("case", sorted(cases_of(BrokerConformance)))
def test_sound_broker_passes(case: str) -> None:
    """The same way of calling: it is the fault that is noticed."""
    assert fails(Sound(), case, Broker) is None


@pytest.mark.parametrize("case", ["test_large_body", "test_unsettled_returns_after_close"])
def test_limits_are_declared(case: str) -> None:
    """What a transport can't do it says, else it is a fault."""
    assert fails(Declared(), case, Modest) is None
    assert fails(Sound(), case, Modest) is not None


def test_what_outlives_its_process_is_opened_again() -> None:
    """A suite that says so has to say how, else nothing would be known of it."""
    told = fails(BrokerConformance(), "test_reopened_has_its_topology", Broker)
    assert "method reopen(self, broker)" in str(told)
    assert "outlives_process = False" in str(told)


def test_each_case_has_a_mutant() -> None:
    assert TABLE.cases == cases_of(BrokerConformance)
