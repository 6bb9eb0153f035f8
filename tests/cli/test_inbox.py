"""`idemp inbox`: lists, stories, redispatch, purge, erase."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING
from uuid import UUID

import pytest

from idemp.relay import Relay

if TYPE_CHECKING:
    from tests.cli.conftest import Cli, Shop


@pytest.fixture
def handled(shop: Shop) -> Shop:
    """Order 42 was handled, and came twice more; order 43 has an output that no queue takes."""
    shop.send({"order_id": 42})
    shop.work()
    shop.send({"order_id": 42})
    shop.send({"order_id": 42})
    shop.send({"order_id": 43, "lost": True})
    shop.work()
    return shop


def test_list(cli: Cli, handled: Shop) -> None:
    rows = cli("inbox", "list", "--json").data
    assert {row["original_id"] for row in rows} == {"shop.Order#42", "shop.Order#43"}
    assert set(rows[0]) == {"consumer", "key", "original_id", "message_type", "claimed_at", "worker"}
    assert cli("inbox", "list", "--json", "--limit", "1").data == rows[:1]
    assert cli("inbox", "list", "--json", "--consumer", "other").data == []
    assert cli("inbox", "list", "--json", "--type", "shop.Ping").data == []
    assert "shop.Order#42" in cli("inbox", "list").out


def test_list_pending(cli: Cli, handled: Shop) -> None:
    (row,) = cli("inbox", "list", "--pending", "--json").data
    assert (row["original_id"], row["destination"]) == ("shop.Order#43", "nowhere")
    assert cli("inbox", "list", "--pending", "--type", "shop.Ping", "--json").data == []
    assert cli("inbox", "list", "--quarantined", "--json").data == []
    assert "nowhere" in cli("inbox", "list", "--pending", "--consumer", "shop").out


@pytest.mark.parametrize("known_as", ["42", "shop.Order#42"])
def test_explain_tells_the_story(cli: Cli, handled: Shop, known_as: str) -> None:
    (story,) = cli("inbox", "explain", known_as, "--json").data
    assert set(story) == {"claim", "outputs", "history", "redelivered", "confirmed", "pending", "unfinished_in"}
    assert (story["redelivered"], story["pending"]) == (2, 0)
    assert story["claim"]["worker"] == handled.app.store.worker
    (output,) = story["outputs"]
    assert (output["destination"], output["message_type"], output["state"]) == ("out", "shop.Done", "confirmed")
    text = cli("inbox", "explain", known_as, "--consumer", "shop").out
    for words in ("claimed and committed by", "confirms", "redelivered 2 times", output["id"], "out"):
        assert words in text


def test_hint_of_what_is_unknown_can_be_pasted(cli: Cli, handled: Shop) -> None:
    for verb in ("explain", "redispatch"):
        answer = cli("inbox", verb, "4711")
        assert (answer.code, "`idemp dead list --app MODULE:APP`" in answer.err) == (1, True)


def test_explain_by_key_and_by_initiation(cli: Cli, handled: Shop) -> None:
    key = cli("inbox", "explain", "42", "--json").data[0]["claim"]["key"]
    assert cli("inbox", "explain", key, "--json").data[0]["claim"]["original_id"] == "shop.Order#42"
    with handled.app.initiate(id="request-1") as unit:
        unit.send({}, to="out", type="shop.Done")
    (story,) = cli("inbox", "explain", "request-1", "--json").data
    assert story["pending"] == 1


def test_explain_by_the_id_of_an_output(cli: Cli, handled: Shop) -> None:
    """The id that a broker's log or the next consumer has."""
    (story,) = cli("inbox", "explain", "42", "--json").data
    (output,) = story["outputs"]
    assert cli("inbox", "explain", output["id"], "--json").data == [story]


def test_unknown_id_is_not_found(cli: Cli, handled: Shop) -> None:
    for verb in ("explain", "show", "redispatch", "erase"):
        answer = cli("inbox", verb, "4711", "--json")
        assert (answer.code, answer.error["kind"]) == (1, "NotFound")
    assert cli("inbox", "explain", "shop.Ping#42").code == 1
    assert cli("inbox", "explain", "42", "--consumer", "other").code == 1


def test_show_has_the_bytes(cli: Cli, handled: Shop) -> None:
    (claim,) = cli("inbox", "show", "42", "--json").data
    assert json.loads(claim["outputs"][0]["body"]) == {"order_id": 42}
    assert "idemp-causation-id" in claim["outputs"][0]["headers"]
    assert '{"order_id":42}' in cli("inbox", "show", "42").out


def test_redispatch_sends_again_and_records(cli: Cli, handled: Shop) -> None:
    before = handled.app.broker.browse("out", 100)
    (row,) = cli("inbox", "redispatch", "42", "--json").data
    assert row["confirmed"]
    *_, copy = after = handled.app.broker.browse("out", 100)
    assert len(after) == len(before) + 1
    assert copy.message_id == row["id"] == before[0].message_id
    assert copy.body == before[0].body
    assert copy.redispatched
    assert cli("inbox", "explain", "42", "--json").data[0]["confirmed"] > 1


def test_redispatch_of_what_is_quarantined(cli: Cli, handled: Shop) -> None:
    refused = cli("inbox", "redispatch", "43", "--json")
    assert refused.code == 1
    (output,) = [row for row in refused.data if not row["confirmed"]]
    assert output["refusal"].startswith("returned")
    pending = handled.app.store.upkeep.take_pending(10, handled.app.settings.relay_after)
    handled.app.store.upkeep.quarantine({item.output.id: "returned: no queue" for item in pending} or _only(cli))
    assert len(cli("inbox", "list", "--quarantined", "--json").data) == 1
    topology = handled.app.topology()
    handled.app.broker.declare(type(topology)(exchange="idemp", queues=("nowhere",)))
    assert cli("inbox", "redispatch", "43").code == 0
    assert cli("inbox", "list", "--pending", "--json").data == []
    assert handled.app.broker.depth("nowhere") == 1


def _only(cli: Cli) -> dict[object, str]:
    from uuid import UUID

    return {UUID(row["output_id"]): "returned: no queue" for row in cli("inbox", "list", "--pending", "--json").data}


def test_erase_drops_bytes_and_keeps_the_key(cli: Cli, handled: Shop) -> None:
    assert cli("inbox", "erase", "42", input="n\n").code == 1
    assert cli("inbox", "erase", "42", "--yes", "--json").data[0]["outputs"] == 1
    assert cli("inbox", "explain", "42", "--json").data[0]["outputs"][0]["erased"]
    assert "(erased)" in cli("inbox", "show", "42").out
    answer = cli("inbox", "redispatch", "42", "--json")
    assert (answer.code, answer.error["kind"]) == (1, "StoreError")
    assert cli("inbox", "erase", "43", "--yes").code == 1  # one of its outputs is pending


def test_purge(cli: Cli, handled: Shop) -> None:
    assert cli("inbox", "purge").code == 2
    assert cli("inbox", "purge", "--consumer", "shop", "--older-than", "soon").code == 2
    assert cli("inbox", "purge", handled.where, "--json").data == {"consumer": "shop", "deleted": 0}
    # The consumer has consumed for no time yet, so even the shortest window reaches back for ever.
    answer = cli("inbox", "purge", "--consumer", "shop", "--older-than", "1ms")
    assert (answer.code, answer.out.split()[0]) == (0, "0")


def test_release_gives_quarantined_outputs_back(cli: Cli, handled: Shop) -> None:
    """After the queue is there that they missed, the relay ships them."""
    assert cli("inbox", "release").code == 2
    (row,) = cli("inbox", "list", "--pending", "--json").data
    upkeep = handled.app.store.upkeep
    upkeep.quarantine({UUID(row["output_id"]): "returned: no queue takes it"})
    assert cli("inbox", "release", "--type", "shop.Ping", "--json").data == {"released": 0, "relay_alive": False}
    assert cli("inbox", "release", "--consumer", "other", "--json").data["released"] == 0
    assert (
        "1 outputs were given back: messages to the relay, effects to the workers. No relay is alive"
        in cli("inbox", "release", "--all").out
    )
    (again,) = cli("inbox", "list", "--pending", "--json").data
    assert (again["quarantined_at"], again["attempts"]) == (None, 1)
    assert Relay(upkeep, handled.app.broker.publisher()).run_once().taken == 1


def test_why_an_output_is_pending_is_told_before_any_relay_tried_it(cli: Cli, handled: Shop) -> None:
    (row,) = cli("inbox", "list", "--pending", "--json").data
    assert row["reason"].startswith("returned: ")
    assert "confirms" in cli("inbox", "explain", "43").out


@pytest.mark.parametrize("done", ["message", "initiation"])
def test_one_id_of_two_is_not_ready(cli: Cli, shop: Shop, done: str) -> None:
    """All that an id stands for, or nothing: what was done to the first would go untold."""
    shop.send({"order_id": 42, "lost": done != "message"})
    shop.work()
    with shop.app.initiate(id="42") as unit:
        unit.send({}, to="out" if done == "initiation" else "nowhere", type="shop.Begun")
    assert Relay(shop.app.store.upkeep, shop.app.broker.publisher()).run_once().taken
    bodies = shop.app.broker.depth("out")
    refused = cli("inbox", "erase", "42", "--yes", "--json")
    assert (refused.code, "Nothing was erased" in refused.error["message"]) == (1, True)
    shown = cli("inbox", "show", "42", "--json").data
    assert [output["erased"] for message in shown for output in message["outputs"]].count(True) == 0

    erased = "shop.Order#42" if done == "message" else next(row["key"] for row in shown if row["original_id"] == "42")
    assert cli("inbox", "erase", erased, "--yes").code == 0
    refused = cli("inbox", "redispatch", "42", "--json")
    assert (refused.code, "Nothing was sent" in refused.error["fix"]) == (1, True)
    assert shop.app.broker.depth("out") == bodies
