"""A patient: an app on live servers, looked at by doctor, and treated with exactly what doctor names."""

from __future__ import annotations

import itertools
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from idemp.app import App
from idemp.broker.kombu import rebuilding
from idemp.cli.loading import load_app
from idemp.inbox.sql import Tables, create_engine_safely
from idemp.inbox.sql.schema import upgrade
from tests.inbox.sql.kept import make_tables
from tests.servers import mariadb, postgresql

if TYPE_CHECKING:
    from collections.abc import Callable

    from idemp.broker.port import Broker
    from tests.cli.conftest import Answer, Cli

_numbers = itertools.count()
_done: set[tuple[str, ...]] = set()
IDEMP = Path(sys.executable).with_name("idemp")
MODULE = """
from idemp import App, Idempotent

app = App("shop")


@app.handler(dict, type="shop.Order", policy=Idempotent(key="order_id", retry_delays=["1s", "30s"]))
def order(message):
    pass
"""


@dataclass
class Patient:
    """An app whose servers the environment names.

    Attributes:
        cli: runs doctor.
        where: `MODULE:APP`.
        administrator: SQLAlchemy URL for what needs an administrator.
        rabbitmqctl: runs it against the node.
    """

    cli: Cli
    where: str
    administrator: str = ""
    rabbitmqctl: Callable[..., str] | None = None
    ran: list[str] = field(default_factory=list)

    def look(self) -> Answer:
        """What doctor says, in a process that knows nothing of an earlier look."""
        app = self._fresh_app()
        try:
            return self.cli("doctor", self.where, "--json")
        finally:
            app.close()

    def red(self) -> list[dict[str, Any]]:
        """What is failed."""
        answer = self.look()
        found = [check for check in answer.data["checks"] if check["verdict"] == "failed"]
        assert answer.code == (1 if found else 0), answer.out
        return found

    def broker(self) -> Broker:
        return self._fresh_app().broker

    def declare(self) -> None:
        app = self._fresh_app()
        app.broker.declare(app.topology())

    def sql(self, *statements: str) -> None:
        """As the administrator of the database."""
        query = postgresql.query if self.administrator.startswith("postgresql") else mariadb.query
        for statement in statements:
            query(self.administrator, statement)  # type: ignore[arg-type]

    def treat(self, check: dict[str, Any]) -> None:
        """Run the commands that a line of the report names, as they stand there."""
        assert check["commands"], check
        for command in check["commands"]:
            self.ran.append(command["text"])
            if command["kind"] == "sql":
                self.sql(command["text"])
            else:
                self._shell(shlex.split(command["text"]))

    def _shell(self, words: list[str]) -> None:
        program, *arguments = words
        if program == "rabbitmqctl":
            assert self.rabbitmqctl is not None
            self.rabbitmqctl(*arguments)
            return
        verb = tuple(arguments[:2])
        if program == "idemp" and verb in _done:
            # The same words once more: a process of its own spends two seconds on starting Python.
            self._fresh_app().close()
            assert self.cli(*arguments).code == 0
            return
        _done.add(verb)
        known = {"idemp": str(IDEMP), "redis-cli": "redis-cli"}
        done = subprocess.run([known[program], *arguments], check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "ERR" not in done.stdout

    def _fresh_app(self) -> App:
        sys.modules.pop(self.where.partition(":")[0], None)
        return load_app(self.where)


@pytest.fixture
def patient(cli: Cli, folder: Path) -> Patient:
    """On SQLite and the local broker, healthy; tests name other servers and break them."""
    module = f"patient_{next(_numbers)}"
    (folder / f"{module}.py").write_text(MODULE)
    return Patient(cli, f"{module}:app")


def on_database(patient: Patient, url: str, monkeypatch: pytest.MonkeyPatch, *, revision: str = "head") -> None:
    """Let the patient live on this database."""
    patient.administrator = url
    monkeypatch.setenv("IDEMP_DATABASE_URL", url)
    if revision:
        engine = create_engine_safely(url)
        upgrade(engine, Tables(), revision)
        engine.dispose()


@pytest.fixture
def on_sqlite(patient: Patient) -> Patient:
    """With tables in a file."""
    engine = create_engine_safely(os.environ["IDEMP_DATABASE_URL"])
    make_tables(engine)
    engine.dispose()
    return patient


@pytest.fixture
def on_rabbitmq(on_sqlite: Patient, rabbitmq_url: str, monkeypatch: pytest.MonkeyPatch) -> Patient:
    """With tables in a file, and all queues on a RabbitMQ, to which nobody publishes while one is made anew."""
    monkeypatch.setattr(rebuilding, "_WATCH", 0.01)
    monkeypatch.setenv("IDEMP_BROKER_URL", rabbitmq_url)
    on_sqlite.declare()
    return on_sqlite
