"""A tenth of the storms; `python -m tests.storms` runs them in full."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from tests.storms import run


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sql", "rabbitmq"])
def test_a_storm_keeps_the_promises(kind: str) -> None:
    report = run(kind, messages=500, kills=10, restarts=1)
    assert report.kept, asdict(report)
