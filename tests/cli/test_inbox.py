"""`idemp inbox`: lists, stories, redispatch, purge, erase."""

from __future__ import annotations

import json
import re
import shlex
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
    cut = cli("inbox", "list", "--json", "--limit", "1")
    assert (cut.data, json.loads(cut.err)["note"]["limit"]) == (rows[:1], 1)
    assert cli("inbox", "list", "--json", "--limit", str(len(rows))).err == ""
    assert "there are more; --limit 10 " in cli("inbox", "list", "--limit", "1").out
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
    assert set(story) == {
        *("claim", "outputs", "history", "redelivered", "confirmed", "pending", "unfinished_in", "dead_letters")
    }
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


@pytest.mark.parametrize("verb", [["erase", "--yes"], ["discard", "--yes"], ["redispatch"]])
def test_what_changes_something_changes_one_message(cli: Cli, shop: Shop, verb: list[str]) -> None:
    """The number 1 and the text "1" are two messages, and are written alike."""
    for order_id in (1, "1"):
        shop.send({"order_id": order_id})
    shop.work()
    rows = cli("inbox", "list", "--json").data
    assert [row["original_id"] for row in rows] == ["shop.Order#1"] * 2
    listed = cli("inbox", "list").out
    assert all(row["key"] in listed for row in rows), "they can be told apart"
    for written in ("shop.Order#1", "1"):
        answer = cli("inbox", verb[0], written, *verb[1:], "--json")
        assert (answer.code, answer.error["kind"]) == (3, "ConfigurationError")
        assert all(row["key"] in answer.error["message"] for row in rows)
    assert shop.app.broker.depth("out") == 2
    stories = [cli("inbox", "explain", row["key"], "--json").data[0] for row in rows]
    assert not any(story["outputs"][0]["erased"] for story in stories)
    assert cli("inbox", verb[0], rows[0]["key"], *verb[1:]).code == 0
    assert [cli("inbox", "show", row["key"], "--json").data[0]["outputs"][0]["erased"] for row in rows] == [
        verb[0] == "erase",
        False,
    ]


def test_keys_are_listed_where_ids_are_alike_only(cli: Cli, handled: Shop) -> None:
    rows = cli("inbox", "list", "--json").data
    assert not any(row["key"] in cli("inbox", "list").out for row in rows)


def test_purge(cli: Cli, handled: Shop) -> None:
    assert cli("inbox", "purge").code == 2
    assert cli("inbox", "purge", "--consumer", "shop", "--older-than", "soon").code == 2
    assert cli("inbox", "purge", handled.where, "--json").data == {"consumer": "shop", "deleted": 0}
    # The consumer has consumed for no time yet, so even the shortest window reaches back for ever.
    answer = cli("inbox", "purge", "--consumer", "shop", "--older-than", "1ms")
    assert (answer.code, answer.out) == (0, "Deleted 0 expired claims of shop.\n")


def test_release_gives_quarantined_outputs_back(cli: Cli, handled: Shop) -> None:
    """After the queue is there that they missed, the relay ships them."""
    assert cli("inbox", "release").code == 2
    (row,) = cli("inbox", "list", "--pending", "--json").data
    upkeep = handled.app.store.upkeep
    upkeep.quarantine({UUID(row["output_id"]): "returned: no queue takes it"})
    assert cli("inbox", "release", "--type", "shop.Ping", "--json").data == {
        "released": 0,
        "relay_alive": False,
        "brokers_without_relay": [],
    }
    assert cli("inbox", "release", "--consumer", "other", "--json").data["released"] == 0
    assert (
        "Gave 1 output back: messages to the relay, effects to the workers. No relay is alive"
        in cli("inbox", "release", "--all").out
    )
    (again,) = cli("inbox", "list", "--pending", "--json").data
    assert (again["quarantined_at"], again["attempts"]) == (None, 1)
    assert Relay(upkeep, handled.app.broker.publisher()).run_once().taken == 1


def test_why_an_output_is_pending_is_told_before_any_relay_tried_it(cli: Cli, handled: Shop) -> None:
    (row,) = cli("inbox", "list", "--pending", "--json").data
    assert row["reason"].startswith("returned: ")
    assert "1 confirm, recorded by" in cli("inbox", "explain", "43").out


@pytest.mark.parametrize("done", ["message", "initiation"])
def test_one_id_of_two_is_not_ready(cli: Cli, shop: Shop, done: str) -> None:
    """Its outputs stand as they were; so do those of the other one."""
    shop.send({"order_id": 42, "lost": done != "message"})
    shop.work()
    with shop.app.initiate(id="42") as unit:
        unit.send({}, to="out" if done == "initiation" else "nowhere", type="shop.Begun")
    assert Relay(shop.app.store.upkeep, shop.app.broker.publisher()).run_once().taken
    bodies = shop.app.broker.depth("out")
    refused = cli("inbox", "erase", "42", "--yes", "--json")
    assert (refused.code, "2 messages of shop" in refused.error["message"]) == (3, True)
    shown = cli("inbox", "show", "42", "--json").data
    keys = {row["original_id"]: row["key"] for row in shown}
    ready, other = ("shop.Order#42", "42") if done == "message" else ("42", "shop.Order#42")
    refused = cli("inbox", "erase", keys[other], "--yes", "--json")
    assert (refused.code, "Nothing was erased" in refused.error["message"]) == (1, True)
    shown = cli("inbox", "show", "42", "--json").data
    assert [output["erased"] for message in shown for output in message["outputs"]].count(True) == 0

    assert cli("inbox", "erase", keys[ready], "--yes").code == 0
    refused = cli("inbox", "redispatch", keys[ready], "--json")
    assert (refused.code, "Nothing was sent" in refused.error["fix"]) == (1, True)
    assert shop.app.broker.depth("out") == bodies


def test_what_nobody_tried_yet_has_no_attempts(cli: Cli, shop: Shop) -> None:
    """An output is stored with the attempt that its own handling is about to make."""
    with shop.app.initiate(id="request-1") as unit:
        unit.send({}, to="out", type="shop.Done")
    shop.send({"order_id": 7})
    publisher = shop.app.broker.publisher()
    receiver, protocol = shop.app.broker.receiver(["shop"], prefetch=1), shop.app.protocol(publisher)
    delivery = receiver.receive(30)
    assert delivery is not None
    protocol.arrive(delivery).joined(None)  # committed, and then the process dies
    for known_as in ("request-1", "7"):
        assert "pending, due " in (told := cli("inbox", "explain", known_as).out)
        assert ("no attempt recorded yet" in told, "after" in told) == (True, False)
    assert [row["attempts"] for row in cli("inbox", "list", "--pending", "--json").data] == [0, 0]
    receiver.close()
    publisher.close()


def test_numbers_of_one_are_singular(cli: Cli, shop: Shop) -> None:
    shop.send({"order_id": 1})
    shop.send({"order_id": 1})
    shop.work()
    told = cli("inbox", "explain", "1").out
    assert "with 1 output\n" in told
    assert "2 confirms and 1 redelivery skipped" in told
    assert "It was redelivered 1 time, and" in told


@pytest.mark.parametrize("named", ["settings", "app"])
def test_explain_shows_the_parked_conflict_of_that_id(cli: Cli, shop: Shop, named: str) -> None:
    """It stands in no table: its payload is another one than that which was handled."""
    shop.send({"order_id": 42})
    shop.work()
    shop.send({"order_id": 42, "quantity": 2})
    shop.send({"order_id": 43, "refuse": True})
    shop.work()
    options = ("--app", shop.where) if named == "app" else ()
    (story,) = cli("inbox", "explain", "42", *options, "--json").data
    (letter,) = story["dead_letters"]
    assert (letter["reason"], letter["queue"], letter["consumer"]) == ("PayloadConflict", "shop", "shop")
    told = cli("inbox", "explain", "42", *options).out
    assert "parked in shop.dead after 1 attempt: PayloadConflict: A message with id 'shop.Order#42' was handled" in told
    (command,) = re.findall(r"See `idemp (.*)`", told)
    assert cli(*shlex.split(command), "--json").data[0]["message_id"] == letter["message_id"]


def test_explain_shows_what_was_parked_and_never_handled(cli: Cli, shop: Shop) -> None:
    """By the id that its sender knows."""
    sent = shop.send({"order_id": 43, "refuse": True})
    shop.work()
    (story,) = cli("inbox", "explain", sent, "--json").data
    assert (story["claim"], story["dead_letters"][0]["reason"]) == (None, "Refuse")
    assert "parked in shop.dead after 1 attempt: Refuse: no such customer" in cli("inbox", "explain", sent).out


def test_explain_says_when_dead_letters_could_not_be_read(cli: Cli, handled: Shop) -> None:
    for broker in ("local://no-such-file.db", "pyamqp://127.0.0.1:1//"):
        answer = cli("inbox", "explain", "42", "--broker", broker)
        assert (answer.code, "Dead letters were not looked at" in answer.out) == (0, True)
    assert not (handled.folder / "no-such-file.db").exists()
