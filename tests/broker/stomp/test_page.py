"""The how-to on ActiveMQ: its broker starts, its app and its commands run as they stand there."""

from __future__ import annotations

import json
import shlex
from contextlib import closing
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest

from idemp.broker.stomp import StompBroker
from idemp.messages import Message, Output, OutputKind
from tests.docs.pages import blocks, page, run, work_until, write_files
from tests.servers.activemq import ActiveMQ
from tests.servers.fixtures import private

if TYPE_CHECKING:
    from pathlib import Path


pytestmark = pytest.mark.slow

PAGE = page("how-to/activemq.md")
ORDER = "00000000-0000-0000-0000-000000000007"


class OfThePage(ActiveMQ):
    """Configured as the page says, elsewhere."""

    def configuration(self) -> str:
        (text,) = blocks(PAGE, "xml")
        for there, here in (("/var/lib/activemq/shop", str(self.data)), ("127.0.0.1:61613", f"127.0.0.1:{self.port}")):
            assert there in text
            text = text.replace(there, here)
        return text


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(PAGE, tmp_path, "shop.py", "send.py")
    upgrade, declare, doctor, _worker = (
        shlex.split(line.removeprefix("$ "))[1:] for line in blocks(PAGE, "console")[0].splitlines()
    )
    with private(OfThePage) as server:
        monkeypatch.setenv("BROKER", server.url)
        run(tmp_path, "-m", "idemp", *upgrade)
        run(tmp_path, "-m", "idemp", *declare)
        assert "ActiveMQ/5" in run(tmp_path, "-m", "idemp", *doctor)
        run(tmp_path, "send.py")
        send_nonsense(server.url)
        printed = tmp_path / "printed"
        work_until(tmp_path, "shop:app", lambda: done(printed.read_text(), server.url), "all are done")
        assert printed.read_text().count(f"order {ORDER}") == 1
        letters = json.loads(run(tmp_path, "-m", "idemp", "dead", "list", "--app", "shop:app", "--json"))
        assert [letter["reason"] for letter in letters] == ["UndecodableMessage"]
        run(tmp_path, "-m", "idemp", "dead", "replay", "--app", "shop:app", "--all")
        broker = StompBroker(server.url)
        assert (broker.depth("shop.dead"), broker.depth("shop")) == (0, 1)


def done(printed: str, url: str) -> bool:
    return f"thanks for {ORDER}" in printed and StompBroker(url).depth("shop.dead") == 1


def send_nonsense(url: str) -> None:
    message = Message(body=b"{", type="shop.PlaceOrder", message_id="nonsense")
    output = Output(id=uuid4(), ordinal=0, kind=OutputKind.SEND, exchange="", routing_key="shop", message=message)
    with closing(StompBroker(url).publisher()) as publisher:
        assert publisher.publish([output], 10.0) == [None]
