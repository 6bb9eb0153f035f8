"""The consuming loop: retries, groups, suspects and outages."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel
from sqlalchemy import text

from idemp import App, ConfigurationError, Context, Idempotent, Refuse, Retry
from idemp.errors import Unavailable
from idemp.messages import Delivery
from idemp.ports import NewRow
from idemp.sql import sqlite
from idemp.sql.scheduler import SqlScheduler
from idemp.testing import Crash, CrashPoints
from idemp.worker import Worker
from tests.world import QUEUE, SINK, Order, World, insert_and_send


def wait_for(condition: Callable[[], Any], seconds: float = float(os.environ.get("IDEMP_TEST_PATIENCE", "60"))) -> None:
    """Wait until something is so; a seeded fault often means that it never is, which takes less patience to see.

    What takes long to ask is asked less often: a question to a server is a new connection, whose work delays what is waited for.
    """
    asked = time.monotonic()
    deadline = asked + seconds
    while not condition():
        now = time.monotonic()
        assert now < deadline, "it did not happen"
        time.sleep(min(max(0.005, 4 * (now - asked)), 0.02))
        asked = time.monotonic()


Begin = Callable[..., World]


def test_one_group_is_in_flight_while_the_next_one_executes(begin: Begin) -> None:
    """Its outputs are sent before, and its confirms and its ack come behind; what is slow is not run before them."""
    seen: list[str] = []

    def handle(message: Order, ctx: Context) -> None:
        insert_and_send(message, ctx)
        seen.append(message.order_id)

    world = begin(handle, settings={"group": 1})
    points = CrashPoints(None)
    worker = world.worker(points)
    world.send("1", "2", "slow")
    wanted = ("store.finish", "publisher.send", "publisher.publish", "receiver.ack")

    def step(seconds: float) -> list[str]:
        points.names.clear()
        worker.app.handlers["shop.Order"].seconds = seconds  # however long the last run took
        worker.step(poll=0.0)
        return [name.removesuffix(" after") for name in points.names if name.removesuffix(" after") in wanted]

    assert step(0.0) == ["store.finish", "publisher.send"]
    assert step(0.0) == ["store.finish", "publisher.publish", "receiver.ack", "publisher.send"]
    assert step(1.0) == [
        "publisher.publish",
        "receiver.ack",
        "store.finish",
        "publisher.send",
        "publisher.publish",
        "receiver.ack",
    ]
    assert (seen, world.rows()) == (["1", "2", "slow"], [])


def test_three_hundred_messages_run_exactly_as_often_as_they_should(begin: Begin) -> None:
    def handle(message: Order, ctx: Context) -> None:
        insert_and_send(message, ctx)
        kind = message.order_id.split("-")[0]
        if kind == "always" or (kind == "once" and world.runs[message.order_id] == 1):
            raise RuntimeError("boom")

    retry = Retry(attempts=3, delays=("1h",), jitter=0)
    world = begin(handle, policy=Idempotent(key="order_id", retry=retry))
    world.send(*(f"{kind}-{number}" for number in range(100) for kind in ("good", "once", "always")))
    worker = world.worker()
    world.work(worker)
    assert len(world.effects()) == 100  # retries that wait hold nobody up
    assert len(world.rows()) == 200
    for _ in range(3):
        world.pass_time(3601)
        worker.upkeep()
        world.work(worker)
    runs: dict[str, set[int]] = {}
    for id, count in world.runs.items():
        runs.setdefault(id.split("-")[0], set()).add(count)
    assert runs == {"good": {1}, "once": {2}, "always": {3}}
    assert len(world.runs) == 300
    assert world.effects() == {f"{kind}-{number}": 1 for number in range(100) for kind in ("good", "once")}
    dead = world.dead()
    assert len(dead) == 100
    assert all((each["attempts"], each["times"], each["rule"]) == (3, 3, "handler") for each in dead)
    assert "RuntimeError: boom" in dead[0]["error"]
    assert "in handle" in dead[0]["trace"]


def test_two_deliveries_of_a_failing_message_make_one_retry_and_one_dead_letter(begin: Begin) -> None:
    def fail(message: Order, ctx: Context) -> None:
        raise RuntimeError("boom")

    retry = Retry(attempts=3, delays=("1h",), jitter=0)
    world = begin(fail, policy=Idempotent(key="order_id", retry=retry), settings={"group": 1})
    world.send("1", message_id="copy")
    world.send("1", message_id="copy")
    workers = [world.worker(), world.worker()]
    for worker in workers:
        worker.step(poll=0.0)
    assert [(row.attempts, row.due_at is None) for row in world.rows()] == [(1, False)]
    for _ in range(2):
        world.pass_time(3601)
        world.work(workers[0])
    (dead,) = world.dead()
    assert (dead["attempts"], dead["times"], world.runs["1"], len(world.rows())) == (3, 3, 4, 1)


def test_a_crash_between_the_retrys_row_and_the_ack_makes_one_retry(begin: Begin) -> None:
    def fail(message: Order, ctx: Context) -> None:
        raise RuntimeError("boom")

    world = begin(fail)
    world.send("1")
    calm = CrashPoints()
    world.worker(calm).step(poll=0.0)
    ends = ["scheduler.settle before", "scheduler.settle after", "receiver.ack before", "receiver.ack after"]
    assert calm.names[-4:] == ends
    world.recover()
    world.send("2")
    with pytest.raises(Crash, match="scheduler.settle after"):
        world.worker(CrashPoints(calm.names.index("scheduler.settle after"))).step(poll=0.0)
    assert len(world.rows()) == 3  # the dead one, the retry and the delivery
    world.recover()
    assert [each["attempts"] for each in world.dead()] == [3, 3]
    assert len(world.rows()) == 2


class Slow(BaseModel):
    __message_type__ = "shop.Slow"
    number: int


def test_fast_messages_do_not_wait_for_slow_ones(begin: Begin) -> None:
    running, go_on = threading.Event(), threading.Event()

    def slow(message: Slow) -> None:
        running.set()
        assert go_on.wait(60)

    world = begin(policy=Idempotent())
    app = world.app()
    app.handler(Slow, policy=Idempotent())(slow)
    app.handlers["shop.Slow"].ran(2.0)  # as it was lately
    app.handlers["shop.Order"].ran(0.001)
    for number in range(10):
        world.send(f"{number}")
        if number % 3 == 0:
            world.send_raw(b'{"number": 1}', {"message_id": f"slow-{number}", "type": "shop.Slow"})
    worker = Worker(app)
    thread = threading.Thread(target=worker.run)
    thread.start()
    assert running.wait(60)
    # While the first slow handler runs, all fast messages are acknowledged and their outputs sent, and new ones wait for one slow run.
    assert len(world.rows()) == 4
    assert len(world.rows(SINK)) == 20
    world.send("new")
    running.clear()
    go_on.set()
    wait_for(lambda: "new" in world.effects())
    wait_for(lambda: not world.rows())
    worker.stop()
    thread.join(60)
    assert sum(world.effects().values()) == 11


def test_a_slow_neighbour_gets_its_turn_behind_each_group(begin: Begin) -> None:
    order: list[str] = []
    world = begin(lambda message, ctx: order.append(message.order_id), policy=Idempotent())
    app = world.app()
    app.handler(Slow, policy=Idempotent())(lambda message: order.append(f"slow {message.number}"))
    app.handlers["shop.Slow"].seconds = 10.0
    app.handlers["shop.Order"].seconds = 0.0
    for number in (1, 2):
        world.send_raw(b'{"number": %d}' % number, {"message_id": f"slow-{number}", "type": "shop.Slow"})
    worker = Worker(app)
    for name in ("a", "b"):
        world.send(name)
        worker.step(poll=0.0)
    assert order == ["a", "slow 1", "b", "slow 2"]


@pytest.mark.parametrize(
    ("error", "retry", "rule", "attempts"),
    [
        (Refuse("sold out"), Retry(), "refused", 0),
        (KeyError("x"), Retry(refuse_on=(LookupError,)), "refused", 0),
        (KeyError("x"), Retry(attempts=2, delays=(0.0,), refuse_on=(LookupError,), retry_on=(KeyError,)), "handler", 2),
        (ValueError("x"), Retry(retry_on=(KeyError,)), "refused", 0),
    ],
)
def test_a_policy_says_which_errors_run_again(begin: Begin, error: Exception, retry: Retry, rule: str, attempts: int) -> None:
    def fail(message: Order, ctx: Context) -> None:
        raise error

    world = begin(fail, policy=Idempotent(key="order_id", retry=retry))
    world.send("1")
    world.work(world.worker())
    (dead,) = world.dead()
    assert (dead["rule"], dead["attempts"]) == (rule, attempts)


def test_an_unknown_type_goes_round_uncounted_before_it_is_parked(begin: Begin) -> None:
    world = begin()
    world.send("1", type="shop.NextRelease")
    worker = world.worker()
    for rounds in range(1, 22):
        world.work(worker)
        (row,) = world.rows()
        assert (row.attempts, row.due_at is None) == (0, rounds == 21)
        world.pass_time(6)
        worker.upkeep()
    (dead,) = world.dead()
    assert (dead["rule"], dead["times"]) == ("unknown type", 21)


@pytest.mark.parametrize("body", [b"{", b"[1]", b'{"order_id": null}', b"\xff", b'{"order_id": "1", "order_id": "2"}'])
def test_what_cannot_be_read_is_parked_at_once_and_kept_as_it_came(begin: Begin, body: bytes) -> None:
    world = begin()
    world.send_raw(body, {"message_id": "bad", "type": "shop.Order"})
    world.send("good")
    world.work(world.worker())
    assert world.effects() == {"good": 1}
    assert [each["rule"] for each in world.dead()] == ["unreadable"]
    assert world.rows()[0].body == body


def rename(world: World, before: str, after: str) -> None:
    with world.database.short() as connection:
        connection.execute(text(f"ALTER TABLE {before} RENAME TO {after}"))


@pytest.mark.parametrize("table", ["idemp_inbox", "idemp_output", "idemp_pending"])
def test_consumption_pauses_while_the_database_takes_no_work(begin: Begin, caplog: pytest.LogCaptureFixture, table: str) -> None:
    caplog.set_level(logging.INFO, "idemp")
    world = begin()
    worker = world.worker()
    rename(world, table, "gone")
    world.send("1", "2", "3")
    for _ in range(3):
        worker.step(poll=0.0)
    assert [row.deliveries for row in world.rows()] == [1, 1, 1]  # in hand, not given back
    assert (world.effects(), len(worker.intake.held)) == ({}, 3)
    rename(world, "gone", table)
    world.work(worker)
    assert (world.effects(), world.dead(), world.rows()) == ({"1": 1, "2": 1, "3": 1}, [], [])
    assert set(world.runs.values()) <= ({1} if table == "idemp_inbox" else {1, 2, 3, 4})
    lines = [record.event for record in caplog.records if record.event in ("worker.paused", "worker.resumed")]
    assert lines == ["worker.paused", "worker.resumed"]


def test_a_busy_database_is_neither_a_duplicate_nor_an_attempt(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "BUSY_SECONDS", 0.01)
    world = begin()
    world.send("1")
    worker = world.worker()
    with world.database.short():
        worker.step(poll=0.0)
        assert (len(worker.intake.held), world.runs["1"]) == (1, 0)
    (row,) = world.rows()
    assert (row.history, world.effects()) == (None, {})  # in hand, neither a retry nor a dead letter
    world.work(worker)
    assert (world.effects(), world.dead()) == ({"1": 1}, [])


def test_a_late_duplicate_in_the_same_process_waits_for_nobody(begin: Begin) -> None:
    world = begin()
    world.send("1", "1", "1")
    world.work(world.worker())
    assert (world.effects(), world.runs["1"], len(world.rows(SINK))) == ({"1": 1}, 1, 2)


def test_the_attempt_and_the_message_are_fresh_in_each_run(begin: Begin) -> None:
    seen: list[tuple[int, str]] = []

    def mutate(message: Order, ctx: Context) -> None:
        seen.append((ctx.attempt, message.order_id))
        message.order_id = "changed"
        raise RuntimeError("boom")

    world = begin(mutate)
    world.send("1")
    world.work(world.worker())
    assert seen == [(1, "1"), (2, "1"), (3, "1")]


def test_an_app_without_handlers_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="has no handlers"):
        Worker(App("empty"))


def test_the_relay_logs_an_outage_once(begin: Begin, caplog: pytest.LogCaptureFixture) -> None:
    from idemp.messages import Refusal
    from tests.test_promises import Refusing

    caplog.set_level(logging.INFO, "idemp")
    world = begin()
    world.send("1")
    worker = world.worker()
    away = True
    worker.relay.publisher = Refusing(worker.relay.publisher, lambda number: Refusal("closed") if away else None)
    worker.protocol.dispatcher.publisher = worker.relay.publisher
    worker.step(poll=0.0)
    for _ in range(4):
        world.pass_time(60)
        worker.relay.turn()
    away = False
    world.pass_time(60)
    worker.relay.turn()
    assert set(world.sent()) == {("1", 0), ("1", 1)}
    lines = [record.event for record in caplog.records if record.event.startswith("relay.")]
    assert lines == ["relay.refused", "relay.resumed"]


def test_the_relay_brings_outputs_into_quarantine(begin: Begin) -> None:
    world = begin(lambda message, ctx: ctx.send({"id": 7}, to="nowhere", type="shop.Lost"))
    world.send("1")
    worker = world.worker()
    worker.step(poll=0.0)
    for _ in range(8):
        world.pass_time(3600)
        worker.relay.turn()
    world.pass_time(3600)
    assert (world.pending(), world.due()) == (1, 0)


class Wrapped:
    """A port whose methods a test replaces."""

    def __init__(self, port: Any, **methods: Callable[..., Any]) -> None:
        self.__dict__.update(methods)
        self.port = port

    def __getattr__(self, name: str) -> Any:
        return getattr(self.port, name)


def failing(error: Exception, times: int, method: Callable[..., Any]) -> Callable[..., Any]:
    """Raise an error some times, then call the method."""
    left = [times]

    def call(*args: Any, **options: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise error
        return method(*args, **options)

    return call


DISK = sqlite.sqlite3.OperationalError("disk I/O error")
DISK.sqlite_errorcode = sqlite.sqlite3.SQLITE_FULL
FULL = sqlite.exc.OperationalError("INSERT", None, DISK)


@pytest.mark.parametrize(("settles", "acks"), [(True, False), (False, True), (False, False)])
def test_no_message_is_forgotten_when_settling_fails(begin: Begin, settles: bool, acks: bool) -> None:
    def fail(message: Order, ctx: Context) -> None:
        if message.order_id == "bad":
            raise RuntimeError("boom")
        insert_and_send(message, ctx)

    world = begin(fail, policy=Idempotent(key="order_id", retry=Retry(attempts=1)))
    worker = world.worker()
    for handler in worker.app.handlers.values():
        handler.ran(0.001)
    world.send("good", "bad", "fine")
    settler: Any = worker.protocol.settler
    if not acks:
        settler.receiver = Wrapped(settler.receiver, ack=failing(FULL, 1, settler.receiver.ack))
    if not settles:
        settler.scheduler = Wrapped(settler.scheduler, settle=failing(FULL, 1, settler.scheduler.settle))
        settler.store = Wrapped(settler.store, probe=lambda: False)
    worker.step(poll=0.0)
    assert len(worker.intake.held) == (0 if settles else 1)
    if acks:
        assert [row.history for row in world.rows()] == [None]  # the good ones are acknowledged, the bad one is kept
    settler.store = getattr(settler.store, "port", settler.store)
    world.work(worker)
    for _ in range(4):  # what was not acknowledged comes back when its lease is over, although the worker lives
        world.pass_time(31)
        worker.upkeep()
        world.work(worker)
    assert (world.effects(), [each["rule"] for each in world.dead()]) == ({"good": 1, "fine": 1}, ["handler"])
    assert len(world.rows()) == 1


def test_rows_are_kept_in_hand_when_the_broker_goes_away_before_they_run(begin: Begin) -> None:
    """A worker that lives keeps their leases, so nobody else would take them."""
    world = begin()
    delivery = Delivery(QUEUE, {"message_id": "7", "type": "shop.Order"}, b'{"order_id": "1"}')
    SqlScheduler(world.database, "another").settle([NewRow(delivery, 0.0)], [])
    worker = world.worker()
    receiver: Any = worker.intake.receiver
    worker.intake.receiver = Wrapped(receiver, receive=failing(Unavailable("away"), 1, receiver.receive))
    worker.step(poll=0.0)
    assert world.effects() == {}
    worker.step(poll=0.0)
    assert (world.effects(), world.rows()) == ({"1": 1}, [])


def test_a_message_that_cannot_be_stored_stops_nobody(begin: Begin) -> None:
    def fail(message: Order, ctx: Context) -> None:
        if message.order_id.startswith("bad"):
            raise RuntimeError("boom")
        insert_and_send(message, ctx)

    world = begin(fail, policy=Idempotent(key="order_id", retry=Retry(attempts=1)))
    with world.database.short(queues=True) as connection:
        connection.execute(
            text(
                "CREATE TRIGGER refuse BEFORE INSERT ON idemp_message WHEN new.history IS NOT NULL AND instr(new.body, CAST('unstorable' AS BLOB)) "
                "BEGIN SELECT RAISE(ABORT, 'too large'); END"
            )
        )
    world.send("bad 1", "bad unstorable", "good", "bad 2")
    world.work(world.worker())
    assert (world.effects(), len(world.dead()), len(world.rows())) == ({"good": 1}, 2, 2)
    (row,) = world.rows("shop.unstorable")
    assert row.body == b'{"order_id": "bad unstorable"}'


def test_a_handler_cannot_change_what_a_retry_stores(begin: Begin) -> None:
    def change(message: Order, ctx: Context) -> None:
        ctx.properties.pop("type")  # type: ignore[attr-defined]
        ctx.headers["x"].append(object())
        raise RuntimeError("boom")

    world = begin(change)
    world.send_raw(b'{"order_id": "1"}', {"message_id": "1", "type": "shop.Order", "headers": {"x": []}})
    world.work(world.worker())
    assert [(each["rule"], each["attempts"]) for each in world.dead()] == [("handler", 3)]


@pytest.mark.parametrize("headers", [b"[]", b"{", b"\xff", b'{"headers": [1], "type": "shop.Order"}', b'{"type": ["x"]}'])
def test_properties_of_strangers_end_no_worker(begin: Begin, headers: bytes) -> None:
    world = begin()
    message = world.database.tables.message
    with world.database.short(queues=True) as connection:
        connection.execute(message.insert(), {"queue": "shop", "due_at": 0.0, "headers": headers, "body": b"{}"})
    world.send("good")
    worker = world.worker()
    for _ in range(25):
        world.work(worker)
        world.pass_time(6)
        worker.upkeep()
    assert (world.effects(), len(world.dead())) == ({"good": 1}, 1)


def test_a_worker_is_alive_for_relays_whatever_its_lease(begin: Begin) -> None:
    world = begin(settings={"lease": "1h"})
    worker = world.worker()
    assert 0 < worker._next_beat - time.monotonic() <= 5


def test_a_connection_lost_in_an_outage_makes_no_dead_letter(begin: Begin) -> None:
    """Where it cannot be seen whether a lost transaction was committed, the error of the outage decides."""

    def lose(message: Order, ctx: Context) -> None:
        if world.runs["1"] == 1:
            ctx.connection.invalidate()
            rename(world, "idemp_inbox", "gone")
            raise FULL
        insert_and_send(message, ctx)

    world = begin(lose)
    world.send("1")
    worker = world.worker()
    worker.step(poll=0.0)
    assert (len(worker.intake.held), world.dead()) == (1, [])
    rename(world, "gone", "idemp_inbox")
    world.work(worker)
    assert (world.effects(), world.dead(), world.rows()) == ({"1": 1}, [], [])


def test_redelivered_messages_that_cannot_be_stored_stop_nobody(begin: Begin) -> None:
    world = begin()
    with world.database.short(queues=True) as connection:
        connection.execute(
            text(
                "CREATE TRIGGER refuse BEFORE INSERT ON idemp_message WHEN new.history IS NOT NULL AND instr(new.body, "
                "CAST('unstorable' AS BLOB)) BEGIN SELECT RAISE(ABORT, 'too large'); END"
            )
        )
    strange = {"expiration": "800", "user_id": "alice", "headers": {"CC": ["sink"], "x": 1}}
    world.send_raw(b'{"order_id": "unstorable"}', {"message_id": "7", "type": "shop.Order", **strange})
    world.send("good")
    world.worker().intake.receiver.receive(2, 0.0)  # a process that dies
    world.pass_time(31)
    world.work(world.worker())
    assert (world.effects(), world.rows()) == ({"good": 1}, [])
    (row,) = world.rows("shop.unstorable")
    assert row.body == b'{"order_id": "unstorable"}'
    properties = json.loads(row.headers)  # without what would let it expire, or go elsewhere
    assert (properties.keys() & strange.keys(), properties["headers"]) == ({"headers"}, {"was-CC": ["sink"], "x": 1})


def test_the_publish_timeout_is_that_of_the_settings(begin: Begin) -> None:
    world = begin(settings={"publish_timeout": 3})
    worker = world.worker()
    seen: list[float] = []
    publish = worker.protocol.dispatcher.publisher.publish  # type: ignore[union-attr]
    worker.protocol.dispatcher.publisher = Wrapped(
        worker.protocol.dispatcher.publisher, publish=lambda outputs, timeout: seen.append(timeout) or publish(outputs, timeout)
    )
    world.send("1")
    world.work(worker)
    assert (world.effects(), seen) == ({"1": 1}, [3.0])
