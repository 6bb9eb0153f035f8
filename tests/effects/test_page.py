"""The how-to "Send mails and call others": its code runs, against servers of our own."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from idemp.broker.memory import InMemoryBroker
from idemp.broker.port import Delivery
from idemp.dispatch import Dispatcher
from idemp.effects import EffectRunner, http, smtp
from idemp.inbox.memory import InMemoryStore
from idemp.messages import Message
from idemp.protocol import Protocol
from idemp.worker import Worker
from tests.docs.pages import blocks, page
from tests.effects.conftest import Post, Web
from tests.servers.process import wait_until


def test_the_page(post: Post, web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    smtps, https = smtp.Smtp, http.Http

    def here(host: str, *, sender: str, user: str, password: Any) -> Any:
        assert (user, password()) == ("shop", "s3cret")
        return smtps("127.0.0.1", port=post.port, sender=sender, security="none")

    monkeypatch.setenv("SMTP_PASSWORD", "s3cret")
    monkeypatch.setenv("PAY_TOKEN", "t0ken")
    monkeypatch.setattr(smtp, "Smtp", here)
    monkeypatch.setattr(http, "Http", lambda url, headers: https(f"{web.url}/v1", headers=headers))
    names: dict[str, Any] = {"__name__": "orders"}
    for block in blocks(page("how-to/external-effects.md"), "python"):
        exec(compile(block, "external-effects.md", "exec", dont_inherit=True), names)  # annotations as they stand

    app = names["app"]
    app._store = app._store_given = InMemoryStore()
    app._broker_given = broker = InMemoryBroker()
    body = b'{"order_id": 42, "mail": "ann@example.org", "cents": 995}'
    worker = Worker([app])
    thread = threading.Thread(target=worker.run, daemon=True)
    thread.start()
    protocol = Protocol(app.consumer, Dispatcher(broker.publisher(), app.store, app.clock))
    for _ in range(3):
        protocol.handle(
            Delivery(message=Message(body=body, type="orders.PlaceOrder", message_id="m-1"), queue="orders")
        )
    try:
        wait_until(lambda: app.store.pending_count() == 0, "both effects")
    finally:
        worker.stop()
        thread.join(30)
    assert [mail.rcpt_tos for mail in post.mails] == [["ann@example.org"]]
    ((_, path, headers, sent),) = web.asked
    assert (path, headers["Authorization"]) == ("/v1/captures", "Bearer t0ken")
    assert json.loads(sent) == {"order": 42, "cents": 995}
    assert EffectRunner(app.store.upkeep, app.name, app.registry.effects).run_once().taken == 0
