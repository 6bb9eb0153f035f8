"""Every command that doctor prints does what it says, and no command makes a broker by the way."""

from __future__ import annotations

import shlex
import signal
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import update

from tests.cli.conftest import Shop
from tests.cli.test_worker import Running
from tests.servers.process import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from idemp.inbox.sql import SqlStore
    from tests.cli.conftest import Cli

MODULE = """
from idemp import App, Idempotent, Refuse

app = App("shop", database="sqlite:///{place}/own.db", broker="local://{place}/{file}", broker_name="main")


@app.handler(dict, type="shop.Order", policy=Idempotent(key="order_id"))
def order(message, ctx):
    if message.get("refuse"):
        raise Refuse("no such customer")
    ctx.send({{"order_id": message["order_id"]}}, to="out", type="shop.Done")
"""


@pytest.fixture
def bare_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory; nothing in it or in the environment names a server."""
    monkeypatch.delenv("IDEMP_DATABASE_URL")
    monkeypatch.delenv("IDEMP_BROKER_URL")
    return folder


@pytest.fixture
def own_shop(bare_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    """A shop whose code names its database and its broker, which are elsewhere."""
    place = tmp_path_factory.mktemp("elsewhere")
    for module, file in (("own_shop", "broker.db"), ("moved_shop", "other-broker.db")):
        (bare_folder / f"{module}.py").write_text(MODULE.format(place=place, file=file))
    shop = Shop(bare_folder, "own_shop")
    yield shop
    shop.app.close()


def printed(cli: Cli, where: str) -> list[list[str]]:
    """The commands that doctor prints, in its order, without `idemp`."""
    checks = cli("doctor", where, "--json").data["checks"]
    commands = [shlex.split(command["text"]) for check in checks for command in check["commands"]]
    assert {command[0] for command in commands} <= {"idemp"}
    return [command[1:] for command in commands]


def made(folder: Path) -> list[str]:
    """Databases and embedded brokers in a folder."""
    return sorted(path.name for path in folder.iterdir() if ".db" in path.name)


def ship(shop: Shop, command: list[str]) -> None:
    """Run a relay until nothing pends."""
    running = Running(shop, *command)
    try:
        wait_until(lambda: shop.app.store.upkeep.pending_count() == 0, "all outputs are shipped")
        running.send(signal.SIGTERM)
        assert running.ended() == 0
    finally:
        running.close()


def test_commands_for_an_app_that_names_its_servers_itself(cli: Cli, own_shop: Shop) -> None:
    (upgrade,) = printed(cli, own_shop.where)
    assert cli(*upgrade).code == 0
    own_shop.declare()
    own_shop.send({"order_id": 1, "refuse": True})
    own_shop.work()
    for _ in range(2):
        with own_shop.app.initiate() as unit:
            unit.send({}, to="out", type="shop.Done")
    store: SqlStore = own_shop.app.store  # type: ignore[assignment]
    (taken,) = store.upkeep.take_pending(1, timedelta(0))
    pending, given_up = store.tables.pending, datetime(9999, 1, 1, tzinfo=UTC)
    with store.engine.begin() as connection:
        quarantine = update(pending).where(pending.c.output_id == taken.output.id)
        connection.execute(quarantine.values(quarantined_at=datetime.now(UTC), due_at=given_up))
    commands = printed(cli, own_shop.where)
    assert {command[0] if command[0] == "relay" else " ".join(command[:2]) for command in commands} == {
        "relay",
        "inbox list",
        "inbox release",
        "dead list",
    }
    (relay,) = (command for command in commands if command[0] == "relay")
    for command in commands:
        if command is not relay:
            assert cli(*command).code == 0, command
    ship(own_shop, relay)
    assert own_shop.app.broker.depth("out") == 2
    assert made(own_shop.folder) == []


def test_broker_that_was_made_anew_is_adopted_by_the_command_printed(cli: Cli, own_shop: Shop) -> None:
    cli(*printed(cli, own_shop.where)[0])
    own_shop.declare()
    with own_shop.app.initiate() as unit:
        unit.send({}, to="out", type="shop.Done")
    moved = Shop(own_shop.folder, "moved_shop")
    moved.app.broker.declare(moved.app.topology())
    moved.app.broker.declare(type(moved.app.topology())(exchange="idemp", queues=("out",)))
    answer = cli("worker", moved.where)
    assert answer.code == 3
    assert "broker 'main' belong to embedded broker" in answer.err
    assert cli("relay", moved.where).code == 3
    (adopt,) = (command for command in printed(cli, moved.where) if command[:2] == ["broker", "adopt"])
    own_shop.app.store.upkeep.beat(own_shop.app.store.worker, relay=False, consumers=[])
    refused = cli(*adopt)
    assert refused.code == 3
    assert "Processes of the broker 'main' are alive" in refused.err
    own_shop.app.store.upkeep.retire(own_shop.app.store.worker)
    assert cli(*adopt, "--json").data["waiting"] == 1
    ship(moved, ["relay", moved.where])
    assert (moved.app.broker.depth("out"), own_shop.app.broker.depth("out")) == (1, 0)
    assert cli("relay", own_shop.where).code == 3
    moved.app.close()


def test_outputs_of_a_broker_that_no_relay_serves_are_told(cli: Cli, own_shop: Shop) -> None:
    cli(*printed(cli, own_shop.where)[0])
    own_shop.declare()
    with own_shop.app.initiate() as unit:
        unit.send({}, to="out", type="shop.Done")
    own_shop.app.close()
    url = own_shop.app.store.engine.url.render_as_string()  # type: ignore[attr-defined]
    checks = {check["name"]: check for check in cli("doctor", "--database", url, "--json").data["checks"]}
    assert checks["relay"]["verdict"] == "warning"
    assert checks["relay"]["detail"] == "1 output pending and no relay that ships to the broker 'main' is alive"
    (command,) = checks["relay"]["commands"]
    assert shlex.split(command["text"])[1:] == f"relay --database {url} --broker URL --broker-name main".split()


@pytest.mark.parametrize("command", [["relay"], ["inbox", "redispatch", "1"]])
def test_no_broker_is_made_where_none_is_named(cli: Cli, shop: Shop, command: list[str], tmp_path: Path) -> None:
    """An embedded broker in the folder would return, or even confirm, what belongs to another one."""
    shop.send({"order_id": 1})
    shop.work()
    folder = tmp_path / "bare"
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("IDEMP_BROKER_URL")
        patch.chdir(folder)
        answer = cli(*command)
    assert answer.code == 3
    assert "The embedded broker's file" in answer.err
    assert "MODULE:APP" in answer.err
    assert made(folder) == []


@pytest.mark.parametrize("command", [["relay"], ["inbox", "redispatch", "1"]])
def test_other_embedded_broker_is_refused(cli: Cli, shop: Shop, command: list[str]) -> None:
    """Though it is there, and has a queue of that name."""
    shop.send({"order_id": 1})
    shop.work()
    other = Shop(shop.folder, shop.module).folder / "other.db"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IDEMP_BROKER_URL", f"local://{other}")
        from idemp.broker.local import LocalBroker
        from idemp.broker.port import Topology

        broker = LocalBroker(other)
        broker.declare(Topology(exchange="idemp", queues=("out",)))
        answer = cli(*command)
    assert answer.code == 3
    assert "belong to embedded broker" in answer.err
    assert broker.depth("out") == 0


def test_redispatch_of_another_brokers_outputs_is_refused(cli: Cli, own_shop: Shop) -> None:
    cli(*printed(cli, own_shop.where)[0])
    own_shop.declare()
    with own_shop.app.initiate(id="once") as unit:
        unit.send({}, to="out", type="shop.Done")
    url = own_shop.app.store.engine.url.render_as_string()  # type: ignore[attr-defined]
    broker = own_shop.app.broker_url
    assert broker is not None
    refused = cli("inbox", "redispatch", "once", "--database", url, "--broker", broker)
    assert refused.code != 0
    assert "Outputs wait for the broker main, and this is 'default'" in refused.err
    assert own_shop.app.broker.depth("out") == 0
    assert cli("inbox", "redispatch", "once", "--app", own_shop.where).code == 0
    assert own_shop.app.broker.depth("out") == 1


def test_doctor_makes_no_broker(cli: Cli, bare_folder: Path) -> None:
    answer = cli("doctor", "--json")
    (found,) = (check for check in answer.data["checks"] if check["name"] == "broker")
    assert found["verdict"] == "warning"
    assert "does not exist yet" in found["detail"]
    assert [name for name in made(bare_folder) if "broker" in name] == []
