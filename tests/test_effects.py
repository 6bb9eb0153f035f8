"""The recipes for effects outside the database, as the page prints them, against real servers and a worker that dies anywhere."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Callable, Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Any

import pytest
from aiosmtpd.controller import Controller

from idemp.process import Process
from idemp.sql.records.failures import DeadLetters
from tests.servers.process import free_port
from tests.test_kills import some
from tests.world import World

PAGE = Path(__file__).parents[1] / "docs" / "effects.md"


class Mailbox:
    """A mail server; it refuses addresses that begin with `no`."""

    def __init__(self) -> None:
        self.mails: list[tuple[str, str, str]] = []

    async def handle_RCPT(self, server: Any, session: Any, envelope: Any, address: str, options: Any) -> str:  # noqa: N802
        if address.startswith("no"):
            return "550 no such user"
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:  # noqa: N802
        headers = dict(re.findall(r"^([\w-]+): (.*?)\r$", envelope.content.decode(), re.MULTILINE))
        self.mails.append((headers["Message-ID"], headers["To"], headers["Subject"]))
        return "250 OK"


class Provider(BaseHTTPRequestHandler):
    """A payment provider that remembers keys."""

    payments: dict[str, Any]
    asked: list[str]
    status: HTTPStatus

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(self.headers["Idempotency-Key"])
        if self.status is HTTPStatus.OK:
            self.payments.setdefault(self.headers["Idempotency-Key"], body)
        self.send_response(self.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


@pytest.fixture
def mailbox(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mailbox]:
    mailbox = Mailbox()
    controller = Controller(mailbox, hostname="127.0.0.1", port=free_port())
    controller.start()
    monkeypatch.setenv("SMTP_HOST", "127.0.0.1")
    monkeypatch.setenv("SMTP_PORT", str(controller.port))
    yield mailbox
    controller.stop()


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Provider]]:
    class Own(Provider):
        payments, asked, status = {}, [], HTTPStatus.OK

    server = ThreadingHTTPServer(("127.0.0.1", 0), Own)
    thread = Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("PAYMENT_URL", f"http://127.0.0.1:{server.server_port}/payments")
    yield Own
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Callable[[], ModuleType]]:
    """Load the module of the page, as a new process does."""
    (code,) = re.findall(r"^```python\n(# shop\.py\n.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "shop_of_the_page.py").write_text(code)
    spec = importlib.util.spec_from_file_location("shop_of_the_page", tmp_path / "shop_of_the_page.py")

    def load() -> ModuleType:
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["shop_of_the_page"] = module
        spec.loader.exec_module(module)
        return module

    yield load
    del sys.modules["shop_of_the_page"]


class Shop(World):
    """A world whose app is the one of the page."""

    load: Callable[[], ModuleType]

    def app(self) -> Any:
        module = self.load()
        module.app.process = Process(None, super().app().settings)
        self.apps.append(module.app)
        return module.app


@pytest.fixture
def begin(new_url: Callable[[], str], shop: Callable[[], ModuleType]) -> Iterator[Callable[[str], Shop]]:
    worlds: list[Shop] = []

    def begin(mail: str = "ada@example.org") -> Shop:
        world = Shop(new_url())
        world.load = shop
        worlds.append(world)
        for _ in range(2):  # a copy
            body = json.dumps({"order_id": 7, "mail": mail, "cents": 500}).encode()
            world.send_raw(body, {"type": "shop.PlaceOrder", "message_id": "x"})
        return world

    yield begin
    for world in worlds:
        world.close()


def test_each_effect_has_one_id_wherever_the_process_dies(
    begin: Callable[..., Shop], mailbox: Mailbox, provider: type[Provider]
) -> None:
    for at in some(2):
        mailbox.mails.clear()
        provider.payments.clear()
        provider.asked.clear()
        world = begin()
        name = world.crash(at)
        world.recover()
        (mail,) = set(mailbox.mails)
        assert mail[1:] == ("ada@example.org", "Your order 7")
        assert list(provider.payments.values()) == [{"order": 7, "cents": 500}]
        assert max(len(mailbox.mails), len(provider.asked)) <= (2 if name else 1), name
        assert (world.rows(), world.dead()) == ([], [])
        world.close()
        if not name:
            break
    assert at > 10


def test_what_another_attempt_does_not_change_is_a_dead_letter(
    begin: Callable[..., Shop], mailbox: Mailbox, provider: type[Provider]
) -> None:
    provider.status = HTTPStatus.UNPROCESSABLE_ENTITY
    world = begin(mail="nobody@example.org")
    world.work(world.worker())
    dead = DeadLetters(world.database).find()
    assert sorted((letter.type, letter.rule) for letter in dead) == [
        ("shop.SendMail", "refused"),
        ("shop.TakePayment", "refused"),
    ]


def test_an_outage_of_the_other_side_is_waited_for(
    begin: Callable[..., Shop], mailbox: Mailbox, provider: type[Provider]
) -> None:
    provider.status = HTTPStatus.SERVICE_UNAVAILABLE
    world = begin()
    worker = world.worker()
    world.work(worker)
    assert (len(mailbox.mails), provider.payments, world.dead()) == (1, {}, [])
    provider.status = HTTPStatus.OK
    world.pass_time(60)
    world.work(worker)
    assert (len(provider.payments), len(set(provider.asked)), len(mailbox.mails)) == (1, 1, 1)


@pytest.mark.parametrize(
    ("to", "subject"),
    [
        ("ada@example.org\r\nBcc: eve@example.org", "x"),
        ("ada@example.org", "x\r\nBcc: eve@example.org"),
        ("ada@example.org", "=?utf-8?q?x=0D=0ABcc:_eve@example.org?="),
    ],
)
def test_texts_of_strangers_add_no_header(
    begin: Callable[..., Shop], mailbox: Mailbox, provider: type[Provider], to: str, subject: str
) -> None:
    world = begin()
    worker = world.worker()
    world.work(worker)
    mailbox.mails.clear()
    body = json.dumps({"to": to, "subject": subject, "text": "x"}).encode()
    world.send_raw(body, {"type": "shop.SendMail", "message_id": "y"})
    for _ in range(12):
        world.work(worker)
        world.pass_time(721)  # more than 10 minutes with the longest jitter
    assert mailbox.mails == []
    assert len(world.dead()) == 1
