"""One Spark session for each process of tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from idemp.spark.testing.plugin import spark
from tests.spark.shop import Shop, shop_in

__all__ = ["shop", "spark"]


@pytest.fixture
def shop(postgresql_url: str) -> Iterator[Shop]:
    """The database of `tests.spark.shop`, empty."""
    with shop_in(postgresql_url) as made:
        yield made
