"""The how-to "Keep state in a document store": its code runs, and its figures are those of the code."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest

from idemp import App, Idempotent, Message, Outcome
from idemp.broker.memory import InMemoryBroker
from idemp.broker.port import Binding, Delivery, Topology
from idemp.dispatch import Dispatcher
from idemp.inbox.document import Document, InMemoryDocuments, couchdb, dynamodb
from idemp.protocol import Protocol
from idemp.testing.clock import FakeClock
from tests.docs.pages import blocks, page

PAGE = page("how-to/document-stores.md")


class Counting(InMemoryDocuments):
    """Counts what it is asked."""

    asked = deleted_or_scanned = 0

    def read(self, id: str) -> Document | None:
        self.asked += 1
        return super().read(id)

    def write(self, *arguments: Any) -> str:
        self.asked += 1
        return super().write(*arguments)

    def delete(self, *arguments: Any) -> None:
        self.asked += 1
        self.deleted_or_scanned += 1
        super().delete(*arguments)

    def scan(self, *arguments: Any) -> Any:
        self.asked += 1
        self.deleted_or_scanned += 1
        return super().scan(*arguments)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the page defines; its collections in memory count, those on servers are asked nothing."""
    monkeypatch.setattr("idemp.inbox.document.InMemoryDocuments", Counting)
    in_memory, *servers = blocks(PAGE, "python")
    names: dict[str, Any] = {}
    exec(compiled(in_memory), names)
    kept = dict(names)
    for block in servers:
        exec(compiled(block), names)
        if isinstance(names["carts"], couchdb.CouchDocuments | dynamodb.DynamoDocuments):
            names["store"].close()
    return kept


def test_the_page(names: dict[str, Any]) -> None:
    app: App = names["app"]
    carts, own = names["carts"], names["own"]
    broker = InMemoryBroker(FakeClock())
    broker.declare(Topology(exchange="idemp", queues=("mail",), bindings=(Binding("mail", "carts.ItemAdded"),)))
    app.registry.build({})
    app.store.refresh_horizons(app.name, app.retentions().values())
    dispatcher = Dispatcher(broker.publisher(), app.store, FakeClock())
    protocol = Protocol(app.consumer, dispatcher)

    def requests(call: Callable[[], object]) -> tuple[int, int]:
        carts.asked = own.asked = 0
        call()
        return carts.asked, own.asked

    def deliver(message: Message, *, redelivered: bool = False) -> Outcome:
        return protocol.handle(Delivery(message=message, queue="carts", redelivered=redelivered))[0]

    told = figures()
    first, again = adding("a"), adding("b")
    assert deliver(first) is Outcome.HANDLED
    dispatcher.flush()
    assert requests(lambda: deliver(again)) == told["a message with outputs"]
    assert requests(dispatcher.flush) == told["its confirms, recorded later in batches, each"]
    assert requests(lambda: deliver(again, redelivered=True)) == told["a redelivered one with outputs"]
    assert deliver(again) is Outcome.REDISPATCHED
    app.store.purge(app.name, {"carts.AddItem": timedelta(days=7)}, 100)
    assert (carts.deleted_or_scanned, own.deleted_or_scanned > 0) == (0, True), "the how-to about rights"
    cart = carts.read("cart-7").body
    assert cart["items"] == ["a", "b"]
    size = len(json.dumps(cart["idemp"]["carts"]["ids"], separators=(",", ":"))) / 2
    assert re.search(r"An id takes about (\d+) bytes", PAGE)[1] == f"{round(size, -1):.0f}"


def test_a_message_without_outputs(names: dict[str, Any]) -> None:
    app: App = names["app"]
    app.handler(dict, type="carts.Touch", policy=Idempotent(entity="cart"))(lambda message: None)
    app.registry.build({})
    app.store.refresh_horizons(app.name, app.retentions().values())
    protocol = Protocol(app.consumer, Dispatcher(InMemoryBroker(FakeClock()).publisher(), app.store, FakeClock()))
    names["carts"].asked = names["own"].asked = 0
    assert protocol.process(Message(body=b'{"cart": "cart-7"}', type="carts.Touch", message_id="1")) is Outcome.HANDLED
    assert (names["carts"].asked, names["own"].asked) == figures()["a message without outputs"]


def test_numbers_of_the_page() -> None:
    assert f"Connecting may take {couchdb.CONNECT_SECONDS:g} s" in PAGE
    assert couchdb.CONNECT_SECONDS == dynamodb.CONNECT_SECONDS
    assert dynamodb.LARGEST == 400_000
    assert "**400 KB** for a document" in PAGE
    assert couchdb.LARGEST == 8_000_000
    assert "other than 8 MB" in PAGE


def compiled(block: str) -> Any:
    """As a module of its own, without this one's `from __future__`."""
    return compile(block, "document-stores.md", "exec", dont_inherit=True)


def adding(sku: str) -> Message:
    body = {"request_id": str(uuid4()), "cart": "cart-7", "sku": sku}
    return Message(body=json.dumps(body).encode(), type="carts.AddItem", message_id=str(uuid4()))


def figures() -> dict[str, tuple[int, int]]:
    """The table of requests."""
    rows = re.findall(r"^\| (.+?) \| (\d+) \| (\d+) \|$", PAGE, re.MULTILINE)
    return {what: (int(states), int(own)) for what, states, own in rows}
