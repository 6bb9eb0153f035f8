"""`idemp dead`: what was parked, and its way back."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest

from idemp.broker.port import Topology
from idemp.deadletter import FIRST_AT_HEADER, REPLAYED_AT_HEADER, REPLAYS_HEADER, idemp_version
from idemp.messages import FORCED_HEADER, Message, Output, OutputKind
from tests.cli.test_dead_brokers import put
from tests.lanes import mostly_slow

if TYPE_CHECKING:
    from tests.cli.conftest import Cli, Shop

KEPT = {FIRST_AT_HEADER, REPLAYS_HEADER, REPLAYED_AT_HEADER}


@pytest.fixture
def parked(shop: Shop) -> tuple[str, str]:
    """Two dead letters: a refused order, and a message of an unknown type."""
    ids = shop.send({"order_id": 1, "refuse": True}), shop.send({}, type="shop.Unknown")
    shop.work()
    assert shop.app.broker.depth("shop.dead") == 2
    return ids


def test_list_and_show(cli: Cli, shop: Shop, parked: tuple[str, str]) -> None:
    rows = cli("dead", "list", "--queue", "shop", "--json").data
    assert [row["message_id"] for row in rows] == list(parked)
    assert [row["reason"] for row in rows] == ["Refuse", "UnknownMessageType"]
    assert set(rows[0]) == {
        *("message_id", "type", "reason", "error", "attempts", "replays", "replayed_at", "first_at", "last_at"),
        *("consumer", "app_version", "host", "version"),
    }
    assert (rows[0]["replays"], rows[0]["app_version"], rows[0]["consumer"]) == (0, "unknown", "shop")
    assert cli("dead", "list", "--app", shop.where, "--type", "shop.Order", "--json").data == rows[:1]
    assert cli("dead", "list", "--app", shop.where, "--limit", "1", "--json").data == rows[:1]
    told = cli("dead", "list", "--queue", "shop").out
    assert ("no such customer" in told, "there are more" in told) == (True, False)
    assert "there are more" in cli("dead", "list", "--queue", "shop", "--limit", "1").out
    (letter,) = cli("dead", "show", parked[0], "--queue", "shop", "--json").data
    assert "Refuse" in letter["stack"]
    assert letter["because"] == "Refuse"
    assert '"refuse": true' in letter["body"]
    assert "no such customer" in cli("dead", "show", parked[0], "--queue", "shop").out
    assert cli("dead", "show", "4711", "--queue", "shop").code == 1


def test_replay_by_id_brings_back_the_original(cli: Cli, shop: Shop, parked: tuple[str, str]) -> None:
    assert cli("dead", "replay", "--queue", "shop").code == 2
    dry = cli("dead", "replay", parked[0], "--queue", "shop", "--dry-run", "--json")
    assert dry.data[0]["result"] == "would be replayed"
    assert shop.app.broker.depth("shop") == 0
    (row,) = cli("dead", "replay", parked[0], "--queue", "shop", "--json").data
    assert row["result"] == "replayed"
    (message,) = shop.app.broker.browse("shop", 10)
    assert message.message_id == parked[0]
    assert {name for name in message.headers if name not in KEPT} == set()
    assert [item.message_id for item in shop.app.broker.browse("shop.dead", 10)] == [parked[1]]


def test_replay_by_type_and_by_force(cli: Cli, shop: Shop, parked: tuple[str, str]) -> None:
    assert cli("dead", "replay", "--type", "shop.Nothing", "--app", shop.where).code == 1
    answer = cli("dead", "replay", "--type", "shop.Order", "--force", "--app", shop.where)
    assert (answer.code, "replayed" in answer.out) == (0, True)
    (message,) = shop.app.broker.browse("shop", 10)
    assert {name: value for name, value in message.headers.items() if name not in KEPT} == {FORCED_HEADER: 1}


def test_replay_all(cli: Cli, shop: Shop, parked: tuple[str, str]) -> None:
    assert len(cli("dead", "replay", "--all", "--queue", "shop", "--json").data) == 2
    assert (shop.app.broker.depth("shop"), shop.app.broker.depth("shop.dead")) == (2, 0)


def test_what_the_broker_refuses_stays(cli: Cli, shop: Shop) -> None:
    """The dead-letter queue is there, the queue itself is not."""
    broker = shop.app.broker
    broker.declare(Topology(exchange="", queues=("lonely.dead",)))
    message = Message(body=b"{}", message_id="m-1")
    output = Output(
        id=uuid4(), ordinal=0, kind=OutputKind.SEND, exchange="", routing_key="lonely.dead", message=message
    )
    broker.publisher().publish([output], 10)
    answer = cli("dead", "replay", "--all", "--queue", "lonely", "--json")
    assert answer.code == 1
    assert answer.data[0]["result"] == "kept"
    assert answer.data[0]["refusal"].startswith("returned")
    assert broker.depth("lonely.dead") == 1


def test_hints_can_be_pasted(cli: Cli, shop: Shop, parked: tuple[str, str]) -> None:
    by_queue = cli("dead", "show", "4711", "--queue", "shop")
    assert (by_queue.code, "`idemp dead list --queue shop`" in by_queue.err) == (1, True)
    by_app = cli("dead", "show", "4711", "--app", shop.where)
    assert (by_app.code, f"`idemp dead list --app {shop.where}`" in by_app.err) == (1, True)
    for verb in ("list", "replay", "discard"):
        wrong = cli("dead", verb, "4711", "--queue", "shop.dead")
        assert (wrong.code, "--queue takes the queue itself: shop" in " ".join(wrong.err.split())) == (2, True)


EVENT = {"specversion": "1.0", "id": "e-1", "source": "/till", "type": "shop.Sold"}
EVENTS = {
    "binary": Message(
        body=b'{"sku": "A"}',
        message_id="amqp-1",
        headers={f"cloudEvents:{name}": value for name, value in EVENT.items()},
    ),
    "structured": Message(
        body=json.dumps({**EVENT, "data": {"sku": "A"}}).encode(), content_type="application/cloudevents+json"
    ),
}


@pytest.mark.parametrize("mode", EVENTS)
def test_foreign_events_are_found_by_their_own_id_and_type(cli: Cli, shop: Shop, mode: str) -> None:
    """And are moved as they came."""
    plain = Message(body=b"{}", message_id="m-1", type="shop.Order")
    put(shop.app.broker, "shop.dead", [plain, EVENTS[mode]])
    rows = cli("dead", "list", "--queue", "shop", "--json").data
    assert [(row["message_id"], row["type"]) for row in rows] == [("m-1", "shop.Order"), ("e-1", "shop.Sold")]
    for wanted in (["e-1"], ["--type", "shop.Sold"]):
        assert cli("dead", "list", *wanted, "--queue", "shop", "--json").data == rows[1:]
        dry = cli("dead", "replay", *wanted, "--queue", "shop", "--dry-run", "--json")
        assert [row["message_id"] for row in dry.data] == ["e-1"]
    (letter,) = cli("dead", "show", "e-1", "--queue", "shop", "--json").data
    assert (letter["type"], letter["body"]) == ("shop.Sold", EVENTS[mode].body.decode())
    (moved,) = cli("dead", "replay", "e-1", "--queue", "shop", "--json").data
    assert (moved["message_id"], moved["result"]) == ("e-1", "replayed")
    (replayed,) = shop.app.broker.browse("shop", 10)
    headers = {name: value for name, value in replayed.headers.items() if name not in KEPT}
    assert replace(replayed, headers=headers, timestamp=None) == replace(EVENTS[mode], timestamp=None)
    put(shop.app.broker, "shop.dead", [EVENTS[mode]])
    assert cli("dead", "discard", "--type", "shop.Sold", "--queue", "shop", "--yes").code == 0
    assert [message.message_id for message in shop.app.broker.browse("shop.dead", 10)] == ["m-1"]


def test_discard_asks_with_the_number(cli: Cli, shop: Shop, letters: None) -> None:
    no = cli("dead", "discard", "--reason", "Refuse", "--queue", "shop", input="n\n")
    assert (no.code, "Remove 3 of 9 dead letters of shop for good?" in no.err) == (1, True)
    some = cli("dead", "discard", "--all", "--limit", "2", "--queue", "shop", input="n\n")
    assert (some.code, "Remove 2 of 9 dead letters" in some.err) == (1, True)
    assert shop.app.broker.depth("shop.dead") == 9
    unasked = cli("dead", "discard", "--all", "--queue", "shop", "--json", input="")
    assert (unasked.code, unasked.error["kind"]) == (1, "Aborted"), "the last line is JSON"
    none = cli("dead", "discard", "--type", "shop.Nothing", "--queue", "shop")
    assert (none.code, "Remove" in none.err, "No such dead letter in shop.dead." in none.out) == (1, False, True)


def test_discard(cli: Cli, shop: Shop, parked: tuple[str, str]) -> None:
    assert cli("dead", "discard", "--all", "--queue", "shop", input="n\n").code == 1
    assert shop.app.broker.depth("shop.dead") == 2
    assert cli("dead", "discard", parked[1], "--queue", "shop", "--dry-run").code == 0
    assert cli("dead", "discard", parked[1], "--queue", "shop", input="y\n").code == 0
    assert [item.message_id for item in shop.app.broker.browse("shop.dead", 10)] == [parked[0]]
    assert cli("dead", "discard", "--all", "--queue", "shop", "--yes", "--json").data[0]["result"] == "discarded"
    assert shop.app.broker.depth("shop.dead") == 0


@pytest.fixture
def letters(shop: Shop) -> None:
    """Nine letters: three types by three reasons, parked an hour apart, with a header each."""
    publisher = shop.app.broker.publisher()
    now = datetime.now(UTC)
    for number, (kind, reason) in enumerate(itertools.product("ABC", ("KeyError", "Refuse", "ValueError"))):
        story = {
            "reason": reason,
            "error": f"Customer {number} is missing",
            "last-at": (now - timedelta(hours=10 - number)).isoformat(),
        }
        headers = {
            "tenant": number % 2,
            "vip": number == 4,
            **{f"idemp-dead-{name}": text for name, text in story.items()},
        }
        message = Message(body=b"{}", message_id=f"m-{number}", type=f"shop.{kind}", headers=headers)
        output = Output(
            id=uuid4(), ordinal=0, kind=OutputKind.SEND, exchange="", routing_key="shop.dead", message=message
        )
        assert publisher.publish([output], 10) == [None]
    publisher.close()


FILTERS = {
    "ids": (["m-3", "m-1"], "13"),
    "type": (["--type", "shop.B"], "345"),
    "reason": (["--reason", "Refuse"], "147"),
    "error": (["--error", "customer 5"], "5"),
    "since": (["--since", "3h30m"], "78"),
    "until": (["--until", "8h30m"], "01"),
    "header": (["--where", "tenant=1"], "1357"),
    "boolean header": (["--where", "vip=true"], "4"),
    "two headers": (["--where", "tenant=0", "--where", "vip=false"], "0268"),
    "several": (["--type", "shop.C", "--reason", "Refuse", "--where", "tenant=1", "--since", "1d"], "7"),
    "ids and more": (["m-1", "m-2", "--reason", "Refuse"], "1"),
    "nothing": (["--type", "shop.A", "--until", "30h"], ""),
}


@pytest.mark.parametrize("case", mostly_slow(FILTERS, first=4))
def test_filters_choose_the_same_for_each_verb(cli: Cli, shop: Shop, letters: None, case: str) -> None:
    options, numbers = FILTERS[case]
    wanted = [f"m-{number}" for number in numbers]
    where = [*options, "--queue", "shop", "--json"]
    assert [item["message_id"] for item in cli("dead", "list", *where).data] == wanted
    for verb in ("replay", "discard"):
        dry = cli("dead", verb, *where, "--dry-run")
        assert [item["message_id"] for item in dry.data] == wanted
        assert dry.code == (0 if wanted else 1)
    assert (shop.app.broker.depth("shop"), shop.app.broker.depth("shop.dead")) == (0, 9)
    assert [item["message_id"] for item in cli("dead", "replay", *where, "--limit", "2").data] == wanted[:2]
    assert [item["message_id"] for item in cli("dead", "discard", *where, "--yes").data] == wanted[2:]
    assert [item.message_id for item in shop.app.broker.browse("shop", 10)] == wanted[:2]
    assert shop.app.broker.depth("shop.dead") == 9 - len(wanted)


@pytest.mark.parametrize(
    "options", [["--since", "yesterday"], ["--where", "tenant"], ["--rate", "0"], ["--limit", "0"]]
)
def test_filters_that_cannot_be_read_are_a_wrong_command_line(cli: Cli, shop: Shop, options: list[str]) -> None:
    assert cli("dead", "replay", "--all", "--queue", "shop", *options).code == 2


def test_long_tables_are_cut_and_counted(cli: Cli, shop: Shop) -> None:
    publisher = shop.app.broker.publisher()
    outputs = [
        Output(
            id=uuid4(),
            ordinal=0,
            kind=OutputKind.SEND,
            exchange="",
            routing_key="shop.dead",
            message=Message(body=b"{}", message_id=f"m-{number}"),
        )
        for number in range(250)
    ]
    assert not any(publisher.publish(outputs, 10))
    publisher.close()
    listed = cli("dead", "list", "--queue", "shop", "--json")
    note = {"message": "there are more; --limit 500 shows up to so many.", "more": True, "limit": 50}
    assert (len(listed.data), json.loads(listed.err)) == (50, {"note": note})
    assert cli("dead", "list", "--queue", "shop", "--json", "--limit", "250").err == ""
    told = cli("dead", "replay", "--all", "--batch", "100", "--queue", "shop")
    assert told.code == 0
    assert "… and 50 more" in told.out
    assert "250 replayed." in told.out


def test_rate_holds_back(cli: Cli, shop: Shop, letters: None) -> None:
    begun = time.monotonic()
    assert cli("dead", "replay", "--all", "--rate", "16", "--queue", "shop").code == 0
    assert time.monotonic() - begun >= 8 / 16


def test_version_of_the_application_is_told(cli: Cli, shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the setting, where the code says nothing."""
    monkeypatch.setenv("IDEMP_APP_VERSION", "2026.3")
    (shop.folder / "versioned.py").write_text((shop.folder / f"{shop.module}.py").read_text())
    versioned = replace(shop, module="versioned")
    versioned.send({"order_id": 1, "refuse": True})
    versioned.work()
    (row,) = cli("dead", "list", "--queue", "shop", "--json").data
    assert (row["app_version"], row["version"]) == ("2026.3", idemp_version())
