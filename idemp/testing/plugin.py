"""A pytest plugin: the fixture `idemp_test`, and failures of the conformance suites that show their values."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from idemp.app import App
    from idemp.testing.app import AppTest

__all__ = ["idemp_test"]

for module in ("idemp.testing.broker_conformance", "idemp.testing.conformance"):
    if module not in sys.modules:
        pytest.register_assert_rewrite(module)


@pytest.fixture
def idemp_test() -> Iterator[Callable[..., AppTest]]:
    """Return a function that puts an app on a database and a broker of its own until the test ends; see `App.test`."""
    with ExitStack() as stack:

        def start(app: App, **options: Any) -> AppTest:
            return stack.enter_context(app.test(**options))

        yield start
