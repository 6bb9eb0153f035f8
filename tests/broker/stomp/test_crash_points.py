"""Every crash point on ActiveMQ: the worker gets a SIGKILL there, and the effects still happen exactly once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.testing.test_killing import ALL, LATE_ONLY, all_is_well, killed

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow


def test_effects_exactly_once_whatever_kills(activemq_url: str, tmp_path: Path) -> None:
    found, sold = killed("early", tmp_path, broker=activemq_url, points=ALL)
    assert sold == list(range(len(ALL)))
    all_is_well(found, LATE_ONLY)
