"""Each kind of inbox in turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.house import House, memory_house, sql_house

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(params=["memory", "sqlite"])
def house(request: pytest.FixtureRequest) -> Iterator[House]:
    """A service without handlers yet."""
    if request.param == "memory":
        yield memory_house()
        return
    with sql_house() as made:
        yield made
