"""The README's five minutes, run as they stand there."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from idemp.broker.guarantees import markdown
from tests.servers.process import wait_until

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RECEIPT = "receipt for 00000000-0000-0000-0000-000000000007\n"


def block(file: str) -> str:
    """The Python block that follows the mention of a file."""
    found = re.search(rf"`{re.escape(file)}`.*?```python\n(.*?)```", README, re.DOTALL)
    assert found is not None, f"the README has no block for {file}"
    return found[1]


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    for file in ("shop.py", "send.py"):
        (tmp_path / file).write_text(block(file), encoding="utf-8")
    return tmp_path


def run(folder: Path, *command: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("IDEMP_")}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_five_minutes(shop: Path) -> None:
    assert all(command in README for command in ("idemp db upgrade\n", "python send.py\n", "idemp worker shop:app\n"))
    run(shop, "-m", "idemp", "db", "upgrade")
    run(shop, "send.py")
    printed = shop / "printed"
    with printed.open("w") as output:
        worker = subprocess.Popen([sys.executable, "-m", "idemp", "worker", "shop:app"], cwd=shop, stdout=output)
        try:
            wait_until(lambda: printed.read_text().count(RECEIPT) == 3, "three receipts")
        finally:
            worker.send_signal(signal.SIGINT)
            assert worker.wait(30) == 0
    assert RECEIPT * 3 in README
    story = run(shop, "-m", "idemp", "inbox", "explain", "00000000-0000-0000-0000-000000000007")
    assert "redelivered 2 times, and its handler's work was committed once" in story
    balance = run(shop, "-c", "import sqlite3; print(*sqlite3.connect('idemp.db').execute('SELECT cents FROM account'))")
    assert balance.strip() == "(750,)"


def test_the_table_of_brokers_is_the_one_in_the_code() -> None:
    found = re.search(r"<!-- guarantees:.*?-->\n(.*?)<!-- end of guarantees -->", README, re.DOTALL)
    assert found is not None
    assert found[1].strip() == markdown().strip()


def test_links_lead_somewhere() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in pages
        for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text(encoding="utf-8"))
        if not (page.parent / target).exists()
    ]
    assert broken == []
