"""Cases 29 to 34: handlers that fail, messages that can't be read, databases that ask again."""

from __future__ import annotations

import asyncio
import zlib
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from idemp import Context, Idempotent, Message, Outcome, Refuse
from idemp.broker.copies import attempt_of, parked, retried
from idemp.broker.port import Ack, Delivery, Park, Retry
from idemp.deadletter import without_story
from idemp.errors import OutputError, StoreUnavailable, TransientStoreError
from idemp.testing.faulty import Crash
from tests.house import SELL, House, sale, sql_house


def failing(house: House, error: BaseException | None, **policy: Any) -> list[int]:
    """A handler that emits, then raises; which attempts it saw."""
    attempts: list[int] = []

    def sell(message: dict[str, Any], ctx: Context) -> None:
        attempts.append(ctx.attempt)
        house.effects.write(ctx, "sale")  # type: ignore[arg-type]
        ctx.send({}, to="stock", type="stock.Reserve")
        if error is not None:
            raise error

    house.app.handler(dict, type=SELL, policy=Idempotent(**policy))(sell)
    return attempts


@pytest.mark.parametrize("claim", ["early", "late"])
def test_exactly_so_many_attempts_then_the_dead_letter(house: House, claim: str) -> None:
    """Case 29."""
    attempts = failing(house, ValueError("no stock of A-1"), attempts=3, retry_delays=["1s", "5s"], claim=claim)
    started = house.clock.now()
    message = sale(headers={"tenant": 1})
    settlements: list[Any] = []
    while True:
        outcome, settlement = house.handle(message, attempt=attempt_of(message))
        settlements.append((outcome, settlement))
        if not isinstance(settlement, Retry):
            break
        message = retried(message, settlement, house.clock.now())
        house.clock.advance(settlement.delay)
    assert [
        (outcome, settlement.delay.total_seconds(), settlement.counted) for outcome, settlement in settlements[:2]
    ] == [
        (Outcome.RETRIED, 1, True),
        (Outcome.RETRIED, 5, True),
    ]
    assert attempts == [1, 2, 3]
    outcome, park = settlements[2]
    assert outcome is Outcome.PARKED
    assert isinstance(park, Park)
    story = {name.removeprefix("idemp-dead-"): value for name, value in park.headers.items()}
    assert (story["reason"], story["error"], story["attempts"]) == ("ValueError", "no stock of A-1", 3)
    assert "in sell" in story["stack"]
    assert (story["first-at"], story["last-at"]) == (started.isoformat(), house.clock.now().isoformat())
    assert (story["queue"], story["consumer"]) == ("shop", "shop")
    assert story["host"]
    assert story["version"]
    assert (house.sales(), house.sent(), house.pending()) == (0, [], 0)
    dead = parked(message, park)
    assert (dead.message_id, dead.headers["tenant"]) == ("sale-1", 1)


class Mute(Exception):
    def __str__(self) -> str:
        raise AttributeError("no text")


@pytest.mark.parametrize(
    ("error", "told"),
    [(Mute(), "(AttributeError while it was to be shown)"), (ValueError("no file \udc80\x00"), r"no file \udc80\x00")],
)
def test_errors_that_can_not_be_shown_are_parked_as_all_others(house: House, error: Exception, told: str) -> None:
    """They would end the worker, and each one that follows."""
    failing(house, error, attempts=2)
    outcome, retry = house.handle(sale(), attempt=1)
    assert outcome is Outcome.RETRIED
    assert isinstance(retry, Retry)
    assert retry.reason == f"{type(error).__name__}: {told}"
    outcome, park = house.handle(sale(), attempt=2)
    assert outcome is Outcome.PARKED
    assert isinstance(park, Park)
    assert park.headers["idemp-dead-error"] == told
    "".join(map(str, park.headers.values())).encode()


def test_refuse_is_one_delivery(house: House) -> None:
    """Case 30."""
    attempts = failing(house, Refuse("no such customer"))
    outcome, settlement = house.handle()
    assert outcome is Outcome.PARKED
    assert isinstance(settlement, Park)
    assert (settlement.reason, attempts) == ("Refuse", [1])
    assert (house.sales(), house.sent()) == (0, [])


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (sale(body=b""), "UndecodableMessage"),
        (sale(body=b"{"), "UndecodableMessage"),
        (sale(body=b"[1]"), "UndecodableMessage"),
        (sale(body=b"\xff"), "UndecodableMessage"),
        (sale(body=b'{"a": 1, "a": 2}'), "UndecodableMessage"),
        (sale(body=b'{"a": NaN}'), "UndecodableMessage"),
        (sale(body=b'{"a": 1e999}'), "UndecodableMessage"),
        (sale(body=b'{"a": "\\ud800"}'), "UndecodableMessage"),
        (sale(body=b'{"a":' * 100_000 + b"1" + b"}" * 100_000), "UndecodableMessage"),
        (sale(content_type="application/x-python-serialize"), "UnsupportedContentType"),
        (sale(content_type="text/plain"), "UnsupportedContentType"),
        (sale(body=b'"' + b"x" * (16 * 1024 * 1024) + b'"'), "OversizedMessage"),
        (sale("x" * 256), "InvalidId"),
        (sale(" "), "InvalidId"),
        (sale(""), "InvalidId"),
        (sale("nul\x00"), "InvalidId"),
    ],
    ids=lambda value: value if isinstance(value, str) else repr(value.body[:12]),
)
def test_what_cannot_be_read_is_parked_at_once(house: House, message: Message, reason: str) -> None:
    """Cases 31 and 46: a clear verdict for each, nothing lost, the handler never called."""
    attempts = failing(house, None)
    outcome, settlement = house.handle(message)
    assert outcome is Outcome.PARKED
    assert isinstance(settlement, Park)
    assert (settlement.reason, attempts) == (reason, [])
    assert len(settlement.headers["idemp-dead-error"]) <= 1000
    assert "begin" not in house.script.calls


@pytest.mark.parametrize(
    "error", [MemoryError(), SystemExit(1), KeyboardInterrupt(), asyncio.CancelledError(), Crash()]
)
@pytest.mark.parametrize("claim", ["early", "late"])
def test_not_the_messages_fault(house: House, error: BaseException, claim: str) -> None:
    """Case 32: not swallowed, no settlement, so the message returns; nothing of it stays."""
    failing(house, error, attempts=1, claim=claim)
    with pytest.raises(type(error)):
        house.handle()
    assert (house.sales(), house.sent(), house.pending()) == (0, [], 0)


def test_replay_of_a_failed_message_is_handled(house: House) -> None:
    """Case 33."""
    broken = [True]

    def sell(message: dict[str, Any], ctx: Context) -> None:
        house.effects.write(ctx, "sale")  # type: ignore[arg-type]
        if broken:
            raise ValueError("bug")

    house.app.handler(dict, type=SELL, policy=Idempotent(attempts=2))(sell)
    _, settlement = house.handle(attempt=2)
    assert isinstance(settlement, Park)
    broken.clear()
    again = without_story(parked(sale(headers={"idemp-attempt": 2, "mine": 0}), settlement))
    assert (again.headers, attempt_of(again)) == ({"mine": 0}, 1)
    assert house.deliver(again) is Outcome.HANDLED
    assert house.sales() == 1


def test_replay_of_a_handled_message_is_skipped_and_redispatched(house: House) -> None:
    """Case 33."""
    house.sells(outputs=1)
    house.deliver()
    dead = parked(sale(), Park("Anything", {"idemp-dead-attempts": 3}))
    assert house.deliver(without_story(dead)) is Outcome.REDISPATCHED
    assert house.sales() == 1


@pytest.mark.parametrize("fault", [TransientStoreError("deadlock"), StoreUnavailable("gone")])
@pytest.mark.parametrize("times", [1, 5])
def test_database_asks_again(house: House, fault: Exception, times: int) -> None:
    """Case 34: retried as a whole, with a fresh unit; no attempt is counted."""
    attempts = failing(house, None)
    house.script.store_faults = [fault] * times
    assert house.deliver(attempt=7) is Outcome.HANDLED
    assert attempts == [7]
    house.restart()
    assert (house.sales(), house.pending()) == (1, 0)


def test_serialization_failures_at_commit(house: House) -> None:
    attempts = failing(house, None)
    house.script.commit_faults = ["transient", "transient"]
    assert house.deliver() is Outcome.HANDLED
    assert attempts == [1, 1, 1]
    assert (house.sales(), len(house.sent())) == (1, 1)


def test_a_bounded_number_of_times(house: House) -> None:
    attempts = failing(house, None, attempts=1)
    house.script.commit_faults = ["transient"] * 6
    outcome, settlement = house.handle()
    assert outcome is Outcome.RETRIED
    assert isinstance(settlement, Retry)
    assert not settlement.counted
    assert len(attempts) == 6


def test_no_run_sees_what_another_did_to_its_message(house: House) -> None:
    seen = []

    def sell(message: dict[str, Any], ctx: Context) -> None:
        seen.append(dict(message))
        message.clear()

    house.app.handler(dict, type=SELL, policy=Idempotent(key="sku"))(sell)
    house.script.commit_faults = ["transient", "transient"]
    assert house.deliver() is Outcome.HANDLED
    assert seen == [{"sku": "A-1"}] * 3
    assert house.deliver() is Outcome.SKIPPED


def test_database_away_is_raised_for_the_worker_to_wait(house: House) -> None:
    """Case 36: no settlement, no dead letter, no attempt."""
    failing(house, None)
    house.script.store_faults = [StoreUnavailable("down")] * 6
    with pytest.raises(StoreUnavailable):
        house.handle(attempt=7)
    assert house.handle(attempt=7) == (Outcome.HANDLED, Ack())


def test_unknown_type_of_a_failing_kind_has_no_policy(house: House) -> None:
    house.sells()
    delivery = Delivery(message=replace(sale(), type="gone"), queue="shop")
    assert house.worker().settle_failure(delivery, ValueError("x"))[0] is Outcome.PARKED


def test_output_that_cannot_be_is_the_handlers_failure(house: House) -> None:
    for number, result in enumerate((0, "text", {"no": "type"}, object())):
        name = f"shop.Odd{number}"
        house.app.handler(dict, type=name, policy=Idempotent())(lambda message, result=result: result)
        with pytest.raises(OutputError):
            house.deliver(sale(type=name))
        assert isinstance(house.handle(sale(type=name))[1], Retry)
    assert house.pending() == 0


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
def test_isolation_levels_through_the_protocol(postgresql_url: str, isolation: str) -> None:
    """Case 13: correct, after bounded retries of the whole delivery."""
    with sql_house(postgresql_url) as house:
        engine = create_engine(postgresql_url, isolation_level=isolation)
        store = type(house.store.inner)(engine, clock=house.clock)
        strict = House(store, house.effects, house.clock)
        seen: list[int] = []

        def sell(message: dict[str, Any], ctx: Context) -> None:
            total = ctx.connection.scalar(text("SELECT count(*) FROM conformance_effect"))
            if not seen:
                house.deliver(sale("in between"))
                house.deliver()
            seen.append(total or 0)
            house.effects.write(ctx, "sale")  # type: ignore[arg-type]
            ctx.send({"seen": total}, to="stock", type="stock.Reserve")

        house.sells(outputs=1)
        strict.app.handler(dict, type=SELL, policy=Idempotent(claim="late"))(sell)
        assert strict.deliver() is Outcome.REDISPATCHED
        assert house.sales() == 2
        store.upkeep.close()
        engine.dispose()


def test_a_compressed_body_is_parked_with_its_header_named(house: House) -> None:
    """As kombu's producers compress it; a header of that name on a plain body is the user's own."""
    house.sells()
    compressed = sale(body=zlib.compress(b'{"sku": "A-1"}'), headers={"compression": "application/x-gzip"})
    outcome, settlement = house.handle(compressed)
    assert outcome is Outcome.PARKED
    assert isinstance(settlement, Park)
    assert "header compression='application/x-gzip'" in settlement.headers["idemp-dead-error"]
    assert house.deliver(sale(headers={"compression": "none"})) is Outcome.HANDLED
