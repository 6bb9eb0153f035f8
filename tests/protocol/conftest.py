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


@pytest.fixture(params=["memory", "sqlite", "postgresql", "mariadb"])
def any_house(request: pytest.FixtureRequest) -> Iterator[House]:
    """A service without handlers yet, on real servers, too."""
    if request.param == "memory":
        yield memory_house()
        return
    yield from _on_sql(request)


@pytest.fixture(params=["sqlite", "postgresql", "mariadb"])
def any_sql_house(request: pytest.FixtureRequest) -> Iterator[House]:
    """The same without the inbox in memory."""
    yield from _on_sql(request)


def _on_sql(request: pytest.FixtureRequest) -> Iterator[House]:
    url = "sqlite://" if request.param == "sqlite" else request.getfixturevalue(f"{request.param}_url")
    with sql_house(url) as made:
        yield made
