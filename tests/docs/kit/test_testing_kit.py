"""The pages on the testing kit tell what the code says."""

from __future__ import annotations

from pathlib import Path

import pytest

from idemp.testing.crash_points import CRASH_POINTS
from idemp.testing.findings import WHY

pytestmark = pytest.mark.slow

PAGE = (Path(__file__).parents[3] / "docs/reference/testing.md").read_text(encoding="utf-8")


def test_every_crash_point_and_finding_is_told() -> None:
    for point in CRASH_POINTS:
        assert f"| `{point.name}` | {'yes' if point.committed else 'no'} | {point.meaning} |" in PAGE
    for kind, why in WHY.items():
        assert f"| {kind} | {why} |" in PAGE
