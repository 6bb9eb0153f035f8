"""`idemp dead`: what was parked, and its way back."""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import uuid4

import pytest

from idemp.broker.port import Topology
from idemp.messages import FORCED_HEADER, Message, Output, OutputKind

if TYPE_CHECKING:
    from tests.cli.conftest import Cli, Shop


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
    assert {"type", "error", "attempts", "first_at", "last_at", "consumer", "host", "version"} <= set(rows[0])
    assert cli("dead", "list", "--app", shop.where, "--type", "shop.Order", "--json").data == rows[:1]
    assert cli("dead", "list", "--app", shop.where, "--limit", "1", "--json").data == rows[:1]
    assert "no such customer" in cli("dead", "list", "--queue", "shop").out
    (letter,) = cli("dead", "show", parked[0], "--queue", "shop", "--json").data
    assert "Refuse" in letter["stack"]
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
    assert dict(message.headers) == {}
    assert [item.message_id for item in shop.app.broker.browse("shop.dead", 10)] == [parked[1]]


def test_replay_by_type_and_by_force(cli: Cli, shop: Shop, parked: tuple[str, str]) -> None:
    assert cli("dead", "replay", "--type", "shop.Nothing", "--app", shop.where).code == 1
    answer = cli("dead", "replay", "--type", "shop.Order", "--force", "--app", shop.where)
    assert (answer.code, "replayed" in answer.out) == (0, True)
    (message,) = shop.app.broker.browse("shop", 10)
    assert dict(message.headers) == {FORCED_HEADER: 1}


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


def test_discard(cli: Cli, shop: Shop, parked: tuple[str, str]) -> None:
    assert cli("dead", "discard", "--all", "--queue", "shop", input="n\n").code == 1
    assert shop.app.broker.depth("shop.dead") == 2
    assert cli("dead", "discard", parked[1], "--queue", "shop", "--dry-run").code == 0
    assert cli("dead", "discard", parked[1], "--queue", "shop", input="y\n").code == 0
    assert [item.message_id for item in shop.app.broker.browse("shop.dead", 10)] == [parked[0]]
    assert cli("dead", "discard", "--all", "--queue", "shop", "--yes", "--json").data[0]["result"] == "discarded"
    assert shop.app.broker.depth("shop.dead") == 0
