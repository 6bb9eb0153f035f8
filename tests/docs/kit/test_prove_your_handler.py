"""The tutorial on proving a handler, run as it stands there; what it shows is what is printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PAGE = (Path(__file__).parents[3] / "docs/tutorial/prove-your-handler.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
PRINTED = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)


def pytest_in(folder: Path, *names: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("IDEMP_", "PYTEST_"))}
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", *names]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100, check=False
    ).stdout


def undated(text: str) -> str:
    return re.sub(r"\d{4}-\d\d-\d\d", "DATE", text)


def test_it_goes_as_it_is_told(tmp_path: Path) -> None:
    shop, test, mended, mended_test, machine = PYTHON
    (tmp_path / "shop.py").write_text(shop, encoding="utf-8")
    (tmp_path / "test_shop.py").write_text(test, encoding="utf-8")
    assert undated(PRINTED[0]) in undated(pytest_in(tmp_path, "test_shop.py"))

    assert "    sku: str\n" in mended
    head = shop[: shop.index("class PlaceOrder")].replace("orders_today = 0\n", "")
    (tmp_path / "shop.py").write_text(head + mended, encoding="utf-8")
    (tmp_path / "test_shop.py").write_text(mended_test, encoding="utf-8")
    assert PRINTED[1].strip() in pytest_in(tmp_path, "test_shop.py")
    (tmp_path / "test_machine.py").write_text(machine, encoding="utf-8")
    assert PRINTED[2].strip() in pytest_in(tmp_path)


def test_the_story_of_the_first_version(tmp_path: Path) -> None:
    shop, _, _, _, machine = PYTHON
    (tmp_path / "shop.py").write_text(shop, encoding="utf-8")
    (tmp_path / "test_machine.py").write_text(machine.replace(", sent_at=st.datetimes()", ""), encoding="utf-8")
    assert PRINTED[3] in pytest_in(tmp_path)
