"""`idemp prepared`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from idemp.testing.app import let_pass
from tests.cli.test_commands import Exit, run
from tests.prepared import SINK, TYPE, Shop
from tests.prepared.test_prepared import Oracle


def test_undecided_messages_are_listed_parked_and_resumed(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IDEMP_DATABASE_URL", url)
    monkeypatch.setenv("COLUMNS", "80")
    assert run("prepared", "list") == Exit.OK
    assert capsys.readouterr().out == "no prepared messages\n"
    shop = Shop(url, f"sqlite:///{tmp_path}/shop.db", checker=Oracle("unknown", "unknown", "commit")).create()
    for key in ("order 7", "order 8"):
        shop.messages.prepare({"order_id": key}, to=SINK, type=TYPE, key=key).__enter__()
    assert run("prepared", "list", "--limit", "1", "--json") == Exit.OK
    found = json.loads(capsys.readouterr().out)
    assert ([(each["key"], each["state"]) for each in found["prepared"]], found["more"]) == ([("order 7", "waiting")], True)
    assert run("prepared", "park", "order 7", "--reason", "asks the lawyers") == Exit.OK
    assert capsys.readouterr().out == "1 parked\n"
    assert run("prepared", "list", "--parked") == Exit.OK
    text = capsys.readouterr().out
    assert "asks the lawyers" in text
    assert max(map(len, text.splitlines())) <= 80
    assert run("prepared", "resume", "order 7", "order 9") == Exit.FAILED
    assert "there is no prepared message order 9: idemp prepared list" in capsys.readouterr().err
    let_pass(shop.database, 61)
    assert shop.messages.check() == 1  # the other one
    assert run("prepared", "resume", found["prepared"][0]["id"], "--json") == Exit.OK
    assert json.loads(capsys.readouterr().out) == {"resumed": 1}
    let_pass(shop.database, 61)
    assert shop.messages.check() == 2
    shop.close()
