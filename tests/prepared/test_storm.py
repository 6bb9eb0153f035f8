"""Published equals committed, whoever dies."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

import pytest

from tests.prepared.storm import storm
from tests.storms import SHARE

pytestmark = pytest.mark.slow


def test_what_is_published_is_what_was_committed() -> None:
    with tempfile.TemporaryDirectory(prefix="idemp-prepared-") as folder:
        Path(folder).chmod(0o755)
        found = storm(Path(folder), round(200 * SHARE), round(100 * SHARE))
    print({name: len(value) if name in ("orders", "published") else value for name, value in found.items()})
    assert found["kills"] > 30 * SHARE  # a loaded machine has less time for them
    assert found["restarts"] == 4
    assert len(found["orders"]) > 300 * SHARE
    assert set(Counter(found["orders"]).values()) == {1}
    assert found["orders"] == sorted(found["published"])
    assert all(len(ids) == 1 for ids in found["published"].values())
