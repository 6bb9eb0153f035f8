"""The pytest plugin in a project of a user's: nothing is configured there."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from idemp.testing import plugin
from idemp.testing.crash_points import CRASH_POINTS

pytestmark = pytest.mark.slow

pytest_plugins = ["pytester"]

HANDLERS = """
from sqlalchemy import Column, Integer, MetaData, Table, func, insert, select
from idemp import App, Idempotent
METADATA = MetaData()
SALE = Table("sale", METADATA, Column("id", Integer, primary_key=True))
app = App("orders")
@app.handler(dict, type="orders.Place", policy=Idempotent(key="id"))
def place(message, ctx):
    ctx.connection.execute(insert(SALE))
    ctx.send({"id": message["id"]}, to="stock", type="stock.Reserve")
def sales(harness):
    return harness.state(lambda session: session.scalar(select(func.count()).select_from(SALE)))
"""
RUN = ["-p", "no:cacheprovider", "-p", "no:randomly", "-n", "0", "-W", "error", "--strict-markers"]


def run(pytester: pytest.Pytester, tests: str, *more: str) -> pytest.RunResult:
    """As it would be where idemp is installed; here the entry point may be that of an older installation."""
    pytester.makepyfile(handlers=HANDLERS, test_it=f"from handlers import *\nimport pytest\n{tests}")
    known = plugin.__name__ in {type_.value for type_ in _installed()}
    return pytester.runpytest_subprocess(*RUN, *([] if known else ["-p", plugin.__name__]), *more)


def _installed() -> list[EntryPoint]:
    from importlib.metadata import entry_points

    return list(entry_points(group="pytest11"))


def test_entry_point_is_declared() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert project["project"]["entry-points"]["pytest11"] == {"idemp": plugin.__name__}


def test_marked_test_runs_at_every_crash_point(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
@pytest.mark.redelivery(app=app, tables=METADATA)
def test_place(harness, crash_point):
    harness.send({"id": 7}, type="orders.Place")
    step = harness.step()
    never = crash_point == "none" or "record" in crash_point or "claim and store" in crash_point
    assert step.died == (None if never else crash_point)
    harness.rest()
    assert sales(harness) == 1
    assert len({output.id for output in harness.publisher.sent}) == 1
""",
    )
    result.assert_outcomes(passed=len(CRASH_POINTS) + 1)


def test_some_crash_points_and_a_fixture_named_app(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
from handlers import app as shop
@pytest.fixture
def app():
    return shop
@pytest.mark.redelivery(crash_points=["after commit", "before settle"], tables=METADATA)
class TestPlace:
    def test_effect(self, harness):
        harness.send({"id": 7}, type="orders.Place")
        harness.rest()
        assert sales(harness) == 1
    def test_without_harness(self):
        pass
""",
        "-v",
    )
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(["*test_effect[[]after commit]*PASSED*", "*test_effect[[]before settle]*PASSED*"])


def test_fixtures(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
from datetime import timedelta
def test_clock(fake_clock):
    assert fake_clock.advance(timedelta(days=1)) == fake_clock.now()
def test_harness(redelivery_harness):
    one, other = redelivery_harness(app, tables=METADATA), redelivery_harness(app, tables=METADATA)
    one.send({"id": 7}, type="orders.Place")
    one.rest()
    assert (sales(one), sales(other)) == (1, 0)
""",
    )
    result.assert_outcomes(passed=2)


def test_mistakes_are_named(pytester: pytest.Pytester) -> None:
    """Each in a module of its own: such a mistake ends the collection of its module."""
    pytester.makepyfile(
        test_unused="""
import pytest
@pytest.mark.redelivery(app=None)
def test_place():
    pass
""",
        test_none="""
import pytest
@pytest.mark.redelivery(app=None, crash_points=[])
def test_place(harness):
    pass
""",
    )
    result = run(
        pytester,
        """
@pytest.mark.redelivery(app=app, crash_points=["after lunch"])
def test_place(harness):
    pass
""",
    )
    assert result.ret != 0
    told = result.stdout.str()
    assert "There is no crash point 'after lunch'" in told
    assert "test_place is marked redelivery, but does not take the argument `harness`" in told
    assert "crash_points=[] runs nothing" in told


def test_marker_is_told(pytester: pytest.Pytester) -> None:
    result = run(pytester, "", "--markers")
    result.stdout.fnmatch_lines(["@pytest.mark.redelivery(app=None, crash_points=None, **options): run the test once*"])


def test_plugin_imports_next_to_nothing() -> None:
    """It is loaded in every pytest run of whoever has idemp installed."""
    code = "import sys, idemp.testing.plugin; print(sorted({'sqlalchemy', 'kombu', 'hypothesis'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
