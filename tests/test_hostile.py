"""Hostile messages among good ones: each is a dead letter with its reason, and no worker ends."""

from __future__ import annotations

import json
import random
import zlib
from collections import Counter
from typing import Any

import pytest

from idemp import App, ConfigurationError, Idempotent, Retry, Settings
from idemp.messages import MAX_BODY_BYTES
from idemp.sql.records.failures import DeadLetters
from idemp.worker import Worker
from tests.world import Order, Plain, World, insert_and_send

GOOD = b'{"order_id": "x"}'


def hostile(chance: random.Random) -> tuple[bytes, dict[str, Any]]:
    """Return a body and properties that no handler may see."""
    properties: dict[str, Any] = {"message_id": str(chance.random()), "type": "shop.Order"}
    body = GOOD
    kind = chance.randrange(16)
    if kind == 0:
        body = chance.randbytes(chance.randrange(200))
    elif kind == 1:
        body = GOOD[: chance.randrange(len(GOOD))]
    elif kind == 2:
        body = b'{"order_id": "x", "order_id": "y"}'
    elif kind == 3:
        body = b"[" * chance.randrange(1_000, 200_000)
    elif kind == 4:
        body = b'{"order_id": %s}' % chance.choice(
            [b"NaN", b"Infinity", b"1e999", b"null", b"[]", b"{}", b"1.5", b'"\\u0000"', b'"\\ud800"', b'""']
        )
    elif kind == 5:
        body = b'{"order_id": "%s"}' % (b"x" * 10_000)
    elif kind == 6:
        properties["message_id"], body = chance.choice(["x" * 10_000, "\0", "\ud800", 7, None, [1]]), b"{"
    elif kind == 7:
        properties["type"] = chance.choice(["__main__.X", "os.system", "x" * 10_000, "\0", "\ud800", None, 7, ["x"], {}])
    elif kind == 8:
        properties["content_type"], body = "application/x-python-serialize", b"\x80\x04K\x01."
    elif kind == 9:
        properties["content_encoding"], body = "gzip", zlib.compress(GOOD)
    elif kind == 10:
        properties["headers"], body = {"compression": "application/x-gzip"}, zlib.compress(GOOD)
    elif kind == 11:
        properties["headers"] = chance.choice([[1], "x", 7])
    elif kind == 12:
        properties["content_type"] = chance.choice([7, ["x"], "text/html", "\ud800"])
    elif kind == 13:
        body = GOOD.decode().encode("utf-16")
    elif kind == 14:
        body = b'{"order_id": "x", "a": %s}' % (b"1" * 5_000)
    else:
        properties["content_encoding"] = chance.choice(["utf-16", "latin-1", 7, ["x"]])
    return body, properties


@pytest.mark.parametrize("count", [500, pytest.param(2_000, marks=pytest.mark.slow)])
def test_hostile_messages_are_parked_and_good_ones_handled(url: str, count: int) -> None:
    chance = random.Random(7)
    world = World(url, policy=Idempotent(key="order_id", retry=Retry(attempts=2, delays=(0.0,))))
    message, rows = world.database.tables.message, []
    for number in range(count):
        body, properties = hostile(chance)
        rows.append({"queue": "shop", "due_at": 0.0, "headers": json.dumps(properties).encode(), "body": body})
        if number % 10 == 0:
            good = {"message_id": f"good-{number}", "type": "shop.Order"}
            rows.append({**rows[-1], "headers": json.dumps(good).encode(), "body": b'{"order_id": "%d"}' % number})
    rows.append({**rows[-1], "headers": b'{"message_id": "large", "type": "shop.Order"}', "body": b" " * (MAX_BODY_BYTES + 1)})
    with world.database.short(queues=True) as connection:
        connection.execute(message.insert(), rows)
    worker = world.worker()
    for _ in range(22):  # unknown types go round first
        world.work(worker, limit=200.0)
        world.pass_time(6)
        worker.upkeep()
    assert world.effects() == {str(number): 1 for number in range(0, count, 10)}
    rules = Counter(dead["rule"] for dead in world.dead())
    assert set(rules) == {"unreadable", "unknown type"}
    assert all(dead["error"] for dead in world.dead())
    assert len(world.rows()) == sum(rules.values())
    assert sum(rules.values()) > count * 0.9  # some are copies of each other


def test_control_headers_of_strangers_are_not_obeyed(url: str) -> None:
    world = World(url, policy=Idempotent(key="order_id", retry=Retry(attempts=2, delays=(0.0,))))
    names = (
        "attempt",
        "attempts",
        "deaths",
        "forced",
        "redispatched",
        "redelivered",
        "delay",
        "fingerprint",
        "causation-id",
        "key",
    )
    headers = {f"{prefix}{name}": value for prefix in ("idemp-", "x-idemp-", "") for name in names for value in (True, "none", 9)}
    world.send("1", message_id="first")
    for number in range(3):
        properties = {"type": "shop.Order", "headers": headers, "forced": True, "attempts": 9, "redelivered": True}
        world.send_raw(GOOD.replace(b"x", b"1"), {**properties, "message_id": str(number)})
    world.work(world.worker())
    assert (world.effects(), world.rows(), world.runs["1"]) == ({"1": 1}, [], 1)


def test_a_header_says_that_another_run_may_have_worded_a_message_differently(url: str) -> None:
    world = World(url)
    for number, headers in enumerate([{}, {"idemp-fingerprint": "none"}, {}]):
        properties = {"type": "shop.Order", "message_id": str(number), "headers": headers}
        world.send_raw(b'{"order_id": "1", "run": %d}' % number, properties)
    world.work(world.worker())
    assert (world.effects(), [dead["rule"] for dead in world.dead()]) == ({"1": 1}, ["conflict"])


def test_unreadable_properties_are_no_message_of_the_default_type(url: str) -> None:
    world = World(url)
    insert = world.database.tables.message.insert()
    with world.database.short(queues=True) as connection:
        for headers in (b"", b"{", b"[]", b'"x"', b"\xff", b"null"):
            connection.execute(insert, {"queue": "shop", "due_at": 0.0, "headers": headers, "body": b'{"order_id": "1"}'})
    app = App("shop", settings=Settings(database_url=url))
    app.handler(Order, policy=world.policy, default=True)(insert_and_send)
    world.apps.append(app)
    worker = Worker(app)
    world.receivers.append(worker.intake.receiver)
    world.work(worker)
    assert (world.effects(), {each["rule"] for each in world.dead()}, len(world.rows())) == ({}, {"unreadable"}, 6)


def test_messages_without_a_type_have_the_default_type_of_their_queue(url: str) -> None:
    world = World(url)
    for number, type in enumerate((None, "", [], {}, 0)):
        world.send_raw(b'{"order_id": "%d"}' % number, {"type": type})
    app = App("shop", settings=Settings(database_url=url))
    app.handler(Order, policy=world.policy, default=True)(insert_and_send)
    with pytest.raises(ConfigurationError, match="'shop.Order' and 'shop.Plain' are both the default type"):
        app.handler(Plain, default=True)(insert_and_send)
    world.apps.append(app)
    worker = Worker(app)
    world.receivers.append(worker.intake.receiver)
    world.work(worker)
    assert world.effects() == {"0": 1, "1": 1}
    assert len(world.rows()) == 3  # retries, until a release knows their type


SPOILT = [b"", b"{", b"{}", b"[7]", b'[{"rule": 7, "times": 1}]', b"\xff", b"null", b"[" * 5000]
SPOILT += [b'[{"rule": "handler", "times": 1, "at": 1e18}]', b'[{"rule": "handler", "times": -1}]']


def test_spoilt_histories_park_their_messages_alone(url: str) -> None:
    world = World(url)
    insert = world.database.tables.message.insert()
    with world.database.short(queues=True) as connection:
        for number, history in enumerate(SPOILT):
            headers = json.dumps({"type": "shop.Order", "message_id": str(number)}).encode()
            body = b'{"order_id": "%d"}' % number
            connection.execute(insert, {"queue": "shop", "due_at": 0.0, "headers": headers, "body": body, "history": history})
        for spoilt in ("'text'", "12"):  # SQLite stores values of any type
            values = f"VALUES ('shop', 0.0, {spoilt}, x'7b7d', x'5b5d')"
            connection.exec_driver_sql(f"INSERT INTO idemp_message (queue, due_at, headers, body, history) {values}")
    world.send("good")
    world.work(world.worker())
    letters = DeadLetters(world.database)
    assert world.effects() == {"good": 1}
    assert {(each.rule, "history" in each.error) for each in letters.find()[: len(SPOILT)]} == {("unreadable", True)}
    assert len(letters.find()) == len(SPOILT) + 2
    letters.replay(letters.find())
    world.work(world.worker())
    assert world.effects() == {"good": 1, **{str(number): 1 for number in range(len(SPOILT))}}
    assert [each.rule for each in letters.find()] == ["unreadable"] * 2
