"""The two lanes of tests: the first has a test for every promise, the second is marked `slow` (see CONTRIBUTING.md)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

if TYPE_CHECKING:
    from collections.abc import Iterable

SPARK = "tests/spark/"
SLOW_LANE_SERVERS = frozenset({"activemq", "activemq_url", "own_activemq", "couchdb", "pouchdb"})
_WHOLLY_SLOW = re.compile(r"^pytestmark = \[?pytest\.mark\.slow\b", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The first lane does not import the modules of the second, for that takes time."""
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    if config.option.markexpr == "not slow" and is_test and _WHOLLY_SLOW.search(collection_path.read_text()):
        return True
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What needs a server that only the second lane installs belongs there."""
    for item in items:
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        asked = {*getattr(item, "fixturenames", ()), *(each for each in parameters if isinstance(each, str))}
        if asked & SLOW_LANE_SERVERS:
            item.add_marker("slow")


class SparkTogether(LoadFileScheduling):
    """One process has all tests of Spark: for so few of them, each further session costs more time than it saves."""

    def _split_scope(self, nodeid: str) -> str:
        return SPARK if nodeid.startswith(SPARK) else super()._split_scope(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    """In the first lane; in the second, Spark has work for all."""
    return SparkTogether(config, log) if config.option.markexpr == "not slow" else None


def mostly_slow(values: Iterable[Any], first: int = 1) -> list[Any]:
    """Cases for `pytest.mark.parametrize`: the first lane runs the first few. A tuple is one of several arguments."""
    cases = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*case, marks=pytest.mark.slow if n >= first else ()) for n, case in enumerate(cases)]
