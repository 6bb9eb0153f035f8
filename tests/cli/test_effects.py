"""Effects in `idemp inbox`: pending, quarantined, given back, done."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING
from uuid import UUID

from idemp.effects import EffectRunner

if TYPE_CHECKING:
    import pytest

    from tests.cli.conftest import Cli, Shop


def test_the_story_of_two_effects(cli: Cli, shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    shop.send({"order_id": 1, "mail": "ann"})
    shop.send({"order_id": 2, "mail": "nobody"})
    shop.work()
    rows = cli("inbox", "list", "--pending", "--json").data
    assert {(row["original_id"], row["destination"], row["attempts"]) for row in rows} == {
        ("shop.Order#1", "mail.receipt", 0),
        ("shop.Order#2", "mail.receipt", 0),
    }
    assert all(row["due_at"] < "2100" for row in rows), "in our own time"
    checks = {each["name"]: each for each in cli("doctor", "--json").data["checks"]}
    assert checks["relay"]["detail"] == "none is alive, and nothing waits for one"
    assert checks["effects"]["detail"] == "2 effects pending, for workers of the app that has them"
    first = UUID(next(row["output_id"] for row in rows if row["original_id"] == "shop.Order#1"))
    shop.app.store.upkeep.settle_pending([], {first: "a while ago"}, timedelta(minutes=-2))
    check = next(each for each in cli("doctor", "--json").data["checks"] if each["name"] == "effects")
    assert (check["verdict"], check["detail"]) == (
        "warning",
        "could have been run for more than 1m, and were not: 1 of 'shop'",
    )
    assert "a worker of that app" in check["fix"]
    pending = cli("inbox", "explain", "2").out
    assert "effect mail.receipt as" in pending
    assert ": pending, due 20" in pending

    upkeep = shop.app.store.upkeep
    runner = EffectRunner(upkeep, "shop", shop.app.registry.effects)
    assert runner.run_once().taken == runner.run_once().taken == 1
    assert ": done" in cli("inbox", "explain", "1").out
    assert ": quarantined (550 no such mailbox)" in cli("inbox", "explain", "2").out
    (row,) = cli("inbox", "list", "--quarantined", "--json").data
    assert f"`idemp inbox redispatch {row['output_id']}`" in caplog.text, (
        "a message's own id may be unknown to the inbox"
    )
    assert cli("inbox", "explain", row["output_id"], "--json").data[0]["claim"]["original_id"] == "shop.Order#2"
    assert (row["original_id"], row["due_at"], row["reason"]) == ("shop.Order#2", None, "550 no such mailbox")

    kept = cli("inbox", "erase", "2", "--yes")
    assert kept.code != 0
    assert "to be done" in kept.err

    sent, done = cli("inbox", "redispatch", "1", "--json").data
    assert (sent["confirmed"], done["confirmed"], done["refusal"]) == (True, True, "done before, not run again")
    assert not upkeep.take_effects("shop", 10, shop.app.settings.relay_lease)
    answer = cli("inbox", "redispatch", "2", "--json")
    assert (answer.code, answer.data[1]["confirmed"]) == (0, None)
    assert answer.data[1]["refusal"] == "given back, a worker runs it now"
    assert runner.run_once().taken == 1, "and it is refused again"
    assert cli("inbox", "discard", "1", "--yes", "--json").data[0]["outputs"] == 0, "it is done"
    assert cli("inbox", "discard", "2", input="n\n").code == 1
    assert cli("inbox", "discard", "2", "--yes", "--json").data[0]["outputs"] == 1
    assert ": discarded" in cli("inbox", "explain", "2").out
    assert cli("inbox", "explain", "2", "--json").data[0]["pending"] == 0
    assert cli("inbox", "redispatch", "2", "--json").data[1]["refusal"] == "discarded before, not run again"
    assert cli("inbox", "erase", "2", "--yes").code == 0
    assert ": discarded, erased" in cli("inbox", "explain", "2").out
    shop.send({"order_id": 3, "mail": "nobody"})
    shop.work()
    assert runner.run_once().taken == 1
    assert cli("inbox", "release", "--all", "--json").data["released"] == 1
    assert len(upkeep.take_effects("shop", 10, shop.app.settings.relay_lease)) == 1
