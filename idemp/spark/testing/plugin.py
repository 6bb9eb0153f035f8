"""Pytest fixtures for pipelines: `pytest_plugins = ("idemp.spark.testing.plugin",)` in your outermost conftest.py.

It loads Spark when the first test asks for the session, and not before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from idemp.spark.testing.sessions import local_session

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A session on this machine alone, one for all tests of the process: two cores, four attempts a task."""
    with local_session(tmp_path_factory.mktemp("spark")) as session:
        yield session
