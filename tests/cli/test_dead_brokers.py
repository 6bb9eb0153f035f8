"""Case 33 and the original's integrity, on each broker; a replay that is cut or interrupted."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import amqp
import pytest

from idemp.broker.kombu import KombuBroker
from idemp.broker.kombu.link import Link
from idemp.broker.making import make_broker
from idemp.broker.port import Topology
from idemp.inbox.sql import create_engine_safely
from idemp.messages import Message, Output, OutputKind
from idemp.settings import Settings
from idemp.testing import FaultProxy
from tests.cli.conftest import Shop
from tests.inbox.sql.kept import make_tables
from tests.servers.process import wait_until

if TYPE_CHECKING:
    from collections.abc import Sequence

    from idemp.broker.port import Broker
    from tests.cli.conftest import Cli

MODULE = """
from pathlib import Path

from idemp import App, Idempotent, Refuse
{imports}

app = App("shop", version="2026.3"{arguments})
runs = []


@app.handler(dict, type="shop.Order", policy=Idempotent(key="order_id"))
def order(message, ctx):
    runs.append(message["order_id"])
    if not Path("mended").exists():
        raise Refuse("no such customer")
    ctx.send({{"order_id": message["order_id"]}}, to="out", type="shop.Done")
"""
_numbers = itertools.count()


@pytest.fixture(params=["local", "memory", "rabbitmq", "redis"])
def shop(request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Shop:
    """A shop on each broker, whose handler refuses until there is a file `mended`."""
    parts = {"imports": "", "arguments": ""}
    if request.param == "memory":
        parts = {
            "imports": "from idemp.broker.memory import InMemoryBroker",
            "arguments": ", broker=InMemoryBroker()",
        }
    elif request.param != "local":
        monkeypatch.setenv("IDEMP_BROKER_URL", request.getfixturevalue(f"{request.param}_url"))
        monkeypatch.setenv("IDEMP_ALLOW_AT_MOST_ONCE", "true")
    module = f"shop_on_a_broker_{next(_numbers)}"
    (folder / f"{module}.py").write_text(MODULE.format(**parts))
    make_tables(create_engine_safely(os.environ["IDEMP_DATABASE_URL"]))
    made = Shop(folder, module)
    made.declare()
    return made


def put(broker: Broker, queue: str, messages: Sequence[Message]) -> None:
    with closing(broker.publisher()) as publisher:
        outputs = [
            Output(id=uuid4(), ordinal=0, kind=OutputKind.SEND, exchange="", routing_key=queue, message=message)
            for message in messages
        ]
        assert publisher.publish(outputs, 20) == [None] * len(outputs)


def runs(shop: Shop) -> list[int]:
    found: list[int] = sys.modules[shop.module].runs  # type: ignore[attr-defined]
    return found


def test_failed_message_is_handled_after_replay_and_the_count_survives(cli: Cli, shop: Shop) -> None:
    """Case 33."""
    sent = shop.send({"order_id": 1})
    shop.work()
    (first,) = cli("dead", "list", "--app", shop.where, "--json").data
    assert (first["replays"], first["app_version"], first["attempts"]) == (0, "2026.3", 1)
    for count in (1, 2):
        assert cli("dead", "replay", sent, "--app", shop.where, "--json").data[0]["replays"] == count - 1
        shop.work()
        (again,) = cli("dead", "list", "--app", shop.where, "--json").data
        assert (again["message_id"], again["replays"], again["first_at"]) == (sent, count, first["first_at"])
        assert first["last_at"] < again["replayed_at"] < again["last_at"]
    (shop.folder / "mended").touch()
    assert cli("dead", "replay", "--reason", "Refuse", "--app", shop.where).code == 0
    shop.work()
    assert runs(shop) == [1] * 4
    assert (shop.app.broker.depth("shop"), shop.app.broker.depth("shop.dead")) == (0, 0)
    assert [json.loads(output.body) for output in shop.app.broker.browse("out", 10)] == [{"order_id": 1}]


def test_handled_message_is_skipped_after_replay_and_redispatched(cli: Cli, shop: Shop) -> None:
    """Case 33."""
    (shop.folder / "mended").touch()
    message = Message(body=b'{"order_id": 7}', type="shop.Order", message_id="m-7")
    put(shop.app.broker, "shop", [message])
    shop.work()
    (output,) = shop.app.broker.browse("out", 10)
    put(shop.app.broker, "shop.dead", [message.with_headers(**{"idemp-dead-reason": "Anything"})])
    assert cli("dead", "replay", "--all", "--app", shop.where).code == 0
    shop.work()
    assert runs(shop) == [7]
    assert shop.app.broker.depth("shop.dead") == 0
    outputs = shop.app.broker.browse("out", 10)
    assert [(copy.message_id, copy.body) for copy in outputs] == [(output.message_id, output.body)] * 2


def test_original_is_intact_while_parked_and_after_replay(cli: Cli, shop: Shop) -> None:
    original = Message(
        body=b'{"order_id": 1, "name": "\xc3\xa9"}',
        type="shop.Order",
        message_id="m-1",
        correlation_id="c-1",
        reply_to="answers",
        headers={"tenant": 7, "tags": ["a", {"b": None}], "ratio": 0.5, "text": "é"},
        timestamp=datetime.now(UTC).replace(microsecond=0),
        priority=3,
    )
    put(shop.app.broker, "shop", [original])
    shop.work()
    (letter,) = cli("dead", "show", "m-1", "--app", shop.where, "--json").data
    assert letter["body"].encode() == original.body
    assert letter["headers"] == original.headers
    assert letter["stack"].startswith("Traceback")
    assert "Refuse: no such customer" in letter["stack"]
    for name in ("type", "correlation_id", "reply_to", "priority", "content_type"):
        assert letter[name] == getattr(original, name)
    assert cli("dead", "replay", "m-1", "--app", shop.where).code == 0
    (replayed,) = shop.app.broker.browse("shop", 10)
    headers = {name: value for name, value in replayed.headers.items() if not name.startswith("idemp-dead-")}
    assert replayed.with_headers(**dict.fromkeys(set(replayed.headers) - set(headers))) == original


def test_binary_body_is_shown_unharmed(cli: Cli, shop: Shop) -> None:
    put(shop.app.broker, "shop.dead", [Message(body=b"\x00\xff", message_id="m-1", content_type="application/x-y")])
    (letter,) = cli("dead", "show", "m-1", "--app", shop.where, "--json").data
    assert (letter["body"], letter["body_base64"]) == ("\x00\\xff", "AP8=")


@pytest.mark.parametrize("shop", ["rabbitmq"], indirect=True)
def test_what_only_amqp_knows_survives_replay(cli: Cli, shop: Shop) -> None:
    """Properties that a message of idemp's has no field for, and header values that JSON has no type for."""
    url = os.environ["IDEMP_BROKER_URL"]
    headers = {"raw": b"\xff\x00", "when": datetime(2026, 1, 1, tzinfo=UTC), "nested": {"n": [1, b"\xfe"]}}
    properties = {"app_id": "till-4", "content_type": "application/json", "content_encoding": "utf-8", "priority": 2}
    sent = amqp.Message(
        b"{}", application_headers=headers, message_id="m-1", type="shop.Order", expiration="3600000", **properties
    )
    link = Link.open(url, connect_timeout=10, heartbeat=0)
    link.channel.confirm_select()
    link.channel.basic_publish_confirm(sent, "", "shop")
    shop.work()
    (letter,) = cli("dead", "show", "m-1", "--app", shop.where, "--json").data
    assert letter["properties"]["app_id"] == "till-4"
    assert letter["more"] == {"expiration": "3600000"}
    assert cli("dead", "replay", "m-1", "--app", shop.where).code == 0
    came = link.channel.basic_get("shop")
    link.close()
    assert came.body == b"{}"
    assert {name: came.properties[name] for name in properties} == properties
    kept = {name: value for name, value in came.properties["application_headers"].items() if name in headers}
    assert kept == {**headers, "when": kept["when"]}
    assert kept["when"].replace(tzinfo=UTC) == headers["when"]


COUNT = 30
BASIC_ACK = b"\x00\x3c\x00\x50"
CUTS: dict[str, dict[str, Any]] = {
    "publish lost": {"pattern": b"m-15", "before": True},
    "confirm lost": {"pattern": b"m-15", "before": False},
    "ack lost": {"pattern": BASIC_ACK, "nth": 15, "before": True},
    "ack arrived": {"pattern": BASIC_ACK, "nth": 15, "before": False},
    "reset": {"pattern": b"m-15", "before": False, "reset": True},
}


@pytest.mark.parametrize("cut", CUTS)
def test_replay_that_is_cut_loses_nothing_and_doubles_one_at_most(
    cli: Cli, folder: Path, rabbitmq_url: str, cut: str
) -> None:
    broker = letters_on(rabbitmq_url, COUNT)
    with FaultProxy("127.0.0.1", int(rabbitmq_url.rpartition(":")[2].partition("/")[0])) as proxy:
        trigger = proxy.cut_when(**CUTS[cut])
        answer = cli("dead", "replay", "--all", "--queue", "shop", "--broker", proxy.through(rabbitmq_url), "--json")
        assert trigger.wait_triggered(5)
    assert answer.code == 4
    told = Counter(item["result"] for item in answer.data)
    assert told.total() == COUNT
    assert told["unknown"] <= 1
    wait_until(lambda: broker.depth("shop.dead") >= told["kept"], "the broker has them back")
    copies = everywhere(broker)
    assert copies.keys() == {f"m-{number}" for number in range(COUNT)}
    doubled = [name for name, bodies in copies.items() if len(bodies) > 1]
    assert doubled in ([], ["m-14"], ["m-15"])
    assert all(len(set(bodies)) == 1 for bodies in copies.values())
    assert cli("dead", "replay", "--all", "--queue", "shop", "--broker", rabbitmq_url).code == 0
    assert (broker.depth("shop") >= COUNT, broker.depth("shop.dead")) == (True, 0)


@pytest.mark.parametrize("kind", ["rabbitmq", "local"])
def test_interrupted_replay_finishes_what_is_in_hand(request: pytest.FixtureRequest, folder: Path, kind: str) -> None:
    url = request.getfixturevalue("rabbitmq_url") if kind == "rabbitmq" else f"local://{folder}/broker.db"
    broker = letters_on(url, 200)
    command = [str(Path(sys.executable).with_name("idemp")), "dead", "replay", "--all", "--rate", "50"]
    process = subprocess.Popen(
        [*command, "--queue", "shop", "--broker", url, "--json"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until(lambda: broker.depth("shop") >= 5, "some are replayed")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, err
    told = Counter(item["result"] for item in json.loads(out))
    assert 5 <= told["replayed"] < 200
    wait_until(lambda: broker.depth("shop.dead") == told["kept"], "the others are back")
    assert broker.depth("shop") == told["replayed"]
    assert {name: len(bodies) for name, bodies in everywhere(broker).items()} == {
        f"m-{number}": 1 for number in range(200)
    }


def letters_on(url: str, count: int) -> Broker:
    """A queue `shop` with so many dead letters."""
    broker = KombuBroker(url) if url.startswith("pyamqp") else make_broker(url, Settings())
    broker.declare(Topology(exchange="", queues=("shop",)))
    put(broker, "shop.dead", [Message(body=f"{number}".encode(), message_id=f"m-{number}") for number in range(count)])
    return broker


def everywhere(broker: Broker) -> dict[str, list[bytes]]:
    """Bodies by message id, of the queue and its dead letters."""
    found: dict[str, list[bytes]] = {}
    for queue in ("shop", "shop.dead"):
        for message in broker.browse(queue, 10_000):
            found.setdefault(str(message.message_id), []).append(message.body)
    return found
