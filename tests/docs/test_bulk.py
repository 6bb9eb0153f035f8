"""The how-to "Handle messages by the thousand", run as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from idemp.inbox.sql import Tables, create_engine_safely
from idemp.inbox.sql.schema import upgrade

PAGE = (Path(__file__).parents[2] / "docs/how-to/bulk.md").read_text(encoding="utf-8")


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    engine = create_engine_safely("sqlite:///stock.db")
    upgrade(engine, Tables())
    engine.dispose()
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(block, names)
    names["app"].close()
