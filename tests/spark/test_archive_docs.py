"""The pages on the archive and the guard, run as they stand there."""

from __future__ import annotations

import json
import shlex
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from idemp import App, Idempotent
from idemp.cli import root
from idemp.errors import LateMessage
from idemp.identity import new_id
from idemp.lateness import LateGuard
from idemp.messages import Message
from idemp.settings import load_settings
from tests.docs.pages import blocks, page
from tests.spark.inboxes import Inbox, inbox_at

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

pytestmark = pytest.mark.slow

SHOP = """
from idemp import App, Idempotent

app = App("shop")


@app.handler(dict, type="shop.Order", policy=Idempotent(retention="7d"))
def order(message: dict) -> None: ...
"""


def commands(name: str) -> list[list[str]]:
    """What a page runs, without `$ idemp`."""
    return [shlex.split(block.removeprefix("$ "))[1:] for block in blocks(page(f"how-to/{name}"), "console")]


@pytest.fixture
def inbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Inbox]:
    """A folder with the app, the settings of the page, and an inbox with claims from March 1 that have expired."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "shop", raising=False)
    (tmp_path / "shop.py").write_text(SHOP)
    (settings,) = blocks(page("how-to/guard.md"), "toml")
    (tmp_path / "idemp.toml").write_text(settings.replace("/var/lib/shop/guard", "guard"))
    monkeypatch.setenv("IDEMP_DATABASE_URL", f"sqlite:///{tmp_path}/inbox.db")
    with inbox_at(f"sqlite:///{tmp_path}/inbox.db", tmp_path) as made:
        for number in range(4):
            made.handle(str(new_id(made.clock.now() + timedelta(seconds=number))), outputs=1)
        made.consumed_for(timedelta(days=9))
        yield made


def run(*command: str, code: int = 0) -> Any:
    done = CliRunner().invoke(root, [*command, "--json"])
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


def test_pages_do_what_they_say(spark: SparkSession, inbox: Inbox, tmp_path: Path) -> None:
    (archived,), (with_guard,) = commands("archive.md")[:1], commands("guard.md")
    assert archived == with_guard[: len(archived)]
    (done,) = run(*with_guard)
    assert (done["claims"], done["outputs"], done["deleted"], inbox.count()) == (4, 4, 4, 0)
    assert run(*archived) == []
    refused = CliRunner().invoke(root, ["inbox", "purge", "shop:app"])
    assert "leave expired claims to the archive" in refused.output + str(refused.exception)

    app = App("shop", settings=load_settings(), store=inbox.store, broker="local://broker.db")
    handled: list[Any] = []
    policy = Idempotent(retention="7d", late="guard")
    app.handler(dict, type="shop.Order", policy=policy)(lambda message: handled.append(message))  # noqa: PLW0108
    app.store.refresh_horizons("shop", [timedelta(days=7)])
    protocol = app.protocol(app.broker.publisher())
    late = inbox.claims[0]
    with pytest.raises(LateMessage, match="by its guard it was probably handled"):
        protocol.process(Message(body=b"{}", type="shop.Order", message_id=late.id.text))
    stranger = str(new_id(inbox.clock.now() - timedelta(days=8)))
    protocol.process(Message(body=b"{}", type="shop.Order", message_id=stranger))
    assert len(handled) == 1

    (restored,) = [command for command in commands("archive.md") if command[1] == "restore"]
    assert run(*restored) == {"found": 4, "restored": 4}
    assert inbox.count() == 5


def test_archive_is_refused_while_workers_purge(inbox: Inbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IDEMP_PURGE", "true")
    refused = CliRunner().invoke(root, ["pipeline", "archive", "shop:app", "--to", "archive"])
    assert "workers delete expired claims themselves" in refused.output + str(refused.exception)
    assert inbox.count() == 4


def test_the_app_of_the_page_asks_its_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = blocks(page("how-to/guard.md"), "python")
    scope: dict[str, Any] = {}
    exec(code, scope)
    assert isinstance(scope["app"].guard, LateGuard)
