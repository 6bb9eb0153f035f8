"""A world whose other database is of each kind, for all tests of this folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.twophase.world import Consumer, World, world

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="package", params=("postgresql", "mariadb"))
def shop(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world(request, tmp_path_factory.mktemp("twophase"), "postgresql", ledger=request.param) as made:
        yield made


@pytest.fixture
def other(shop: World) -> Iterator[Consumer]:
    """Another process."""
    made = Consumer(shop.place)
    yield made
    made.close()
