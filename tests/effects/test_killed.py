"""SIGKILL between the mail and the record of it: at most one mail more for each, and always the same Message-ID."""

from __future__ import annotations

import os
import subprocess
import sys
from email import message_from_bytes
from pathlib import Path

import pytest

from idemp import App
from idemp.broker.memory import InMemoryBroker
from idemp.effects.smtp import Mail
from idemp.inbox.sql import create_engine_safely
from idemp.inbox.sql.schema import upgrade
from idemp.inbox.sql.tables import Tables
from tests.effects.conftest import Post

MAILS = 40
LIVES = ("after:1", "before:1", "after:5", "after:2", "before:7")


@pytest.mark.slow
def test_one_mail_more_for_each_kill(post: Post, tmp_path: Path) -> None:
    file = tmp_path / "shop.db"
    engine = create_engine_safely(f"sqlite:///{file}")
    upgrade(engine, Tables())
    app = App("shop", database=engine, broker=InMemoryBroker())
    app.effect("mail.send", Mail)(print)
    with app.initiate() as unit:
        ids = [
            unit.effect("mail.send", Mail(to=[f"c{number}@example.org"], subject="Your order", text=""))
            for number in range(MAILS)
        ]
    engine.dispose()
    command = [sys.executable, "-m", "tests.effects.killed", str(file), str(post.port), *LIVES]
    done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert set(post.ids()) == {f"<{id_}@example.org>" for id_ in ids}, "none is lost, and each has its own id"
    twice = [id_ for id_, times in post.ids().items() if times > 1]
    assert len(twice) == len(post.mails) - MAILS == sum(life.startswith("after") for life in LIVES)
    for id_ in twice:
        copies = [mail for mail in post.mails if message_from_bytes(mail.content)["Message-ID"] == id_]
        assert len(copies) == 2
        assert copies[0].rcpt_tos == copies[1].rcpt_tos
