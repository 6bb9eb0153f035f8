"""`idemp doctor` and `idemp describe`."""

from __future__ import annotations

import os
import re
import shlex
import sqlite3
import textwrap
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from sqlalchemy import select, update

from idemp.cli.loading import load_app
from idemp.inbox.sql import Tables, create_engine_safely
from idemp.policy import Policy
from tests.cli.conftest import MODULE
from tests.inbox.sql.kept import make_tables

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

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
    (failed,) = (check for check in answer.data["checks"] if check["verdict"] == "failed")
    assert failed["name"] == "tables"
    assert failed["fix"].startswith("If this inbox is new, make them. If it was in use,")
    assert failed["fix"].endswith("first put the right one in its place.")
    assert failed["commands"] == [{"kind": "shell", "text": "idemp db upgrade"}]
    told = cli("doctor").out
    assert "FAILED   tables" in told
    assert "$ idemp db upgrade\n" in told


def test_commands_repeat_what_stood_on_the_command_line(cli: Cli, folder: Path) -> None:
    cli("db", "upgrade")
    database = f"sqlite:///{folder}/other.db"
    answer = cli("doctor", "--database", database, "--prefix", "billing_", "--json")
    (failed,) = (check for check in answer.data["checks"] if check["name"] == "tables")
    (command,) = failed["commands"]
    assert shlex.split(command["text"])[:3] == ["idemp", "db", "upgrade"]
    assert shlex.split(command["text"])[3:] == [
        *("--database", database),
        *("--prefix", "billing_"),
    ]


def test_database_in_the_code_is_named_by_the_commands(cli: Cli, empty_shop: Shop) -> None:
    where = f"sqlite:///{empty_shop.folder}/own.db"
    (empty_shop.folder / "own_shop.py").write_text(f"from idemp import App\n\napp = App('own', database={where!r})\n")
    answer = cli("doctor", "own_shop:app", "--json")
    (failed,) = (check for check in answer.data["checks"] if check["name"] == "tables")
    assert failed["commands"] == [{"kind": "shell", "text": f"idemp db upgrade --database {where}"}]


def test_clocks_and_silent_workers_are_told(cli: Cli, shop: Shop, postgresql_url: str) -> None:
    """The app's own clock is what leases and windows are counted by."""
    code = """
        from datetime import timedelta
        from idemp import App
        from idemp.clock import SystemClock

        class Slow(SystemClock):
            def now(self):
                return super().now() - timedelta(seconds={seconds})

        app = App("slow_{seconds}", database={database!r}, clock=Slow())
        app.handler(dict, type="slow.Tick")(lambda message: None)
        """
    engine = create_engine_safely(postgresql_url)
    make_tables(engine)
    engine.dispose()
    for seconds, verdict in ((1, "ok"), (5, "warning"), (60, "failed"), (-60, "failed")):
        name = f"slow_{seconds}".replace("-", "minus_")
        text = textwrap.dedent(code).format(seconds=seconds, database=postgresql_url)
        (shop.folder / f"{name}.py").write_text(text)
        answer = cli("doctor", f"{name}:app", "--json")
        checks = {check["name"]: check for check in answer.data["checks"]}
        load_app(f"{name}:app").close()
        assert checks["clock"]["verdict"] == verdict
        said = re.search(r"(ahead of|behind) this process's by ([\d.]+) s", checks["clock"]["detail"])
        assert said is not None
        assert (said[1], round(float(said[2]))) == ("ahead of" if seconds > 0 else "behind", abs(seconds))
        assert answer.code == (1 if verdict == "failed" else 0)
    upkeep = shop.app.store.upkeep
    upkeep.beat("host-1", relay=True, consumers=["shop"])
    assert checks_of(cli, shop)["workers"]["detail"] == "1 worker alive"
    with sqlite3.connect(shop.folder / "shop.db") as raw:
        raw.execute("UPDATE idemp_worker SET seen_at = datetime('now', '-5 minutes') WHERE name = 'host-1'")
    raw.close()
    workers = checks_of(cli, shop)["workers"]
    assert (workers["verdict"], "host-1" in workers["detail"]) == ("warning", True)
    upkeep.retire("host-1")
    assert checks_of(cli, shop)["workers"]["detail"] == "0 workers alive"


def checks_of(cli: Cli, shop: Shop) -> dict[str, Any]:
    return {check["name"]: check for check in cli("doctor", shop.where, "--json").data["checks"]}


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


def test_outputs_that_wait_with_a_refusal_are_told(cli: Cli, shop: Shop) -> None:
    shop.send({"order_id": 1, "lost": True})
    shop.send({"order_id": 2, "lost": True})
    shop.work()

    def told(name: str) -> list[Any]:
        return [check for check in cli("doctor", shop.where, "--json").data["checks"] if check["name"] == name]

    assert told("refused outputs") == []  # it is not yet worth a word
    tables, engine = Tables(), create_engine_safely(os.environ["IDEMP_DATABASE_URL"])
    with engine.begin() as connection:
        reasons = connection.scalars(select(tables.pending.c.reason)).all()
        connection.execute(update(tables.inbox).values(claimed_at=datetime.now(UTC) - timedelta(minutes=5)))
    (check,) = told("refused outputs")
    assert check["verdict"] == "warning"
    assert "2 outputs refused and tried again, the oldest for 5m: 2 times " in check["detail"]
    assert reasons[0] in check["detail"]
    assert check["commands"] == [{"kind": "shell", "text": "idemp inbox list --pending"}]
    with engine.begin() as connection:
        far = datetime(9999, 1, 1, tzinfo=UTC)
        connection.execute(update(tables.pending).values(quarantined_at=datetime.now(UTC), due_at=far))
    assert told("refused outputs") == []
    (check,) = told("quarantine")
    commands = (f"redispatch --app {shop.where} ID", "release --all")
    assert all(f"`idemp inbox {words}`" in check["fix"] for words in commands)
    assert "9999" not in cli("inbox", "list", "--quarantined").out
    engine.dispose()


def test_describe_tells_all_that_is_not_the_default(cli: Cli, empty_shop: Shop) -> None:
    (empty_shop.folder / "idemp.toml").write_text(
        '[messages."shop.Order"]\nretry_jitter = 0.2\nretry_on = ["OSError"]\nmax_hops = 50\nclaim_wait = "5s"\n'
        'fingerprint = {except = ["sent_at"]}\non_conflict = "redispatch"\nprevious = [{key = "no"}]\n'
        '[messages."stock.Reserve"]\nattempts = 2\n'
    )
    data = cli("describe", empty_shop.where, "--json").data
    assert data["unused_policies"] == ["stock.Reserve"]
    order, ping = (item["policy"] for item in data["types"])
    assert set(order) == set(Policy.model_fields)
    assert {name for name in order if order[name] != ping[name]} == {
        *("idempotent", "key", "retry_jitter", "retry_on", "max_hops", "claim_wait", "fingerprint", "on_conflict"),
        "previous",
    }
    assert (order["retry_on"], order["fingerprint"], order["claim_wait"]) == (["OSError"], "except: sent_at", 5.0)
    text = " ".join(cli("describe", empty_shop.where).out.split())
    assert "policies in the settings that no handler here uses: stock.Reserve" in text
    for words in ("retry_jitter = 0.2", "max_hops = 50", "on_conflict = redispatch", "previous = key field:no"):
        assert words in text


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


def test_a_store_that_is_no_database(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables that are not there have no name, and what is no SQL database has looked at itself, and has no relay."""
    (tmp_path / "carts.py").write_text(
        "from idemp import App\n"
        "from idemp.inbox.document import DocumentInbox, InMemoryDocuments\n"
        "app = App('carts', store=DocumentInbox(InMemoryDocuments()), broker='local://broker.db')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert "store DocumentInbox\n" in cli("describe", "carts:app").out
    assert "DocumentInbox has looked at itself" in cli("doctor", "carts:app").out
    assert "relay can't be had on a DocumentInbox" in cli("relay", "carts:app").err


def test_deploy_that_changes_a_key(cli: Cli, shop: Shop) -> None:
    """Told before a worker refuses to start; the look stores nothing."""
    changed = f"{shop.module}_changed"
    (shop.folder / f"{changed}.py").write_text(MODULE.replace('key="order_id"', 'key="number"'))
    answer = cli("doctor", f"{changed}:app", "--json")
    check = next(each for each in answer.data["checks"] if each["name"] == "identities")
    assert (answer.code, check["verdict"]) == (1, "failed")
    assert "Previous(key='order_id')" in check["fix"]
    assert "identities" in {each["name"] for each in cli("doctor", shop.where, "--json").data["checks"]}
    assert cli("doctor", shop.where).code == 0


def test_deploy_that_renames_a_type(cli: Cli, shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    """It can't be told from a new type and one that is gone: a warning until claims of the former name count no more."""
    shop.send({"order_id": 42})
    shop.work()

    def look(release: str, text: str) -> tuple[str, str, list[list[str]]]:
        name = f"{shop.module}_{release}"
        (shop.folder / f"{name}.py").write_text(text)
        answer = cli("doctor", f"{name}:app", "--json")
        (found,) = (each for each in answer.data["checks"] if each["name"] == "identities")
        assert answer.code == 0
        caplog.clear()
        caplog.set_level("WARNING", logger="idemp")  # of which doctor wants errors alone
        load_app(f"{name}:app").start()
        events = [each for each in caplog.records if getattr(each, "event", "") == "types_unhandled"]
        assert len(events) <= 1
        return found["verdict"], found["fix"], [each.message_types for each in events]

    renamed = MODULE.replace('"shop.Order"', '"shop.Sale"')
    policy = 'Idempotent(key="order_id")'
    covering = renamed.replace("import App,", "import App, Previous,").replace(
        policy, 'Idempotent(key="order_id", previous=[Previous(type="shop.Order")])'
    )
    alias = MODULE.replace(f"policy={policy}", f'policy={policy}, aliases=["shop.Sale"]')
    assert look("as_it_was", MODULE)[::2] == ("ok", [])
    assert look("with_an_alias", alias)[::2] == ("ok", [])
    verdict, fix, told = look("renamed", renamed)
    assert (verdict, "Previous(type='shop.Order')" in fix, told) == ("warning", True, [["shop.Order"]])
    assert look("covered", covering)[::2] == ("ok", [])
    with sqlite3.connect(shop.folder / "shop.db") as raw:
        raw.execute("DELETE FROM idemp_inbox")
    raw.close()
    assert look("purged", renamed)[::2] == ("ok", [])


def test_deploy_without_the_guard_that_it_asks(cli: Cli, shop: Shop) -> None:
    guarded = f"{shop.module}_guarded"
    asking = MODULE.replace('key="order_id"', 'key="order_id", late="guard"')
    (shop.folder / f"{guarded}.py").write_text(asking)
    check = next(
        each for each in cli("doctor", f"{guarded}:app", "--json").data["checks"] if each["name"] == "policies"
    )
    assert (check["verdict"], "IDEMP_GUARD" in check["fix"]) == ("failed", True)


def test_an_app_without_handlers_is_not_healthy(cli: Cli, empty_shop: Shop) -> None:
    """Perhaps the module that holds them is not imported; a worker would refuse to start."""
    (empty_shop.folder / "bare.py").write_text("from idemp import App\n\napp = App('shop')\n")
    answer = cli("doctor", "bare:app", "--json")
    check = next(each for each in answer.data["checks"] if each["name"] == "policies")
    assert (answer.code, check["verdict"]) == (1, "failed")
    assert "no handlers" in check["detail"]
    refused = cli("worker", "bare:app", "--json")
    assert refused.error["kind"] == "ConfigurationError"
