"""Hooks and log events."""

from __future__ import annotations

import json
import logging
import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from idemp import App, Context, Hooks, Idempotent, Retry, Settings
from idemp.events import EVENTS, JsonLines
from idemp.sql.records.waiting import check_waiting, read_waiting
from tests.world import QUEUE, Order, Shipped, World, effect, insert_and_send


class Notes(Hooks):
    def __init__(self) -> None:
        self.notes: list[Any] = []

    def before_handle(self, handling: Any) -> None:
        self.notes.append(("before", handling.message.order_id))

    def after_commit(self, handling: Any) -> None:
        self.notes.append(("commit", handling.message.order_id, len(handling.outputs)))

    def on_duplicate(self, handling: Any) -> None:
        self.notes.append(("duplicate", handling.message.order_id))

    def on_hold(self, reason: str) -> None:
        self.notes.append(("hold", reason))

    def on_settled(self, handling: Any) -> None:
        self.notes.append(("settled", handling.message.order_id, handling.action.value if handling.action else "ack"))


class Broken(Hooks):
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


def start(world: World, *hooks: Hooks) -> Any:
    make = world.app

    def app() -> App:
        made = make()
        made.hooks = hooks
        return made

    world.app = app  # type: ignore[method-assign]
    return world.worker()


def test_hooks_see_each_step_and_their_errors_change_nothing(url: str, caplog: pytest.LogCaptureFixture) -> None:
    def handle(message: Order, ctx: Context) -> None:
        if message.order_id == "2":
            raise RuntimeError("boom")
        insert_and_send(message, ctx)

    world, notes = World(url, handle, Idempotent(key="order_id", retry=Retry(attempts=2, delays=(0.0,)))), Notes()
    worker = start(world, Broken(), notes)
    world.send("1", "1", "2")
    world.work(worker)
    assert notes.notes == [
        ("before", "1"),
        ("commit", "1", 3),
        ("settled", "1", "ack"),
        ("duplicate", "1"),
        ("before", "2"),
        ("settled", "1", "ack"),
        ("settled", "2", "retry"),
        ("before", "2"),
        ("settled", "2", "park"),
    ]
    assert world.effects() == {"1": 1}
    failed = [record.fields["hook"] for record in caplog.records if record.event == "hook.failed"]  # type: ignore[attr-defined]
    assert len(failed) == len(set(failed)) == 4


def test_a_hold_is_a_hook(url: str) -> None:
    world, notes = World(url), Notes()
    worker = start(world, notes)
    world.send("1")
    connect = worker.adapters.store.connect
    worker.adapters.store.connect = lambda: (_ for _ in ()).throw(sqlite3.OperationalError("gone"))
    worker.adapters.store.probe = lambda: False
    worker.step(poll=0.0)
    worker.adapters.store.connect = connect
    world.work(worker)
    assert [note[0] for note in notes.notes] == ["hold", "before", "commit", "settled"]


def test_each_event_is_used() -> None:
    code = "\n".join(path.read_text() for path in Path(__file__).parent.parent.joinpath("idemp").rglob("*.py"))
    used = set(re.findall(r'\blog\(\s*"([a-z.]+)"', code)) | set(re.findall(r'target=log, args=\("([a-z.]+)"', code))
    assert used == set(EVENTS)


def test_records_carry_events_and_become_lines_of_json(url: str, caplog: pytest.LogCaptureFixture) -> None:
    def fail(message: Order, ctx: Context) -> None:
        raise RuntimeError("boom\x1b[2J\n")

    world = World(url, fail, Idempotent(key="order_id", retry=Retry(attempts=1)))
    world.send("1", message_id="7")
    world.work(world.worker())
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    line = JsonLines().format(record)
    assert "\n" not in line
    said = json.loads(line)
    assert (said["event"], said["rule"], said["id"], said["attempts"]) == ("message.parked", "handler", "7", 1)
    assert said["error"] == "RuntimeError: boom\\x1b[2J"
    text = "message.parked: parked 'shop.Order' (id '7'), which failed once: handler: RuntimeError: boom\\x1b[2J ("
    assert said["text"].startswith(text)
    assert re.search(rf" \({re.escape(__file__)}, line \d+\)$", said["text"])
    assert "in fail" in said["trace"]


def test_messages_that_no_handler_takes_are_named(url: str, caplog: pytest.LogCaptureFixture) -> None:
    from idemp.worker import Worker

    app = App(QUEUE, settings=Settings(database_url=url, messages={"shop.Ordr": {"key": "order_id"}}))
    app.handler(Order)(lambda message: None)
    worker = Worker(app)
    worker.stop()
    worker.run()
    assert "configured, and not handled by this app: shop.Ordr" in caplog.text
    app.close()


def test_hooks_run_behind_the_transaction(url: str) -> None:
    class Writing(Notes):
        def on_duplicate(self, handling: Any) -> None:
            with world.database.short() as connection:
                connection.execute(effect.insert(), {"what": "hook"})

    world = World(url)
    worker = start(world, Writing())
    world.send("1", "1")
    world.work(worker)
    assert world.effects() == {"1": 1, "hook": 1}


def test_an_output_that_no_queue_takes_is_said_at_once_and_in_the_end(url: str, caplog: pytest.LogCaptureFixture) -> None:
    def send(message: Order, ctx: Context) -> None:
        ctx.send(Shipped(order_id=message.order_id, part=0), to="stok")
        ctx.publish(Shipped(order_id=message.order_id, part=1))

    world = World(url, send)
    world.send("1", "2")
    worker = world.worker()
    worker.step(poll=0.0)
    worker.step(poll=0.0)
    refused = [record.fields for record in caplog.records if record.event == "output.refused"]
    assert sum(each["count"] for each in refused) == 4
    assert {(each["type"], each["to"], each["reason"]) for each in refused} == {
        ("shop.Shipped", "the queue 'stok'", "no queue takes 'stok'"),
        ("shop.Shipped", "its subscribers", "no queue takes 'shop.Shipped'"),
    }
    (finding,) = check_waiting(read_waiting(world.database), {})
    assert (finding.level, finding.fix) == ("yellow", "idemp inbox list --pending")
    assert finding.text.startswith("no queue has taken 4 outputs yet")
    for _ in range(8):
        world.pass_time(600)
        worker.relay.turn()
    ended = [record.fields for record in caplog.records if record.event == "output.quarantined"]
    assert sum(each["count"] for each in ended) == 4
    assert len([record for record in caplog.records if record.event == "output.refused"]) == len(refused)
