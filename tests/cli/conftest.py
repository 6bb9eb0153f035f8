"""A small shop in a directory of its own: SQLite, the local broker, and a module with an App."""

from __future__ import annotations

import itertools
import json
import os
import sys
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest
from typer import testing
from typer.testing import CliRunner

from idemp.classification import MAX_DEFERRALS
from idemp.cli import root
from idemp.cli.loading import load_app
from idemp.inbox.sql import create_engine_safely
from idemp.messages import DEFERRED_HEADER, Message, Output, OutputKind
from tests.inbox.sql.kept import make_tables

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from idemp import App

# The tree of commands is the same for all calls, and made anew for each it takes longer than most of them.
testing._get_command = cache(testing._get_command)  # type: ignore[attr-defined]

_numbers = itertools.count()

MODULE = """
from idemp import App, Idempotent, Refuse
from idemp.effects import EffectRefused

app = App("shop")


@app.handler(dict, type="shop.Order", policy=Idempotent(key="order_id"))
def order(message, ctx):
    if message.get("refuse"):
        raise Refuse("no such customer")
    ctx.send({"order_id": message["order_id"]}, to="out", type="shop.Done")
    if message.get("lost"):
        ctx.send({}, to="nowhere", type="shop.Lost")
    if message.get("mail"):
        ctx.effect("mail.receipt", {"to": message["mail"]})


@app.effect("mail.receipt")
def receipt(value: dict):
    if value["to"] == "nobody":
        raise EffectRefused("550 no such mailbox")


@app.handler(dict, type="shop.Ping")
def ping(message):
    pass
"""


@dataclass
class Shop:
    """The shop's directory and module."""

    folder: Path
    module: str

    @property
    def where(self) -> str:
        return f"{self.module}:app"

    @property
    def app(self) -> App:
        return load_app(self.where)

    def declare(self) -> None:
        """Its queue, and the queue `out`."""
        self.app.start()
        topology = self.app.topology()
        self.app.broker.declare(type(topology)(exchange="idemp", queues=("out",)))

    def send(self, body: dict[str, Any], type: str = "shop.Order", timestamp: datetime | None = None) -> str:
        """Send to its queue; the message id."""
        output_id = uuid4()
        headers = {} if type.startswith("shop.Order") else {DEFERRED_HEADER: MAX_DEFERRALS}  # it has gone round
        message = Message(
            body=json.dumps(body).encode(), type=type, message_id=str(output_id), timestamp=timestamp, headers=headers
        )
        output = Output(id=output_id, ordinal=0, kind=OutputKind.SEND, exchange="", routing_key="shop", message=message)
        publisher = self.app.broker.publisher()
        assert publisher.publish([output], 10) == [None]
        publisher.close()
        return str(output_id)

    def work(self) -> None:
        """Handle what is ready, as a worker's thread does."""
        left, publisher = self.app.broker.depth("shop"), self.app.broker.publisher()
        receiver, protocol = self.app.broker.receiver(["shop"], prefetch=10), self.app.protocol(publisher)
        while (delivery := receiver.receive(30 if left > 0 else 0)) is not None:
            receiver.settle(delivery, protocol.handle(delivery)[1])
            left -= 1
        protocol.dispatcher.flush()
        receiver.close()
        publisher.close()


@dataclass
class Answer:
    """What a command answered."""

    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        return json.loads(self.out)

    @property
    def error(self) -> Any:
        return json.loads(self.err.splitlines()[-1])["error"]


class Cli:
    """Runs commands in this process."""

    def __call__(self, *arguments: str, input: str | None = None) -> Answer:
        result = CliRunner().invoke(root, list(arguments), input=input)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Answer(result.exit_code, result.stdout, result.stderr)


@pytest.fixture
def cli() -> Cli:
    return Cli()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current directory, with settings for everything in it."""
    for name in [name for name in os.environ if name.startswith("IDEMP_") and not name.startswith("IDEMP_TEST_")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("IDEMP_DATABASE_URL", f"sqlite:///{tmp_path}/shop.db")
    monkeypatch.setenv("IDEMP_BROKER_URL", f"local://{tmp_path}/broker.db")
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def empty_shop(folder: Path) -> Shop:
    """A module, and neither tables nor queues."""
    module = f"shop_{next(_numbers)}"
    (folder / f"{module}.py").write_text(MODULE)
    return Shop(folder, module)


@pytest.fixture
def shop(empty_shop: Shop) -> Shop:
    """With tables and queues."""
    make_tables(create_engine_safely(os.environ["IDEMP_DATABASE_URL"]))
    empty_shop.declare()
    return empty_shop
