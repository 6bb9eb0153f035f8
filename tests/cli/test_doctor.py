"""Broken set-ups: doctor names each, with what fixes it; where that is a command, the test runs it."""

from __future__ import annotations

import json
import re
import shlex
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import amqp
import pytest
import time_machine
from sqlalchemy import make_url

from idemp import Context
from idemp.cli.main import Exit
from idemp.messages import Output
from idemp.sql.broker import SqlBroker
from idemp.sql.engine import Database
from idemp.sql.records.waiting import read_waiting
from tests.cli.test_commands import run
from tests.servers import ask
from tests.servers.databases import query
from tests.storms import storm_servers
from tests.world import Order, World

APP = """
from pydantic import BaseModel
from idemp import App, Idempotent

app = App("shop", policy=Idempotent(key="id", retention="1d"))

class Pay(BaseModel):
    __message_type__ = "shop.Pay"
    id: int

@app.handler(Pay)
def pay(message: Pay) -> None:
    print("paid", message.id)
"""


class Doctor:
    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self._capsys, self._monkeypatch = capsys, monkeypatch
        self.target = f"app_{folder.name.replace('-', '_')}"
        (folder / f"{self.target}.py").write_text(APP)

    def use(self, **settings: str) -> None:
        for name, value in settings.items():
            self._monkeypatch.setenv(f"IDEMP_{name.upper()}", value)

    def printed(self) -> str:
        return self._capsys.readouterr().out

    def finds(self, *arguments: str) -> list[tuple[str, str, str]]:
        """Run doctor, and return level, text and fix of its findings."""
        self._capsys.readouterr()
        sys.modules.pop(self.target, None)
        code = run("doctor", *(arguments or (self.target, "--json")))
        said = json.loads(self._capsys.readouterr().out)
        found = [(each["level"], each["text"], each["fix"]) for each in said["findings"]]
        assert code == (Exit.FAILED if any(level == "red" for level, _, _ in found) else Exit.OK)
        return found


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Doctor:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return Doctor(capsys, monkeypatch, tmp_path)


def test_no_table(doctor: Doctor) -> None:
    assert doctor.finds() == [("red", "the file idemp.db does not exist", "idemp db upgrade")]
    assert run(*shlex.split("idemp db upgrade")[1:]) == Exit.OK
    assert doctor.finds() == []


@pytest.mark.parametrize("kind", ["postgresql", pytest.param("mariadb", marks=pytest.mark.slow)], indirect=True)
def test_an_old_table(doctor: Doctor, url: str) -> None:
    doctor.use(database_url=url)
    query(url, "UPDATE idemp_version SET version_num = '2.0000'")
    ((level, text, fix),) = doctor.finds()
    assert (level, fix) == ("red", "idemp db upgrade")
    assert "has tables of revision 2.0000, not 2.0001" in text
    query(url, "DELETE FROM idemp_version")  # there is no earlier release to upgrade from: as an upgrade that was interrupted
    assert run(*shlex.split(fix)[1:]) == Exit.OK
    assert doctor.finds() == []


@pytest.mark.parametrize("kind", ["postgresql"], indirect=True)
@pytest.mark.parametrize(("name", "value"), [("default_transaction_isolation", "serializable"), ("synchronous_commit", "off")])
@pytest.mark.parametrize(
    "place",
    [
        "ROLE {role}",
        *(pytest.param(f"{each} {{database}}", marks=pytest.mark.slow) for each in ("DATABASE", "ROLE {role} IN DATABASE")),
    ],
)
def test_a_wrong_setting_of_the_server(doctor: Doctor, url: str, name: str, value: str, place: str) -> None:
    role = f"role_{make_url(url).database}"
    query(url, f"CREATE ROLE {role} SUPERUSER LOGIN")
    query(url, f"ALTER {place.format(database=make_url(url).database, role=role)} SET {name} = '{value}'")
    try:
        doctor.use(database_url=make_url(url).set(username=role).render_as_string(hide_password=False))
        ((level, text, fix),) = doctor.finds()
        assert (level, text.startswith(f"{name} is {value}: ")) == ("yellow", True)
        query(url, fix)
        assert doctor.finds() == []
    finally:
        query(url, f"DROP ROLE {role}")


@pytest.mark.slow
def test_a_server_that_loses_commits(doctor: Doctor) -> None:
    with storm_servers("sql", "mariadb") as (_, _, url):  # of its own: the setting is one for all databases
        doctor.use(database_url=url)
        query(url, "SET GLOBAL innodb_flush_log_at_trx_commit = 2")
        ((level, text, fix),) = doctor.finds()
        assert (level, "loses commits" in text) == ("yellow", True)
        query(url, fix)
        assert doctor.finds() == []


@pytest.mark.parametrize("kind", ["postgresql", "mariadb"], indirect=True)
@pytest.mark.parametrize("rights", [pytest.param("", marks=pytest.mark.slow), "SELECT"])
def test_a_missing_right(doctor: Doctor, url: str, rights: str) -> None:
    made = make_url(url)
    name = f"role{str(made.database)[-12:]}"
    postgresql = made.get_backend_name() == "postgresql"
    role = name if postgresql else f"'{name}'@'127.0.0.1'"
    query(url, f"CREATE ROLE {name} LOGIN" if postgresql else f"CREATE USER {role} IDENTIFIED BY 'x'")
    for table in ("version", "inbox", "output", "name") if not postgresql or rights else ():
        query(url, f"GRANT {rights or 'SELECT'} ON {'' if postgresql else f'{made.database}.'}idemp_{table} TO {role}")
    try:
        doctor.use(database_url=made.set(username=name, password="x").render_as_string(hide_password=False))
        ((level, text, fix),) = doctor.finds()
        assert (level, "may not" in text, "DELETE" in text, "idemp_inbox" in text) == ("red", True, True, True)
        assert (run("doctor", doctor.target), len(text) < 500) == (Exit.FAILED, True)
        printed = doctor.printed().splitlines()
        assert [line for line in printed if len(line) > 80 and "GRANT" not in line] == []
        assert all(line.endswith(";") for line in printed if "GRANT" in line)
        for statement in fix.splitlines():
            assert statement.endswith(";")
            query(url, statement)
        assert doctor.finds() == []
    finally:
        if postgresql:
            query(url, f"DROP OWNED BY {name}")
        query(url, f"DROP {'ROLE' if postgresql else 'USER'} {role}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"x-queue-type": "quorum"}, "(no x-delivery-limit, no x-overflow): RabbitMQ 4 drops a message after 20 deliveries"),
        ({"x-queue-type": "quorum", "x-delivery-limit": 2**31 - 1, "x-overflow": "reject-publish", "x-message-ttl": 1000}, "(x-message-ttl=1000)"),
    ],
)  # fmt: skip
def test_a_queue_without_the_delivery_limit_and_one_with_foreign_arguments(
    doctor: Doctor, url: str, vhost: str, arguments: Any, text: str
) -> None:
    with closing(amqp.Connection(**amqp_arguments(vhost))) as connection:
        connection.connect()
        connection.channel().queue_declare("shop", durable=True, auto_delete=False, arguments=arguments)
    doctor.use(database_url=url, broker_url=vhost)
    ((level, found, fix),) = doctor.finds()
    assert (level, found) == ("red", f"the queue shop has other arguments {text}")
    before, _, command = fix.partition(": ")
    ask("rabbitmq", "control", *shlex.split(command)[1:])
    assert (before, doctor.finds()) == ("use a new name, or once it is empty", [])


def amqp_arguments(url: str) -> dict[str, Any]:
    made = make_url(url)
    return {"host": f"{made.host}:{made.port}", "userid": made.username, "password": made.password, "virtual_host": made.database}


def test_a_window_that_is_shorter_than_the_horizon(doctor: Doctor, url: str) -> None:
    doctor.use(database_url=url, messages='{"shop.Pay": {"retention": "10m"}}')
    ((level, text, fix),) = doctor.finds()
    assert (level, text) == ("yellow", "shop.Pay is kept for 600 s, and may come again after 1088 s")
    name, _, value = fix.partition("=")
    doctor.use(**{name.removeprefix("IDEMP_").lower(): shlex.split(value)[0]})
    assert doctor.finds() == []


def test_a_clock_that_is_an_hour_off(doctor: Doctor, url: str) -> None:
    doctor.use(database_url=url)
    with time_machine.travel(time.time() + 3600):
        ((level, text, fix),) = doctor.finds()
    assert (level, fix) == ("yellow", "timedatectl set-ntp true, on both machines")
    assert re.match(r"the clock of this machine is 3(599|600) s ahead of that of the database", text)
    with time_machine.travel(time.time() - 3600):
        assert re.search(r"360\d s behind that", doctor.finds()[0][1])


@pytest.mark.parametrize(
    "kind", ["sqlite", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("postgresql", "mariadb"))], indirect=True
)
def test_a_queue_that_nobody_takes(
    doctor: Doctor, database: Database, url: str, age: Callable[[float], None], monkeypatch: Any
) -> None:
    doctor.use(database_url=url)
    broker = SqlBroker(database, "producer")
    broker.declare("shop", [])
    broker.publisher().publish([Output("7", "send", "", "shop", {"type": "shop.Pay", "message_id": "7"}, b'{"id": 7}')], 10.0)
    assert doctor.finds() == []
    age(120)
    ((level, text, fix),) = doctor.finds()
    assert (level, fix) == ("red", f"idemp worker {doctor.target}")
    assert text.startswith("no worker has taken what is due in the queue shop for 12")
    stopping(monkeypatch, lambda: not read_waiting(database).queues)
    assert run(*shlex.split(fix)[1:]) == Exit.OK
    assert doctor.finds() == []


def stopping(monkeypatch: pytest.MonkeyPatch, done: Callable[[], bool]) -> None:
    """Let the worker that is run next stop when something is done."""
    from idemp.worker import Worker, lifecycle

    def run_worker(begin: Callable[[], Worker], *_: Any, **__: Any) -> None:
        worker = begin()
        monkeypatch.setattr(worker, "upkeep", lambda upkeep=worker.upkeep: worker.stop() if done() else upkeep())
        worker.run()
        worker.app.close()

    monkeypatch.setattr(lifecycle, "run", run_worker)


def test_what_waits(doctor: Doctor, url: str, age: Callable[[float], None]) -> None:
    def handle(message: Order, ctx: Context) -> None:
        ctx.send({"id": 1}, to="nowhere", type="shop.Lost")
        if message.order_id == "bad":
            raise ValueError

    world = World(url, handle)
    world.send("1", "bad")
    worker = world.worker()
    for _ in range(9):
        world.work(worker)
        age(300)
    worker.upkeep()
    doctor.use(database_url=url)
    assert doctor.finds("--json") == [
        ("yellow", "no queue took 1 output, so they are in quarantine", "idemp inbox list --quarantined"),
        ("yellow", "the queue shop has 1 dead letter", "idemp dead list --queue shop"),
    ]
    world.send("2")
    world.work(worker)
    age(300)
    assert doctor.finds("--json")[0] == ("red", "1 output pending, and no worker or relay was seen within 15 s", "idemp relay")
