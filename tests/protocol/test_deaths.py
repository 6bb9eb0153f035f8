"""Cases 35, 35a and 39, deferrals, and deliveries that are lost to us before COMMIT."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from uuid import UUID

import pytest

from idemp import Context, Idempotent, Outcome, Policy
from idemp.broker.copies import attempt_of, retried
from idemp.broker.port import Ack, Park, Retry
from idemp.classification import MAX_DEFERRALS
from idemp.deadletter import REPLAYS_HEADER
from idemp.errors import LostBeforeCommit, StoreUnavailable, TransientStoreError
from idemp.identity import effective_id
from idemp.inbox.port import Claimed, Verdict
from idemp.protocol import Protocol
from idemp.settling import UNCONFIRMED_DELAY
from idemp.suspects import Turns
from idemp.testing.faulty import Crash
from tests.house import SELL, House, sale
from tests.servers.process import wait_until


def killing(house: House, policy: Policy, victims: set[str]) -> list[tuple[str | None, int]]:
    """A handler that ends its process for some messages; which ones it was started for, and as which attempt."""
    starts: list[tuple[str | None, int]] = []

    def sell(message: dict[str, Any], ctx: Context) -> None:
        starts.append((ctx.message.message_id, ctx.attempt))
        house.effects.write(ctx, "sale")  # type: ignore[arg-type]
        if ctx.message.message_id in victims:
            house.script.crash_before = "note end"  # nothing of this process happens any more
            raise Crash

    house.app.handler(dict, type=SELL, policy=policy)(sell)
    return starts


POLICIES = {
    "early": Idempotent(attempts=3),
    "late": Idempotent(attempts=3, claim="late"),
    "not opted in": Policy(attempts=3),
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_message_that_ends_its_process_each_time_is_parked_after_the_limit(house: House, policy: Policy) -> None:
    """Case 35. The first death can't be told from a neighbour's, so that it is not counted."""
    starts = killing(house, policy, {"bad"})
    with pytest.raises(Crash):
        house.handle(sale("bad"))
    house.script.clear()
    for _ in range(policy.attempts):
        with house.crashing():
            house.handle(sale("bad"), redelivered=True)
    outcome, settlement = house.handle(sale("bad"), redelivered=True)
    assert outcome is Outcome.PARKED
    assert isinstance(settlement, Park)
    assert (settlement.reason, settlement.headers["idemp-dead-attempts"]) == ("WorkerDied", policy.attempts)
    assert starts == [("bad", 1), ("bad", 1), ("bad", 2), ("bad", 3)]
    assert (house.sales(), house.sent()) == (0, [])


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_neighbours_of_a_poison_message_are_never_parked(house: House, policy: Policy) -> None:
    """Case 35a: they come back with it each time, and are handled when their turn comes."""
    starts = killing(house, policy, {"bad"})
    for _ in range(policy.attempts + 5):
        with house.crashing():
            house.handle(sale("bad"), redelivered=True)
        house.restart()
        if len(starts) == policy.attempts:
            break
    assert house.handle(sale("good"), redelivered=True) == (Outcome.HANDLED, Ack())
    assert starts[-1] == ("good", 1)
    assert house.sales() == 1


def test_an_end_of_any_kind_clears_a_suspect(house: House) -> None:
    """A start is held against a message only if nothing followed it."""
    starts: list[tuple[str | None, int]] = []
    error = [ValueError("no stock"), None, ValueError("no stock")]

    def sell(message: dict[str, Any], ctx: Context) -> None:
        starts.append((ctx.message.message_id, ctx.attempt))
        if (raised := error.pop(0)) is not None:
            raise raised

    house.app.handler(dict, type=SELL, policy=Idempotent(attempts=9))(sell)
    assert house.handle(redelivered=True)[0] is Outcome.RETRIED
    assert house.handle(redelivered=True)[0] is Outcome.HANDLED
    assert house.handle(sale("sale-2"), redelivered=True)[0] is Outcome.RETRIED
    assert starts == [("sale-1", 1), ("sale-1", 1), ("sale-2", 1)]


@pytest.mark.parametrize("claim", ["early", "late"])
def test_what_was_handled_after_all_is_skipped_though_it_killed(house: House, claim: Any) -> None:
    """The process may die after COMMIT, as often as it likes: the message is a duplicate, and never a dead letter."""
    house.sells(outputs=1, attempts=1, claim=claim)
    for _ in range(4):
        house.script.crash_before = "note end"
        with house.crashing():
            house.handle(redelivered=True)
    assert house.handle(redelivered=True)[0] is Outcome.REDISPATCHED
    assert house.sales() == 1


def test_first_deliveries_cost_nothing_more(house: House) -> None:
    house.sells()
    house.handle()
    assert not {"note start", "note end"} & set(house.script.calls)


def test_beside_others_the_first_recorded_death_is_not_counted_either(house: House) -> None:
    """With several threads the first start ran in company; from then on the suspect runs alone."""
    starts = killing(house, Idempotent(attempts=2), {"bad"})
    turns = Turns()
    for _ in range(3):
        house._protocol = Protocol(house.app.consumer, house.worker().dispatcher, turns=turns)
        with house.crashing():
            house.handle(sale("bad"), redelivered=True)
    house._protocol = Protocol(house.app.consumer, house.worker().dispatcher, turns=turns)
    assert house.handle(sale("bad"), redelivered=True)[0] is Outcome.PARKED
    assert starts == [("bad", 1), ("bad", 1), ("bad", 2)]
    assert turns.running == 0


def test_a_suspect_that_waits_for_its_turn_is_not_to_blame(house: House) -> None:
    """Whoever runs meanwhile may end the process, as often as it likes."""
    store, consumer = house.store.inner, house.app.consumer.name
    house.sells(outputs=0, attempts=2)
    key = effective_id("envelope", "good").key
    store.note_start(consumer, key)  # it was beside the poison once
    turns = Turns()
    house._protocol = Protocol(house.app.consumer, house.worker().dispatcher, turns=turns)
    with turns.alone(lambda: None):
        waiting = threading.Thread(target=house.handle, args=(sale("good"),), kwargs={"redelivered": True})
        waiting.start()
        wait_until(lambda: turns._loners == 2, "it waits")
        recorded = store.note_start(consumer, key)
        store.note_end(consumer, key, recorded)
    waiting.join()
    assert recorded == 1, "what a death would have left behind"
    assert house.sales() == 1
    assert store.note_start(consumer, key) == 0, "it came to its end"


def test_a_suspect_runs_alone_or_its_death_is_not_counted(house: House) -> None:
    """A neighbour whose wait was too long starts beside it: from then on the process may die of the neighbour."""
    starts: list[int] = []
    turns = Turns(longest_wait=0.01)

    def sell(message: dict[str, Any], ctx: Context) -> None:
        starts.append(ctx.attempt)
        with turns.shared():
            house.script.crash_before = "note end"
            raise Crash

    house.app.handler(dict, type=SELL, policy=Idempotent(attempts=2))(sell)
    for _ in range(6):
        house._protocol = Protocol(house.app.consumer, house.worker().dispatcher, turns=turns)
        with house.crashing():
            house.handle(redelivered=True)
    assert starts == [1] * 6


def test_no_handler_starts_unrecorded(house: House) -> None:
    house.sells()
    house.store.inner.note_start = _away
    with pytest.raises(StoreUnavailable):
        house.handle(redelivered=True)
    assert house.sales() == 0


def test_an_end_that_is_not_recorded_is_forgiven(house: House) -> None:
    house.sells(outputs=0)
    house.store.inner.note_end = _away
    assert house.handle(redelivered=True) == (Outcome.HANDLED, Ack())


def _away(*_: Any) -> Any:
    raise StoreUnavailable("down")


# Hops -----------------------------------------------------------------------------------------------------------------


def test_a_message_that_has_gone_round_too_often_is_parked(house: House) -> None:
    """Case 39: two handlers that send to each other."""

    def ping(message: dict[str, Any], ctx: Context) -> None:
        ctx.send(message, to="stock", type="shop.Pong")

    def pong(message: dict[str, Any], ctx: Context) -> None:
        ctx.send(message, to="stock", type="shop.Ping", headers=ctx.headers)

    for name, handler in (("shop.Ping", ping), ("shop.Pong", pong)):
        house.app.handler(dict, type=name, policy=Idempotent(max_hops=9))(handler)
    message, rounds = sale(type="shop.Ping"), 0
    while (handled := house.handle(message))[0] is Outcome.HANDLED:
        message, rounds = house.publisher.sent[-1].message, rounds + 1
    outcome, settlement = handled
    assert (outcome, rounds) == (Outcome.PARKED, 10)
    assert isinstance(settlement, Park)
    assert (settlement.reason, message.hops) == ("TooManyHops", 10)


def test_without_a_limit_a_chain_may_be_endless(house: House) -> None:
    house.sells(outputs=0)
    assert house.deliver(sale(headers={"idemp-hops": 10**9})) is Outcome.HANDLED


def test_headers_that_are_passed_on_tell_only_the_new_message_s_story(house: House) -> None:
    def sell(message: dict[str, Any], ctx: Context) -> None:
        ctx.send({}, to="stock", type="stock.Reserve", headers={**ctx.headers, "idemp-return-code": 7})

    house.app.handler(dict, type=SELL, policy=Idempotent())(sell)
    house.deliver(sale(headers={"tenant": 1, "idemp-redispatched": 1, "idemp-attempt": 3, "idemp-hops": 4}))
    (output,) = house.publisher.sent
    assert output.message.headers == {
        "tenant": 1, "idemp-causation-id": "sale-1", "idemp-hops": 5, "idemp-return-code": 7,
    }  # fmt: skip


# Deferrals ------------------------------------------------------------------------------------------------------------


def test_a_database_that_asks_again_for_ever_is_no_endless_loop(house: House) -> None:
    """Case 34: uncounted so many times, then counted, then parked."""
    house.sells(attempts=2)

    def settled(deferred: int, attempt: int) -> Any:
        house.script.store_faults = [TransientStoreError("deadlock")] * 6
        message = sale(headers={"idemp-deferred": deferred})
        return house.handle(message, attempt=attempt)[1]

    assert settled(0, 2) == settled(MAX_DEFERRALS - 1, 2) == Retry(UNCONFIRMED_DELAY, counted=False)
    assert settled(MAX_DEFERRALS, 1).counted
    assert isinstance(settled(MAX_DEFERRALS, 2), Park)


@pytest.mark.parametrize(
    ("answers", "counted"),
    [(["returned"], True), (["unsendable", "confirm"], True), (["nacked"], False), (["returned", "closed"], False)],
)
def test_an_output_that_no_queue_takes_is_its_handler_s_fault(house: House, answers: Any, counted: bool) -> None:
    """Of a type that is not opted in, whose handler runs again each time; a full queue or a lost link pass."""

    def sell(message: dict[str, Any], ctx: Context) -> None:
        for _ in answers:
            ctx.send({}, to="stock", type="stock.Reserve")

    house.app.handler(dict, type=SELL)(sell)
    house.script.answers = list(answers)
    settlement = house.handle()[1]
    assert isinstance(settlement, Retry)
    assert settlement.counted is counted


# Lost to us before COMMIT ---------------------------------------------------------------------------------------------


def test_not_opted_in_and_lost_is_rolled_back(house: House) -> None:
    """The next delivery would have its effects a second time; nothing was committed, so it has them once."""

    def sell(message: dict[str, Any], ctx: Context) -> None:
        house.effects.write(ctx, "sale")  # type: ignore[arg-type]
        ctx.send({}, to="stock", type="stock.Reserve")

    house.app.handler(dict, type=SELL)(sell)
    with pytest.raises(LostBeforeCommit) as raised:
        house.handle(alive=lambda: False)
    assert raised.value.committed == "no"
    assert (house.sales(), house.sent()) == (0, [])
    assert house.handle()[0] is Outcome.HANDLED
    assert house.sales() == 1


@pytest.mark.parametrize("claim", ["early", "late"])
def test_opted_in_and_lost_is_committed_and_the_next_delivery_a_duplicate(
    house: House, claim: Any, caplog: pytest.LogCaptureFixture
) -> None:
    house.sells(outputs=1, claim=claim)
    seen_at = []

    def alive() -> bool:
        seen_at.append(list(house.script.calls))
        return False

    assert house.handle(alive=alive) == (Outcome.HANDLED, Ack())
    assert "commit" not in seen_at[0]
    assert [record.event for record in caplog.records if hasattr(record, "event")] == ["delivery_lost"]
    assert house.handle(redelivered=True)[0] is Outcome.REDISPATCHED
    assert house.sales() == 1


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_what_was_parked_and_comes_again_is_not_started_again(house: House, policy: Policy) -> None:
    """Its ack may be lost; two such messages could else kill one another's acks for ever."""
    starts = killing(house, policy, {"bad"})
    for _ in range(policy.attempts):
        with house.crashing():
            house.handle(sale("bad"), redelivered=True)
    letters = [house.handle(sale("bad"), redelivered=True)[1] for _ in range(3)]
    assert [letter.headers["idemp-dead-attempts"] for letter in letters if isinstance(letter, Park)] == [3, 3, 3]
    assert len(starts) == policy.attempts


@pytest.mark.parametrize("redelivered", [False, True])
def test_a_replay_starts_afresh(house: House, redelivered: bool) -> None:
    """Somebody has looked at it; also where the worker that has it in its hands is restarted."""
    victims = {"bad"}
    starts = killing(house, Idempotent(attempts=2), victims)
    for _ in range(2):
        with house.crashing():
            house.handle(sale("bad"), redelivered=True)
    assert house.handle(sale("bad"), redelivered=True)[0] is Outcome.PARKED
    victims.clear()
    replayed = sale("bad").with_headers(**{REPLAYS_HEADER: 1})
    assert house.handle(replayed, redelivered=redelivered)[0] is Outcome.HANDLED
    assert starts[-1] == ("bad", 1)


def test_deaths_outlast_a_claim_that_is_held_elsewhere(house: House) -> None:
    """The dead process's transaction may live on for a while in the server: that is no end of the handler."""
    starts = killing(house, Idempotent(attempts=2), {"bad"})
    with house.store.inner.begin() as unit:
        kind = type(unit)
    letters: list[Any] = []
    copy, redelivered = sale("bad"), True
    for _ in range(9):
        with suppress(Crash):
            letters.append(house.handle(copy, redelivered=redelivered)[1])
            break
        house.script.clear()
        house.restart()
        with patched(kind, "claim", lambda *_: Claimed(Verdict.IN_FLIGHT)):
            outcome, deferral = house.handle(sale("bad"), redelivered=True)
        assert outcome is Outcome.IN_FLIGHT
        assert isinstance(deferral, Retry)
        copy, redelivered = retried(sale("bad"), deferral, house.clock.now()), False  # out of a delay tier it is new
    assert [letter.reason for letter in letters] == ["WorkerDied"]
    assert starts == [("bad", 1), ("bad", 2)]


def test_an_outage_is_no_death(house: House) -> None:
    """The end can't be recorded while the database is away: it is owed, and paid before anything is held against anybody."""
    house.sells(attempts=1)
    inner = house.store.inner
    house.script.store_faults = [StoreUnavailable("down")] * 6
    with patched(inner, "note_end", _away), pytest.raises(StoreUnavailable):
        house.handle(redelivered=True)
    with patched(inner, "note_end", _away), pytest.raises(StoreUnavailable):
        house.handle(redelivered=True)
    assert house.handle(redelivered=True)[0] is Outcome.HANDLED
    assert house.sales() == 1


@pytest.mark.parametrize("fault", [StoreUnavailable("down"), TransientStoreError("busy")])
def test_an_outage_takes_no_death_back(house: House, fault: Exception) -> None:
    """Its handler did not run: what killed before is no less suspect than it was."""
    starts = killing(house, Idempotent(attempts=2), {"bad"})
    with house.crashing():
        house.handle(sale("bad"), redelivered=True)
    house.script.store_faults = [fault] * 6
    with suppress(StoreUnavailable):
        assert house.handle(sale("bad"), redelivered=True)[0] is Outcome.RETRIED
    assert house.script.store_faults == []
    with house.crashing():
        house.handle(sale("bad"), redelivered=True)
    assert house.handle(sale("bad"), redelivered=True)[0] is Outcome.PARKED
    assert starts == [("bad", 1), ("bad", 2)]


def test_a_start_whose_record_has_no_answer_is_no_death(house: House) -> None:
    """The record may be there; the handler did not run. However long such an outage lasts, the message is not parked."""
    house.sells(attempts=1)
    for _ in range(3):
        with unanswered_start(house), pytest.raises(StoreUnavailable):
            house.handle(redelivered=True)
    assert house.handle(redelivered=True)[0] is Outcome.HANDLED
    assert house.sales() == 1


def test_a_start_whose_record_has_no_answer_takes_no_death_back(house: House) -> None:
    """What killed before, and what kills after it, is counted as without the outage; the record says so, too."""
    starts = killing(house, Idempotent(attempts=3), {"bad"})
    for outages in (0, 2, 1):
        for _ in range(outages):
            with unanswered_start(house), pytest.raises(StoreUnavailable):
                house.handle(sale("bad"), redelivered=True)
        with house.crashing():
            house.handle(sale("bad"), redelivered=True)
        house.restart()
    assert starts == [("bad", 1), ("bad", 2), ("bad", 3)]
    assert house.handle(sale("bad"), redelivered=True)[0] is Outcome.PARKED


@contextmanager
def unanswered_start(house: House) -> Iterator[None]:
    """The next record of a start takes effect, and its answer is lost."""
    inner = house.store.inner
    genuine = inner.note_start

    def lost(consumer: str, key: UUID) -> int:
        genuine(consumer, key)
        raise StoreUnavailable("its answer is lost")

    with patched(inner, "note_start", lost):
        yield


def test_deaths_and_failures_add_up(house: House) -> None:
    """Two deaths and a failure are three attempts."""
    raising = [False]
    seen: list[int] = []

    def sell(message: dict[str, Any], ctx: Context) -> None:
        seen.append(ctx.attempt)
        if raising[0]:
            raise ValueError("no stock")
        house.script.crash_before = "note end"
        raise Crash

    house.app.handler(dict, type=SELL, policy=Idempotent(attempts=4))(sell)
    for _ in range(2):
        with house.crashing():
            house.handle(redelivered=True)
    raising[0] = True
    settlement = house.handle(redelivered=True)[1]
    assert isinstance(settlement, Retry)
    again = retried(sale(), settlement, house.clock.now())
    assert attempt_of(again) == 4
    assert isinstance(house.handle(again, attempt=attempt_of(again))[1], Park)
    assert seen == [1, 2, 3, 4]


@contextmanager
def patched(target: Any, name: str, value: Any) -> Iterator[None]:
    """A real part that answers otherwise for a while."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, name, value)
        yield
