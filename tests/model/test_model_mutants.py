"""Each fault that the model can be given breaks the promise that the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.model.page import PAGE, Row, rows
from tests.model.spin import needs_spin, search, story, version

pytestmark = [pytest.mark.slow, needs_spin]


@pytest.mark.parametrize("row", rows("mutants"), ids=lambda row: row.flags)
def test_fault_breaks_a_promise(row: Row, tmp_path: Path) -> None:
    assert search(tmp_path, row.flags, end=row.end, shortest=not row.end).broken == row.says


def test_story_on_the_page_is_the_one_that_spin_tells(tmp_path: Path) -> None:
    found = re.search(r"Spin ([\d.]+).*spin -t -T -D(\w+).*?```\n(.*?)\n```", PAGE, re.DOTALL)
    assert found is not None
    stated, flags, told = found.groups()
    broken = search(tmp_path, flags, shortest=True).broken
    assert broken is not None
    here = story(tmp_path, flags)
    assert here
    if version() == stated:  # another one may find another way that is as short
        assert here == told
