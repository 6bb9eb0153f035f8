"""The how-to on ActiveMQ: its broker starts, its app and its commands run as they stand there."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from tests.docs.pages import blocks, page, run, work_until, write_files
from tests.servers.activemq import ActiveMQ
from tests.servers.fixtures import private

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

PAGE = page("how-to/activemq.md")
ORDER = "00000000-0000-0000-0000-000000000007"


class OfThePage(ActiveMQ):
    """Configured as the page says, elsewhere."""

    def configuration(self) -> str:
        (text,) = blocks(PAGE, "xml")
        for there, here in (("/var/lib/activemq/shop", str(self.data)), ("127.0.0.1:61613", f"127.0.0.1:{self.port}")):
            assert there in text
            text = text.replace(there, here)
        return text


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(PAGE, tmp_path, "shop.py", "send.py")
    upgrade, declare, doctor, _worker = (
        shlex.split(line.removeprefix("$ "))[1:] for line in blocks(PAGE, "console")[0].splitlines()
    )
    with private(OfThePage) as server:
        monkeypatch.setenv("BROKER", server.url)
        run(tmp_path, "-m", "idemp", *upgrade)
        run(tmp_path, "-m", "idemp", *declare)
        assert "ActiveMQ/5" in run(tmp_path, "-m", "idemp", *doctor)
        run(tmp_path, "send.py")
        printed = tmp_path / "printed"
        work_until(tmp_path, "shop:app", lambda: f"thanks for {ORDER}" in printed.read_text(), "thanks")
        assert printed.read_text().count(f"order {ORDER}") == 1
