"""A pytest plugin, there as soon as idemp is installed: fixtures for redelivery tests, and a marker. Nothing to configure.

- `fake_clock`: a clock that goes when it is told to.
- `redelivery_harness(app, **options)`: makes a `Harness`, closed at the end of the test.
- `@pytest.mark.redelivery(app=…, crash_points=…, **options)`: the test runs once for each crash point, with the argument
  `harness`, whose worker dies there at its first delivery.

```python
@pytest.mark.redelivery(app=app, tables=Base.metadata)
def test_place_order(harness):
    harness.send(PlaceOrder(order_id=ORDER, sku="A-1", quantity=1))
    harness.rest()
    assert harness.state(lambda session: session.scalar(select(func.count()).select_from(Order))) == 1
```
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from idemp.testing.clock import FakeClock
    from idemp.testing.harness import Harness

_MARKER = (
    "redelivery(app=None, crash_points=None, **options): run the test once per crash point; its argument `harness` is a "
    "Harness(app, **options) whose worker dies there at its first delivery. crash_points: names, default all of "
    "idemp.testing.crash_points.CRASH_POINTS; 'none' stands for a run without a death. Without app= the fixture "
    "`app` is used."
)
_OPTIONS = frozenset({"app", "crash_points", "database", "tables"})


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", _MARKER)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per crash point."""
    marker = metafunc.definition.get_closest_marker("redelivery")
    if marker is None:
        return
    if "harness" not in metafunc.fixturenames:
        _check_unmarked(metafunc)
        return
    from idemp.testing.crash_points import CRASH_POINTS

    names = [point.name for point in CRASH_POINTS]
    unknown = marker.kwargs.keys() - _OPTIONS
    if unknown or marker.args:
        raise pytest.UsageError(f"@pytest.mark.redelivery takes {', '.join(sorted(_OPTIONS))} by name.")
    wanted = marker.kwargs.get("crash_points")
    chosen = ["none", *names] if wanted is None else [wanted] if isinstance(wanted, str) else list(wanted)
    wrong = [name for name in chosen if name not in {"none", *names}]
    if wrong:
        raise pytest.UsageError(f"There is no crash point {wrong[0]!r}; use one of: {', '.join(names)}.")
    if not chosen:
        raise pytest.UsageError("crash_points=[] runs nothing; leave it out for all of them, or say 'none'.")
    metafunc.parametrize("crash_point", chosen, indirect=True)


def _check_unmarked(metafunc: pytest.Metafunc) -> None:
    """A test that is marked itself, not by its class or module, means to be run at crash points."""
    if any(mark.name == "redelivery" for mark in getattr(metafunc.function, "pytestmark", ())):
        raise pytest.UsageError(
            f"{metafunc.definition.name} is marked redelivery, but does not take the argument `harness`: nothing would be "
            "redelivered. Take it, or remove the marker."
        )


@pytest.fixture
def fake_clock() -> FakeClock:
    """A clock that goes when it is told to."""
    from idemp.testing.clock import FakeClock

    return FakeClock()


@pytest.fixture
def redelivery_harness() -> Iterator[Callable[..., Harness]]:
    """Makes harnesses, `redelivery_harness(app, **options)`, and closes them at the end of the test."""
    from idemp.testing.harness import Harness

    with ExitStack() as stack:
        yield lambda *arguments, **options: stack.enter_context(Harness(*arguments, **options))


@pytest.fixture
def crash_point(request: pytest.FixtureRequest) -> str:
    """Where the worker of a test marked `redelivery` dies; "none" for nowhere."""
    point: str = getattr(request, "param", "none")
    return point


@pytest.fixture
def harness(request: pytest.FixtureRequest, crash_point: str, redelivery_harness: Callable[..., Harness]) -> Harness:
    """The harness of a test marked `redelivery`."""
    marker = request.node.get_closest_marker("redelivery")
    if marker is None:
        raise pytest.UsageError(
            "The fixture `harness` belongs to @pytest.mark.redelivery(app=app); without it use redelivery_harness(app)."
        )
    options: dict[str, Any] = {name: value for name, value in marker.kwargs.items() if name != "crash_points"}
    app = options.pop("app", None) or request.getfixturevalue("app")
    made = redelivery_harness(app, **options)
    if crash_point != "none":
        made.script.die(crash_point)
    return made
