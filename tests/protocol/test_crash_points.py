"""The process dies at one point; then the message is redelivered, or a relay runs. All promises hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from unittest.mock import ANY

import pytest

from idemp import Context, Idempotent, Initiation, Outcome
from idemp.broker.port import Ack, Retry
from idemp.errors import CommitUnknown, StoreUnavailable
from idemp.messages import DEFERRED_HEADER
from idemp.settling import UNCONFIRMED_DELAY
from idemp.testing.faulty import CommitFault, Crash
from idemp.testing.store_bench import Effects
from tests.house import SELL, House, sale

if TYPE_CHECKING:
    pass

Point = Callable[[House], None]

BEFORE_COMMIT = [
    "before begin",
    "after begin",
    "before claim",
    "after claim",
    "before store",
    "after store",
    "before commit",
]
AFTER_COMMIT = ["after commit", "before publish", "after publish"]
LATE_BEFORE_COMMIT = ["before claim and store", "after claim and store", "before commit"]


def crash_at(house: House, point: str) -> None:
    when, _, call = point.partition(" ")
    setattr(house.script, f"crash_{when}", call)


def all_is_well(house: House, outputs: int = 2) -> None:
    """Handled once, each output confirmed under one id with one body, nothing pending; a late duplicate changes nothing."""
    for _ in range(2):
        assert house.sales() == 1
        assert house.pending() == 0
        bodies: dict[Any, set[bytes]] = {}
        for id_, body in house.sent():
            bodies.setdefault(id_, set()).add(body)
        assert len(bodies) == outputs
        assert all(len(found) == 1 for found in bodies.values())
        assert {output.id for output in house.publisher.confirmed} == set(bodies)
        house.deliver()


@pytest.mark.parametrize("point", BEFORE_COMMIT)
def test_before_commit_nothing_happened(house: House, point: str) -> None:
    house.sells()
    crash_at(house, point)
    with house.crashing():
        house.deliver()
    assert (house.sales(), house.sent(), house.pending()) == (0, [], 0)
    assert house.relay().taken == 0
    assert house.deliver() is Outcome.HANDLED
    all_is_well(house)


@pytest.mark.parametrize("point", LATE_BEFORE_COMMIT)
def test_before_commit_of_a_late_claim(house: House, point: str) -> None:
    house.sells(claim="late")
    crash_at(house, point)
    with house.crashing():
        house.deliver()
    assert (house.sales(), house.sent(), house.pending()) == (0, [], 0)
    assert house.deliver() is Outcome.HANDLED
    all_is_well(house)


@pytest.mark.parametrize("claim", ["early", "late"])
def test_in_the_middle_of_the_handler(house: House, claim: str) -> None:
    dies = [True]

    def sell(message: dict[str, Any], ctx: Context) -> None:
        ctx.send({"n": 0}, to="stock", type="stock.Reserve")
        house.effects.write(ctx, "sale")  # type: ignore[arg-type]
        if dies.pop() if dies else False:
            raise Crash("in the handler")
        ctx.send({"n": 1}, to="stock", type="stock.Reserve")

    house.app.handler(dict, type=SELL, policy=Idempotent(claim=claim))(sell)
    with house.crashing():
        house.deliver()
    assert (house.sales(), house.sent(), house.pending()) == (0, [], 0)
    assert house.deliver() is Outcome.HANDLED
    all_is_well(house)


@pytest.mark.parametrize("mended_by", ["redelivery", "relay"])
@pytest.mark.parametrize("point", AFTER_COMMIT)
def test_after_commit_the_outputs_go_out(house: House, point: str, mended_by: str) -> None:
    house.sells()
    crash_at(house, point)
    with house.crashing():
        house.deliver()
    assert (house.sales(), house.pending()) == (1, 2)
    if mended_by == "redelivery":
        assert house.deliver() is Outcome.REDISPATCHED
    else:
        assert house.relay().confirmed == 2
    all_is_well(house)


@pytest.mark.parametrize("redispatch", ["always", "pending"])
@pytest.mark.parametrize("sent", [0, 1, 2, 3])
def test_after_k_of_n_outputs(house: House, sent: int, redispatch: str) -> None:
    """Nothing was confirmed to anybody who still lives: all n go out again, with the same ids."""
    house.sells(outputs=4, redispatch=redispatch)
    house.script.crash_after_outputs = sent
    with house.crashing():
        house.deliver()
    first = house.sent()
    assert len(first) == sent
    assert house.deliver() is Outcome.REDISPATCHED
    again = house.sent()[sent:]
    assert again[:sent] == first
    assert len(again) == 4
    all_is_well(house, outputs=4)


@pytest.mark.parametrize("redispatch", ["always", "pending"])
def test_sent_but_the_confirm_was_lost(house: House, redispatch: str) -> None:
    house.sells(redispatch=redispatch)
    house.script.answers = ["confirm", "lose"]
    assert house.deliver() is Outcome.PENDING
    assert house.pending() == 1
    assert house.deliver() is Outcome.REDISPATCHED
    assert [id_ for id_, _ in house.sent()].count(house.sent()[1][0]) == 2
    all_is_well(house)


def test_all_confirmed_but_not_yet_recorded(house: House) -> None:
    """A crash then sends at most one batch again, under the same ids."""
    house.sells(redispatch="pending")
    assert house.deliver() is Outcome.HANDLED
    house._protocol = None  # dies with its unrecorded marks
    assert house.pending() == 2
    assert house.deliver() is Outcome.REDISPATCHED
    assert house.sent()[:2] == house.sent()[2:]
    all_is_well(house)


@pytest.mark.parametrize("point", ["before record", "after record"])
def test_while_recording(house: House, point: str) -> None:
    house.sells()
    assert house.deliver() is Outcome.HANDLED
    crash_at(house, point)
    with house.crashing():
        house.worker().dispatcher.flush()
    assert house.deliver() is Outcome.REDISPATCHED
    all_is_well(house)


def test_recorded_but_not_acked(house: House) -> None:
    house.sells(redispatch="pending")
    house.deliver()
    house.restart()
    assert house.deliver() is Outcome.SKIPPED
    all_is_well(house)


@pytest.mark.parametrize("claim", ["early", "late"])
@pytest.mark.parametrize("fault", ["lost, committed", "lost, not committed"])
def test_commit_sent_and_its_answer_lost(house: House, fault: CommitFault, claim: str) -> None:
    """The delivery runs again by itself, and the claim knows which way it went."""
    house.sells(claim=claim)
    house.script.commit_faults = [fault]
    outcome = house.deliver()
    assert outcome is (Outcome.REDISPATCHED if fault == "lost, committed" else Outcome.HANDLED)
    all_is_well(house)


def test_commit_unknown_time_and_again_is_no_failure_of_the_message(house: House) -> None:
    house.sells()
    house.script.commit_faults = ["lost, not committed"] * 2
    outcome, settlement = house.handle(attempt=7)
    assert (outcome, settlement) == (Outcome.RETRIED, Retry(UNCONFIRMED_DELAY, counted=False, reason=ANY))
    assert house.deliver() is Outcome.HANDLED
    all_is_well(house)


def test_commit_unknown_while_the_database_is_away_holds_the_delivery(house: House) -> None:
    house.sells()
    house.script.commit_faults = ["lost, not committed"] * 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(house.store.inner, "note_start", _away)
        with pytest.raises(CommitUnknown):
            house.handle(attempt=7)
    assert house.deliver() is Outcome.HANDLED
    all_is_well(house)


def _away(*_: object) -> int:
    raise StoreUnavailable("down")


def test_commit_unknown_that_took_place_is_a_duplicate(house: House) -> None:
    """The claim tells, also after the last run: it is no failure, and never parked."""
    house.sells(attempts=1)
    house.script.commit_faults = ["lost, not committed", "lost, committed"]
    assert house.handle(sale(headers={DEFERRED_HEADER: 99})) == (Outcome.REDISPATCHED, Ack())
    all_is_well(house)


@pytest.mark.parametrize(
    "point", ["before begin", "after begin", "before claim", "after claim", "before store", "after store",
              "before commit", "after commit"]
)  # fmt: skip
def test_initiation_dies(house: House, point: str) -> None:
    """The second run does what the first one did not, and nothing else."""

    def initiate(unit: Initiation) -> None:
        house.effects.write(unit, "sale")  # type: ignore[arg-type]
        unit.send({"n": 1}, to="stock", type="stock.Reserve")

    crash_at(house, point)
    with house.crashing():
        house.app.run_once("request-1", initiate)
    stored = house.app.run_once("request-1", initiate)
    assert (house.sales(), house.pending()) == (1, 1)
    assert house.relay().confirmed == 1
    assert house.sent() == [(output.id, output.message.body) for output in stored]


def test_effects_are_what_they_seem(house: House) -> None:
    """The suite would notice a second effect."""
    effects: Effects = house.effects
    house.app.handler(dict, type=SELL, policy=Idempotent())(lambda message, ctx: effects.write(ctx, "sale"))
    house.deliver(sale("1"))
    house.deliver(sale("2"))
    assert house.sales() == 2
