"""Initiations: effects and outputs in one transaction, once per id, for code that no message started."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import pytest

from idemp import (
    AlreadyHandled,
    Initiation,
    Outcome,
)
from idemp.errors import IdInFlight, InvalidId, OutputError
from idemp.testing.faulty import CommitFault
from idemp.testing.store_bench import Background
from tests.house import House, memory_house, sql_house


@pytest.fixture(params=["memory", "sqlite"])
def house(request: pytest.FixtureRequest) -> Iterator[House]:
    if request.param == "memory":
        yield memory_house()
        return
    with sql_house() as made:
        yield made


@dataclass
class Placed:
    __message_type__ = "shop.Placed"

    order_id: int


class TestInitiations:
    def initiate(self, house: House, id: str | None = None) -> Initiation:
        with house.app.initiate(id=id) as unit:
            house.effects.write(unit, "sale")  # type: ignore[arg-type]
            unit.send({"n": 1}, to="stock", type="stock.Reserve")
            unit.publish(Placed(1), mandatory=False)
        return unit

    def test_effect_and_outputs_in_one(self, house: House) -> None:
        unit = self.initiate(house, "request-1")
        assert (house.sales(), house.pending(), house.sent()) == (1, 2, [])
        assert house.relay().confirmed == 2
        assert [output.id for output in house.publisher.sent] == [output.id for output in unit.outputs]
        assert house.publisher.sent[0].message.causation_id == "request-1"

    def test_once_per_id(self, house: House) -> None:
        unit = self.initiate(house, "request-1")
        with pytest.raises(AlreadyHandled, match="request-1") as raised:
            self.initiate(house, "request-1")
        assert (house.sales(), raised.value.outputs) == (1, unit.outputs)

    @pytest.mark.parametrize("id_", ["", " ", "\t\n", 5, True, 1.5, b"request", ("a", "b"), [], UUID(int=7)])
    def test_ids_are_texts_that_say_something(self, house: House, id_: Any) -> None:
        """A request without its id would be the same initiation as all others without theirs."""
        with pytest.raises(InvalidId, match=r"initiation"):
            self.initiate(house, id_)
        with pytest.raises(InvalidId, match=r"initiation"):
            house.app.run_once(id_, lambda unit: house.effects.write(unit, "sale"))  # type: ignore[arg-type]
        assert house.sales() == 0

    def test_once_needs_an_id(self, house: House) -> None:
        with pytest.raises(InvalidId, match=r"initiation"):
            house.app.run_once(None, lambda unit: house.effects.write(unit, "sale"))  # type: ignore[arg-type]
        assert house.sales() == 0

    def test_without_an_id_each_one_counts(self, house: House) -> None:
        first, second = self.initiate(house), self.initiate(house)
        assert (house.sales(), first.id != second.id) == (2, True)
        assert len({output.id for output in (*first.outputs, *second.outputs)}) == 4

    def test_id_of_an_initiation_is_no_message_id(self, house: House) -> None:
        house.sells()
        self.initiate(house, "sale-1")
        assert house.deliver() is Outcome.HANDLED

    def test_error_rolls_back(self, house: House) -> None:
        def failing() -> None:
            with house.app.initiate(id="request-1") as unit:
                house.effects.write(unit, "sale")  # type: ignore[arg-type]
                unit.send({}, to="stock", type="stock.Reserve")
                raise ValueError("no")

        with pytest.raises(ValueError, match="no"):
            failing()
        assert (house.sales(), house.pending()) == (0, 0)
        self.initiate(house, "request-1")

    @pytest.mark.parametrize(("fault", "committed"), [("lost, committed", 1), ("lost, not committed", 0)])
    def test_lost_answer_says_so(self, house: House, fault: CommitFault, committed: int) -> None:
        house.script.commit_faults = [fault]
        with pytest.raises(Exception, match="unknown") as raised:
            self.initiate(house, "request-1")
        assert raised.value.committed == "unknown"  # type: ignore[attr-defined]
        assert house.sales() == committed

    def test_run_once(self, house: House) -> None:
        runs: list[str] = []

        def function(unit: Initiation) -> None:
            runs.append(unit.id)
            unit.send({}, to="stock", type="stock.Reserve")

        first, second = (house.app.run_once("request-1", function) for _ in range(2))
        assert (first, runs) == (second, ["request-1"])
        assert len(first) == 1

    def test_in_flight(self) -> None:
        house = memory_house()

        def inner() -> None:
            with house.app.initiate(id="request-1"):
                pass

        with house.app.initiate(id="request-1"), pytest.raises(IdInFlight):
            Background(inner).result(30)

    def test_output_after_the_block(self, house: House) -> None:
        unit = self.initiate(house)
        with pytest.raises(OutputError, match="after its handling had ended"):
            unit.send({}, to="stock", type="stock.Reserve")
