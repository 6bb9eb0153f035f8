"""What waits in the table `message`: one row for each handling, and what becomes of those whose processes die."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from idemp import Context, Idempotent, Policy, Retry
from idemp.brokers.rabbitmq import RabbitBroker
from idemp.messages import Delivery, Output
from idemp.ports import NewRow
from idemp.sql.records.failures import DeadLetters
from idemp.sql.scheduler import SqlScheduler
from tests.conftest import every_database
from tests.worker.conftest import Processes
from tests.worker.test_loop import wait_for
from tests.world import QUEUE, Order, World, effect, insert_and_send, let_pass

EVENTS = ("failure", "SIGTERM", "SIGKILL")
EVERY = [
    (kind, broker, target, event)
    for kind in ("sqlite", "postgresql", "mariadb")
    for broker in ("sql", "rabbitmq")
    for target in ("lookalikes", "lookalikes_async")
    for event in EVENTS
]
SOME = [("sqlite", "sql", "lookalikes", event) for event in EVENTS]
SOME += [("postgresql", "rabbitmq", "lookalikes_async", event) for event in EVENTS]
SOME += [("mariadb", "rabbitmq", "lookalikes", "SIGTERM")]

ALIKE: list[dict[str, Any]] = [
    *({"type": "shop.ByHeader", "headers": {"x-id": id}} for id in "abc"),
    *(
        {"headers": {"ce-specversion": "1.0", "ce-type": "shop.ByEvent", "ce-id": "7", "ce-source": source}}
        for source in ("/a", "/b", "/c")
    ),
    *[{"type": "shop.Counted"}] * 3,
]
WANTED = {"a": 1, "b": 1, "c": 1, "/a": 1, "/b": 1, "/c": 1, "counted": 3}


@pytest.mark.parametrize(
    ("kind", "broker", "target", "event"), EVERY if "IDEMP_TEST_EVERY" in os.environ else SOME, indirect=["kind"]
)
def test_messages_that_look_alike_are_handled_each(
    processes: Processes, vhost: str, broker: str, target: str, event: str
) -> None:
    world, settings = processes.world, {"IDEMP_CONCURRENCY": "2"}
    outside: Any = world.broker
    if broker == "rabbitmq":
        settings["IDEMP_BROKER_URL"] = vhost
        outside = RabbitBroker(vhost)
        outside.declare(QUEUE, [])
    with closing(outside.publisher()) as publisher:
        outputs = [Output("", "send", "", QUEUE, {"message_id": "7", **properties}, b"{}") for properties in ALIKE]
        assert publisher.publish(outputs, 10.0) == [None] * len(ALIKE)
    (processes.folder / ("fail" if event == "failure" else "hold")).touch()
    process = processes.start(target=f"tests.apps:{target}", **settings)
    wait_for(processes.runs)
    if event != "failure":
        process.send_signal(getattr(signal, event))
        if event == "SIGTERM":
            wait_for(lambda: _is_stopping(world))
        (processes.folder / "hold").unlink()
        process.wait(60)
        let_pass(world.database, 60)
        process = processes.start(target=f"tests.apps:{target}", **settings)
    wait_for(lambda: set(world.effects()) == set(WANTED) and world.effects()["counted"] >= 3 and not _left(world))
    found = world.effects()
    assert found == WANTED | {"counted": found["counted"] if event == "SIGKILL" else 3}
    process.terminate()
    assert process.wait(60) == 0


def _is_stopping(world: World) -> bool:
    with world.database.queue_engine.connect() as connection:
        return any(row.stopping for row in connection.execute(world.database.tables.worker.select()))


def _left(world: World) -> Any:
    return world.rows()


@every_database
def test_copies_of_a_message_wait_as_one_and_run_no_more_often_than_its_policy_says(begin: Callable[..., World]) -> None:
    def fail(message: Order, ctx: Context) -> None:
        raise RuntimeError("boom")

    world = begin(fail)
    worker = world.worker()
    copies = (b'{"order_id": "1"}', b'{ "order_id" : "1" }', b'{"order_id":"1"}\n')
    for number, body in enumerate(copies):  # other envelopes, other white space
        world.send_raw(body, {"message_id": f"copy {number}", "type": "shop.Order"})
    world.work(worker)
    (letter,) = DeadLetters(world.database).find()
    assert (letter.attempts, world.runs["1"]) == (3, 5)  # each copy may add a run
    for body in copies[:2]:
        world.send_raw(body, {"message_id": "late", "type": "shop.Order"})
    world.work(worker)
    (letter,) = DeadLetters(world.database).find()
    assert (letter.attempts, world.runs["1"], len(world.rows())) == (5, 7, 1)
    world.send_raw(b'{"order_id": "1", "more": 1}', {"message_id": "another", "type": "shop.Order"})
    world.work(worker)
    assert (len(world.dead()), world.runs["1"]) == (2, 10)  # another message under the key
    assert DeadLetters(world.database).replay([letter]) == 1
    world.work(worker)
    assert (len(world.dead()), world.runs["1"]) == (2, 13)


def test_copies_of_a_dead_letter_that_are_redelivered_run_once_and_revive_nothing(begin: Callable[..., World]) -> None:
    def fail(message: Order, ctx: Context) -> None:
        raise RuntimeError("boom")

    world = begin(fail)
    for _ in range(3):
        world.send("1", message_id="7")
        world.worker().intake.receiver.receive(1, 0.0)  # a process that dies
        world.pass_time(31)
        world.work(world.worker())
    (dead,) = world.dead()
    assert (dead["attempts"], world.runs["1"], len(world.rows())) == (5, 5, 1)


def test_what_cannot_be_identified_waits_as_one_if_it_says_an_id(begin: Callable[..., World]) -> None:
    world = begin()
    for properties in ({"message_id": "7"}, {"message_id": "7"}, {"message_id": "8"}, {}, {}):
        world.send_raw(b"{", {"type": "shop.Order", **properties})
        world.send_raw(b"{}", {"type": "shop.Unknown", "headers": {"x": 1}, **properties})
    world.work(world.worker())
    assert len(world.rows()) == 8  # of each type: two ids, and two without


@every_database
def test_what_was_handled_is_found_by_its_claim_however_often_its_process_died(begin: Callable[..., World]) -> None:
    world = begin(policy=Idempotent(key="order_id", retry=Retry(attempts=1)))
    world.send("1")
    world.work(world.worker(), relay=False)
    delivery = Delivery(QUEUE, {"message_id": "copy", "type": "shop.Order"}, b'{"order_id": "1"}')
    scheduler = SqlScheduler(world.database, "another")
    for deaths in (3, 4, 5):
        scheduler.settle([NewRow(delivery, 0.0, deaths=deaths)], [])
    other = replace(delivery, body=b'{"order_id": "2"}')
    scheduler.settle([NewRow(other, 0.0, deaths=2), NewRow(replace(other, body=b'{"order_id": 3}'), 0.0, deaths=3)], [])
    world.work(world.worker())
    assert (world.effects(), world.runs) == ({"1": 1, "2": 1}, {"1": 1, "2": 1})
    (dead,) = world.dead()  # which its class would not have taken: it is only identified
    assert (dead["rule"], dead["id"], dead["deaths"]) == ("poison", "i:3", 3)


def test_a_type_that_is_not_opted_in_is_parked_without_a_run_when_it_is_poison(begin: Callable[..., World]) -> None:
    world = begin(policy=Idempotent(key="order_id", retry=Retry(attempts=1)))
    delivery = Delivery(QUEUE, {"message_id": "7", "type": "shop.Plain"}, b'{"order_id": "1"}')
    SqlScheduler(world.database, "another").settle([NewRow(delivery, 0.0, deaths=3)], [])
    world.work(world.worker())
    assert ([each["rule"] for each in world.dead()], dict(world.runs)) == (["poison"], {})


def test_a_type_that_is_not_opted_in_runs_for_each_copy_that_is_redelivered(begin: Callable[..., World]) -> None:
    """Its type may stand in the properties, in a header of an event, or inside of one."""
    world = begin()
    event = {"specversion": "1.0", "id": "7", "source": "/shop", "type": "shop.Plain"}
    binary = {"message_id": "7", "headers": {f"ce-{name}": text for name, text in event.items()}}
    structured = json.dumps(event | {"data": {"order_id": "structured"}}).encode()
    for _ in range(2):
        world.send("plain", type="shop.Plain", message_id="7")
        world.send_raw(b'{"order_id": "binary"}', binary)
        world.send_raw(structured, {"content_type": "application/cloudevents+json"})
    world.worker().intake.receiver.receive(6, 0.0)
    world.pass_time(31)
    world.work(world.worker())
    assert (world.runs, world.rows()) == ({"plain": 2, "binary": 2, "structured": 2}, [])


def test_an_event_is_given_the_attempts_of_its_type(begin: Callable[..., World]) -> None:
    world = begin(policy=Idempotent(key="order_id", retry=Retry(attempts=20)))
    headers = {"ce-specversion": "1.0", "ce-id": "7", "ce-source": "/shop", "ce-type": "shop.Order"}
    event = Delivery(QUEUE, {"headers": headers}, b'{"order_id": "1"}')
    SqlScheduler(world.database, "another").settle([NewRow(event, 0.0, deaths=2 + 19)], [])
    world.work(world.worker())
    assert (world.effects(), world.rows()) == ({"1": 1}, [])


def test_what_ends_its_process_even_while_it_is_claimed_is_parked_undecoded(begin: Callable[..., World]) -> None:
    world = begin(policy=Idempotent(key="order_id", retry=Retry(attempts=2)))
    for number, type in enumerate(("shop.Order", "shop.Unknown")):
        bad = Delivery(QUEUE, {"message_id": str(number), "type": type}, b"{")
        SqlScheduler(world.database, "another").settle([NewRow(bad, 0.0, deaths=2 + 2 + 3)], [])
    world.work(world.worker())
    assert [each["rule"] for each in world.dead()] == ["poison", "poison"]


@pytest.mark.parametrize("target", ["tests.apps:once", "tests.apps:once_async"])
@pytest.mark.parametrize("kind", ["postgresql"], indirect=True)
def test_deaths_in_company_park_nobody(processes: Processes, target: str) -> None:
    """With a single attempt, two SIGKILLs from outside, and handlers that take their time."""
    world = processes.world
    world.send(*map(str, range(12)), type="shop.Steady")
    killed = 0
    process = processes.start(target=target)
    while killed < 2:
        began = len(processes.runs())
        wait_for(lambda began=began: len(processes.runs()) > began)  # type: ignore[misc]
        process.kill()
        process.wait()
        killed += 1
        let_pass(world.database, 60)
        process = processes.start(target=target)
    wait_for(lambda: len(world.effects()) == 12 and not world.rows())
    assert set(world.effects().values()) == {1}


def test_redelivered_messages_run_in_groups(begin: Callable[..., World]) -> None:
    """A death of 40 messages in hand costs a row for each, and no turn for each."""
    world = begin(insert_and_send, settings={"group": 20})
    worker = world.worker()
    worker.app.handlers["shop.Order"].seconds = 0.0
    world.send(*map(str, range(40)))
    worker.intake.receiver.receive(40, 0.0)
    world.pass_time(31)
    turns, other = 0, world.worker()
    other.app.handlers["shop.Order"].seconds = 0.0
    while len(world.effects()) < 40:
        other.intake.look_again()
        other.step(poll=0.0)
        turns += 1
    assert turns <= 6  # some to move them, some to run them


def test_a_suspect_and_fresh_messages_take_turns(begin: Callable[..., World]) -> None:
    order: list[str] = []

    def handle(message: Order, ctx: Context) -> None:
        order.append(message.order_id)

    world = begin(handle, settings={"group": 5})
    scheduler = SqlScheduler(world.database, "another")
    for number in range(3):
        body = json.dumps({"order_id": f"suspect {number}"}).encode()
        scheduler.settle([NewRow(Delivery(QUEUE, {"message_id": "7", "type": "shop.Order"}, body), 0.0, deaths=2)], [])
    world.send(*map(str, range(20)))
    worker = world.worker()
    worker.app.handlers["shop.Order"].ran = lambda took: None  # type: ignore[method-assign]
    worker.app.handlers["shop.Order"].seconds = 0.0
    world.work(worker)
    places = [place for place, id in enumerate(order) if id.startswith("suspect")]
    assert len(places) == 3
    assert all(1 < later - before <= 6 for before, later in pairwise(places))


def test_a_type_that_is_not_opted_in_runs_for_each_delivery_that_fails(begin: Callable[..., World]) -> None:
    def fail_first(message: Order, ctx: Context) -> None:
        if world.runs[message.order_id] <= 3:
            raise RuntimeError("boom")
        ctx.connection.execute(effect.insert(), {"what": message.order_id})

    world = begin(fail_first, policy=Policy(retry=Retry(attempts=3, delays=(0.0,))))
    for _ in range(3):
        world.send("1", type="shop.Plain", message_id="7")
    world.work(world.worker())
    assert (world.effects(), world.runs["1"], world.rows()) == ({"1": 3}, 6, [])


def test_the_broker_of_tables_delivers_no_retries(begin: Callable[..., World]) -> None:
    world = begin()
    delivery = Delivery(QUEUE, {"message_id": "7", "type": "shop.Order"}, b'{"order_id": "1"}')
    SqlScheduler(world.database, "another").settle([NewRow(delivery, 0.0)], [])
    with closing(world.broker.receiver(QUEUE)) as receiver:
        assert receiver.receive(10, 0.0) == []


def test_a_worker_waits_for_no_suspect_that_another_one_has(begin: Callable[..., World]) -> None:
    world = begin()
    delivery = Delivery(QUEUE, {"message_id": "7", "type": "shop.Order"}, b'{"order_id": "1"}')
    one, other = world.worker(), world.worker()
    SqlScheduler(world.database, "another").settle([NewRow(delivery, 0.0, deaths=2)], [])
    assert one.adapters.scheduler.lease_messages(QUEUE, 1) == ([], True)
    assert one.adapters.scheduler.lease_suspect(QUEUE) is not None
    start = time.monotonic()
    assert other.step(poll=0.0) == 0
    assert not other.intake.suspect_due
    assert time.monotonic() - start < 10
