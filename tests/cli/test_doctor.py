"""`idemp doctor` and `idemp describe`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.cli.conftest import Cli, Shop


def test_all_is_well(cli: Cli, shop: Shop) -> None:
    answer = cli("doctor", shop.where, "--json")
    assert answer.code == 0
    assert answer.data["healthy"]
    assert {check["verdict"] for check in answer.data["checks"]} == {"ok"}
    names = [check["name"] for check in answer.data["checks"]]
    for name in ("database", "tables", "journal_mode", "broker", "confirms", "guarantees", "retention", "queue"):
        assert name in names
    assert "All preconditions hold." in cli("doctor").out


def test_what_is_missing_is_red_and_says_what_mends_it(cli: Cli, empty_shop: Shop) -> None:
    answer = cli("doctor", empty_shop.where, "--json")
    assert answer.code == 1
    failed = {check["name"]: check["fix"] for check in answer.data["checks"] if check["verdict"] == "failed"}
    assert failed.keys() == {"database"}
    assert failed["database"].startswith("Run `idemp db upgrade --database 'sqlite:///")
    assert "FAILED   database" in cli("doctor").out


def test_unreachable_servers_are_red(cli: Cli, empty_shop: Shop) -> None:
    servers = ["--database", "postgresql://me:secret@127.0.0.1:1/x", "--broker", "pyamqp://me:secret@127.0.0.1:1//"]
    answer = cli("doctor", *servers)
    assert answer.code == 1
    assert "FAILED   database" in answer.out
    assert "FAILED   broker" in answer.out
    assert "secret" not in answer.out + answer.err


def test_short_window_is_red(cli: Cli, shop: Shop) -> None:
    (shop.folder / "idemp.toml").write_text('[messages."shop.Order"]\nretention = "1m"\n')
    (shop.folder / "short.py").write_text((shop.folder / f"{shop.module}.py").read_text())
    checks = {check["name"]: check for check in cli("doctor", "short:app", "--json").data["checks"]}
    assert checks["retention"]["verdict"] == "failed"


def test_dead_letters_and_pending_outputs_are_told(cli: Cli, shop: Shop) -> None:
    shop.send({"order_id": 1, "refuse": True})
    shop.send({"order_id": 2, "lost": True})
    shop.work()
    checks = {check["name"]: check for check in cli("doctor", shop.where, "--json").data["checks"]}
    assert checks["dead letters"]["verdict"] == "warning"
    assert checks["relay"]["verdict"] == "warning"
    assert "idemp relay" in checks["relay"]["fix"]


def test_describe(cli: Cli, empty_shop: Shop) -> None:
    data = cli("describe", empty_shop.where, "--json").data
    assert (data["consumer"], data["queue"], data["dead_letter_queue"]) == ("shop", "shop", "shop.dead")
    assert data["guarantees"]["at_least_once"]
    order, ping = data["types"]
    assert (order["type"], order["key"], order["retention"]) == ("shop.Order", "field:order_id", 7 * 86400.0)
    assert (ping["idempotent"], ping["key"]) == (False, None)
    assert {"queue": "shop", "routing_key": "shop.Order"} in data["bindings"]
    text = cli("describe", empty_shop.where).out
    for words in ("consumer shop", "shop.Order", "field:order_id", "7d", "at least once: yes"):
        assert words in text
