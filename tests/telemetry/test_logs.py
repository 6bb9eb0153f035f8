"""What lines of a handler say about its message, and the hook of the page on logging."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import logging.handlers
import re
import threading
from collections.abc import Callable, Iterator
from contextvars import copy_context
from pathlib import Path
from typing import Any

import pytest
import sentry_sdk
from pydantic import BaseModel
from sentry_sdk.transport import Transport

from idemp import App, AsyncContext, Context, Idempotent, Policy, Refuse, Retry
from idemp.events import JsonLines, MessageFields, message_fields
from tests.world import Order

PAGE = Path(__file__).parents[2] / "docs" / "logging.md"
log = logging.getLogger("tests.shop")


class Paid(BaseModel):
    __message_type__ = "shop.Paid"
    order_id: str


class Many(BaseModel):
    __message_type__ = "shop.Many"
    number: int


class Sent(Transport):
    def __init__(self) -> None:
        super().__init__()
        self.envelopes: list[Any] = []

    def capture_envelope(self, envelope: Any) -> None:
        self.envelopes.append(envelope)


@pytest.fixture
def lines() -> Iterator[Callable[[], list[str]]]:
    """Lines of the logger, in a format that names the message; the lines of JSON follow each."""
    text, root = io.StringIO(), logging.getLogger("tests")
    plain, as_json = logging.StreamHandler(text), logging.StreamHandler(text)
    plain.addFilter(MessageFields())
    plain.setFormatter(
        logging.Formatter("%(consumer)s|%(message_type)s|%(message_id)s|%(correlation_id)s|%(attempt)s|%(message)s")
    )
    as_json.setFormatter(JsonLines())
    root.handlers = [plain, as_json]
    root.setLevel("INFO")
    yield lambda: text.getvalue().splitlines()
    root.handlers = []
    root.setLevel("NOTSET")


def test_each_line_of_a_handler_names_its_message(lines: Callable[[], list[str]]) -> None:
    app, retry = App("shop"), Retry(attempts=2, delays=(0,))

    @app.handler(Order, policy=Idempotent(key="order_id", retry=retry))
    def handle(message: Order, ctx: Context) -> Paid:
        log.info("plain")
        thread = threading.Thread(target=copy_context().run, args=(log.info, "thread"))
        thread.start()
        thread.join()
        if ctx.attempt == 1:
            raise ValueError("again")
        return Paid(order_id=message.order_id)

    @app.handler(Many, policy=Idempotent(key="number", batch=5))
    def many(messages: list[Many]) -> None:
        log.info("many")

    with app.test() as test:
        test.send(Order(order_id="1"), message_id="m\n1", correlation_id="c1")
        for number in range(3):
            test.send(Many(number=number))
        test.run_until_idle(raises=False)
        log.info("outside")
    found = lines()
    plain = [line for line in found if "{" not in line]
    assert [line for line in plain if "Order" in line] == [
        f"shop|shop.Order|m\\n1|c1|{attempt}|{text}" for attempt in (1, 2) for text in ("plain", "thread")
    ]
    assert "shop|shop.Many|-|-|-|many" in plain  # the first one has run alone
    assert plain[-1] == "-|-|-|-|-|outside"
    document = json.loads(next(line for line in found if '"plain"' in line))
    assert {name: document[name] for name in ("text", "message_id", "correlation_id", "attempt")} == {
        "text": "plain", "message_id": "m\\n1", "correlation_id": "c1", "attempt": 1
    }  # fmt: skip
    assert "message_id" not in json.loads(found[-1])
    assert message_fields() == {}


def test_tasks_at_once_log_their_own_messages(lines: Callable[[], list[str]]) -> None:
    app = App("shop")

    @app.handler(Order, policy=Policy())
    async def handle(message: Order, ctx: AsyncContext) -> None:
        log.info("begin %s", message.order_id)
        await asyncio.sleep(0)
        await asyncio.create_task(later(message.order_id))

    async def later(id: str) -> None:
        log.info("end %s", id)

    with app.test() as test:
        for id in "abc":
            test.send(Order(order_id=id), message_id=id)
        test.run_until_idle()
    found = [line.split("|") for line in lines() if "{" not in line]
    assert sorted((fields[2], fields[3], fields[5]) for fields in found) == sorted(
        (id, id, f"{step} {id}") for id in "abc" for step in ("begin", "end")
    )


def test_what_goes_on_after_a_handler_names_no_message(lines: Callable[[], list[str]]) -> None:
    app, tasks, go_on = App("shop"), list[Any](), list[asyncio.Event]()

    @app.handler(Order, policy=Policy())
    async def handle(message: Order, ctx: AsyncContext) -> None:
        if not tasks:
            go_on.append(asyncio.Event())
            tasks.append(asyncio.create_task(later()))
        else:
            go_on[0].set()
            await tasks[0]

    async def later() -> None:
        await go_on[0].wait()
        log.info("later")

    with app.test() as test:
        for id in "ab":
            test.send(Order(order_id=id), message_id=id)
            test.run_until_idle()
    assert [line for line in lines() if "{" not in line] == ["-|-|-|-|-|later"]


def test_lines_of_json_behind_a_buffer_name_their_own_messages() -> None:
    app, text, root = App("shop"), io.StringIO(), logging.getLogger("tests")
    target = logging.StreamHandler(text)
    target.setFormatter(JsonLines())
    buffer = logging.handlers.MemoryHandler(100, target=target)
    buffer.addFilter(MessageFields())
    root.handlers = [buffer]
    root.setLevel("INFO")

    @app.handler(Order, policy=Policy())
    def handle(message: Order) -> None:
        log.info("handled")
        if message.order_id == "b":
            buffer.flush()

    with app.test() as test:
        for id in "ab":
            test.send(Order(order_id=id), message_id=id)
        test.run_until_idle()
    root.handlers = []
    root.setLevel("NOTSET")
    assert [json.loads(line)["message_id"] for line in text.getvalue().splitlines()] == ["a", "b"]


def test_the_hook_of_the_page_reports_each_dead_letter_once(monkeypatch: pytest.MonkeyPatch) -> None:
    (text,) = re.findall(r"```python\n# alarm.py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    page: dict[str, Any] = {}
    exec(text, page)
    sent = Sent()
    sentry_sdk.init("http://key@127.0.0.1:9/1", transport=sent, default_integrations=False)
    app = App("shop", hooks=[page["ToSentry"]()])

    @app.handler(Order, policy=Idempotent(key="order_id", retry=Retry(attempts=2, delays=(0,))))
    def handle(message: Order, ctx: Context) -> None:
        if message.order_id == "fails":
            raise ValueError("no such order")
        if message.order_id == "refused":
            raise Refuse("never")

    with app.test() as test:
        for id in ("ok", "fails", "refused"):
            test.send(Order(order_id=id))
        test.run_until_idle(raises=False)
    sentry_sdk.flush()
    events = [item.payload.json for envelope in sent.envelopes for item in envelope.items]
    found = {(event["exception"]["values"][-1]["value"], event["tags"]["idemp.rule"]) for event in events}
    assert (len(events), found) == (2, {("no such order", "handler"), ("never", "refused")})
    sentry_sdk.init()
