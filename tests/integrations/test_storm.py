"""Wrapped consumers that are killed and whose servers restart: effects once, outputs at least once under one id."""

from __future__ import annotations

import json
import random
import tempfile
from collections import Counter
from contextlib import ExitStack, closing
from pathlib import Path

import pika
import pytest

from tests.servers.databases import query
from tests.storm_app import QUEUE
from tests.storms import SHARE, Rabbit, Workers, rage, storm_servers

MESSAGES, KILLS, CONSUMERS = round(1_000 * SHARE), round(50 * SHARE), 2
RESTARTS = 2
DEAD = f"{QUEUE}.dead"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("client", "senders"), [("kombu", ("publisher",)), ("pika", ("relay",)), ("aio_pika", ("publisher", "relay"))]
)
def test_effects_happen_once_and_outputs_are_sent(client: str, senders: tuple[str, ...]) -> None:
    chance = random.Random(1)
    todo = [*range(MESSAGES), *chance.sample(range(MESSAGES), MESSAGES // 5)]
    chance.shuffle(todo)
    with ExitStack() as stack:
        servers, environment, url = stack.enter_context(storm_servers("rabbitmq"))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="idemp-integrations-")))
        broker = environment["IDEMP_BROKER_URL"]
        with closing(pika.BlockingConnection(pika.URLParameters(broker))) as connection:
            channel = connection.channel()
            quorum = {"x-queue-type": "quorum"}
            dead = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": DEAD, "x-delivery-limit": 1_000}
            channel.queue_declare(DEAD, durable=True, arguments=quorum)
            channel.queue_declare(QUEUE, durable=True, arguments=quorum | dead)
        outside = Rabbit(broker)
        stack.callback(outside.close)
        for number in todo:
            outside.send(number)
        if "relay" in senders:
            relay = Workers(1, ("idemp", "relay"), environment, folder / "relay")
            stack.callback(relay.close)
            relay.keep()
        else:  # a confirm that comes while the database is away is not recorded, and its output waits for a relay
            servers = servers[1:]
        command = ("tests.integrations.consumers", client, *senders)
        consumers = Workers(CONSUMERS, command, environment, folder / "log")
        stack.callback(consumers.close)
        done = rage(chance, consumers, servers, outside, url, MESSAGES, kills=KILLS, restarts=RESTARTS)
        effects = Counter(number for (number,) in query(url, "SELECT number FROM effect"))
        assert effects == Counter(range(MESSAGES))
        ids: dict[int, set[str]] = {}
        for id, body in outside.outputs():
            ids.setdefault(json.loads(body)["number"], set()).add(id)
        assert {number: len(found) for number, found in ids.items()} == dict.fromkeys(range(MESSAGES), 1)
        with closing(pika.BlockingConnection(pika.URLParameters(broker))) as connection:
            assert connection.channel().queue_declare(DEAD, passive=True).method.message_count == 0
        print(client, *senders, done)
