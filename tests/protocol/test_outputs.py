"""Cases 17 to 28: what a handling emits, and how it reaches the broker."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from idemp import App, Context, Idempotent, Outcome, Policy
from idemp.broker.port import Ack, Retry
from idemp.errors import DispatchIncomplete, OutputError, StoreUnavailable
from idemp.messages import UNSTORED_HEADER, OutputKind
from idemp.relay import Round
from idemp.settling import UNCONFIRMED_DELAY
from tests.house import SELL, House, sale

if TYPE_CHECKING:
    from idemp.testing.faulty import Answer


def test_only_the_successful_attempts_outputs_exist(house: House) -> None:
    """Case 17."""
    fails = [True]

    def sell(message: dict[str, Any], ctx: Context) -> None:
        ctx.send({"attempt": ctx.attempt}, to="stock", type="stock.Reserve")
        if fails.pop() if fails else False:
            ctx.send({"leaked": True}, to="stock", type="stock.Reserve")
            raise ValueError("no")

    house.app.handler(dict, type=SELL, policy=Idempotent())(sell)
    with pytest.raises(ValueError, match="no"):
        house.deliver(attempt=1)
    house.deliver(attempt=2)
    assert [body for _, body in house.sent()] == [b'{"attempt":2}']


def test_zombie_overwrites_nothing(house: House) -> None:
    """Case 18: a first attempt that comes to its end after the second one is a late duplicate."""
    house.sells()
    house.script.commit_faults = ["lost, not committed"] * 2
    with pytest.raises(Exception, match="took its answer away"):
        house.deliver()
    zombie = house.worker()
    house._protocol = None
    assert house.deliver() is Outcome.HANDLED
    stored = house.sent()
    assert zombie.process(sale()) is Outcome.REDISPATCHED
    assert house.sent() == stored * 2
    assert house.sales() == 1


def test_everything_about_an_output_is_kept(house: House) -> None:
    """Case 19: kept across redispatch, but for the header that says so."""

    def sell(message: dict[str, Any], ctx: Context) -> None:
        ctx.publish(
            {"n": 0}, type="stock.Low", headers={"tenant": "ü", "deep": [0, "", None, {}]}, ttl=1.5, delay=2.5,
            priority=0, mandatory=False, correlation_id="own",
        )  # fmt: skip
        ctx.send({"n": 1}, to="stock", type="stock.Reserve", reply_to="answers", priority=255)
        ctx.reply({"n": 2}, type="shop.Sold")
        ctx.return_(0)

    house.app.handler(dict, type=SELL, policy=Idempotent())(sell)
    cause = sale(correlation_id="conversation", reply_to="stock", headers={"traceparent": "00-1-2-01", "mine": 1})
    house.deliver(cause)
    house.restart()
    first = house.publisher.sent[:]
    house.deliver(cause)
    again = house.publisher.sent[len(first) :]
    assert [output.marked_redispatched() for output in first] == again
    assert all(output.message.redispatched for output in again)
    low, reserve, sold, code = first
    assert (low.kind, low.exchange, low.routing_key, low.mandatory, low.delay) == (
        OutputKind.PUBLISH, "idemp", "stock.Low", False, 2.5,
    )  # fmt: skip
    assert (low.message.ttl, low.message.priority, low.message.correlation_id) == (1.5, 0, "own")
    assert low.message.headers == {
        "tenant": "ü", "deep": [0, "", None, {}], "idemp-causation-id": "sale-1", "idemp-hops": 1,
            "traceparent": "00-1-2-01",
    }  # fmt: skip
    assert (reserve.exchange, reserve.routing_key, reserve.message.reply_to) == ("", "stock", "answers")
    assert (sold.kind, sold.routing_key, sold.message.correlation_id) == (OutputKind.REPLY, "stock", "conversation")
    assert (code.message.headers["idemp-return-code"], code.message.body) == (0, b"null")
    assert {output.message.message_id for output in first} == {str(output.id) for output in first}


def test_redispatch_keeps_emission_order(house: House) -> None:
    """Case 20."""
    house.sells(outputs=30)
    house.deliver()
    house.restart()
    house.deliver()
    bodies = [output.message.body for output in house.publisher.sent]
    assert bodies[:30] == bodies[30:]
    assert [output.ordinal for output in house.publisher.sent] == [*range(30)] * 2


@pytest.mark.parametrize("answer", ["unsendable", "nacked", "returned", "timeout", "blocked", "closed", "lose"])
@pytest.mark.parametrize("index", [0, 2, 3])
def test_exactly_the_unconfirmed_stay_pending(house: House, answer: Answer, index: int) -> None:
    """Case 21: nothing is recorded as dispatched before its own confirm."""
    house.sells(outputs=4, redispatch="pending")
    house.script.answers = [*["confirm"] * index, answer]
    assert house.handle() == (Outcome.PENDING, Retry(UNCONFIRMED_DELAY, counted=False))
    assert house.pending() == 1
    before = len(house.publisher.sent)
    house.restart()
    assert house.handle() == (Outcome.REDISPATCHED, Ack())
    assert [output.ordinal for output in house.publisher.sent[before:]] == [index]
    assert house.pending() == 0


def test_confirms_that_cannot_be_recorded_are_kept(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """The database is away when they are due: recorded later, and no relay sends those outputs again."""
    house.sells(outputs=2)
    house.deliver()

    def away(*_: Any) -> None:
        raise StoreUnavailable("down")

    with monkeypatch.context() as outage:
        outage.setattr(house.store.inner, "record", away)
        house.worker().dispatcher.flush()
        assert house.app.store.upkeep.pending_count() == 2
    assert house.pending() == 0
    assert house.relay() == Round()


def test_pending_with_a_living_relay_is_acked(house: House) -> None:
    """Safely pending: the relay ships it, and only then nobody waits for a redelivery."""
    house.sells(outputs=1)
    house.script.answers = ["nacked"]
    house.app.store.upkeep.beat("relay", relay=True, consumers=[])
    assert house.handle() == (Outcome.PENDING, Ack())
    assert house.relay().confirmed == 1
    assert house.pending() == 0


def test_nobody_knows_whether_a_relay_lives(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the delivery is not acked, and the question does not kill the worker."""
    from idemp.errors import TransientStoreError

    def busy() -> bool:
        raise TransientStoreError("busy")

    house.sells(outputs=1)
    house.script.answers = ["nacked"]
    monkeypatch.setattr(house.store.inner, "relay_alive", busy)
    assert house.handle() == (Outcome.PENDING, Retry(UNCONFIRMED_DELAY, counted=False))


def test_unroutable_holds_up_no_other_and_is_quarantined(house: House) -> None:
    """Case 22."""

    def sell(message: dict[str, Any], ctx: Context) -> None:
        ctx.send({"n": 0}, to="stock", type="stock.Reserve")
        ctx.send({"n": 1}, to="no.such.queue", type="stock.Reserve")
        ctx.send({"n": 2}, to="stock", type="stock.Reserve")

    house.app.handler(dict, type=SELL, policy=Idempotent())(sell)
    assert house.deliver() is Outcome.PENDING
    assert [output.ordinal for output in house.publisher.sent] == [0, 2]
    assert house.pending() == 1
    rounds = [house.relay(max_attempts=3) for _ in range(4)]
    assert [(done.taken, done.quarantined) for done in rounds] == [(1, 0), (1, 0), (1, 1), (0, 0)]
    assert house.pending() == 1


@pytest.mark.parametrize("mended_by", ["redelivery", "relay"])
def test_broker_down_at_dispatch(house: House, mended_by: str) -> None:
    """Case 23: outputs go out later, whichever comes first; duplicates carry one id."""
    house.sells(outputs=2)
    house.script.answers = ["closed"] * 4
    assert [house.deliver(), house.deliver()] == [Outcome.PENDING] * 2
    if mended_by == "redelivery":
        assert house.deliver() is Outcome.REDISPATCHED
        assert house.pending() == 0
        assert house.relay().taken == 0
    else:
        assert house.relay().confirmed == 2
        house.deliver()
    assert len({id_ for id_, _ in house.sent()}) == 2
    assert (house.sales(), house.pending()) == (1, 0)


def test_worded_differently_each_time(house: House) -> None:
    """Case 25c: not opted in, so its output may differ under one id; the next consumer skips the second, no alarm."""
    runs: list[int] = []

    def advise(message: dict[str, Any], ctx: Context) -> None:
        runs.append(len(runs))
        ctx.publish({"run": len(runs)}, type="shop.Advice", mandatory=False)

    house.app.handler(dict, type=SELL, policy=Policy())(advise)
    next_app = App("next", store=house.store, broker=house.broker, settings=house.app.settings)
    next_app.handler(dict, type="shop.Advice", policy=Idempotent())(
        lambda message, ctx: house.effects.write(ctx, "sale")
    )
    house.deliver()
    house.deliver()
    first, second = (output.message for output in house.publisher.sent)
    assert first.message_id == second.message_id
    assert first.body != second.body
    assert first.headers[UNSTORED_HEADER] == 1
    worker = next_app.protocol(house.publisher)
    assert [worker.process(first), worker.process(second)] == [Outcome.HANDLED, Outcome.SKIPPED]
    assert house.sales() == 1


def test_not_opted_in_and_unconfirmed(house: House) -> None:
    """Its outputs are not stored: the message itself has to come again."""
    house.app.handler(dict, type=SELL)(lambda message, ctx: ctx.send({}, to="stock", type="stock.Reserve") and None)
    house.script.answers = ["nacked"]
    with pytest.raises(DispatchIncomplete, match="1 of 1") as raised:
        house.deliver()
    assert (raised.value.committed, raised.value.reasons) == ("yes", ("nacked",))
    house.script.answers = ["nacked"]
    outcome, settlement = house.handle()
    assert isinstance(settlement, Retry)
    assert (outcome, settlement.delay, settlement.counted) == (Outcome.RETRIED, UNCONFIRMED_DELAY, False)
    assert house.handle() == (Outcome.HANDLED, Ack())


@pytest.mark.parametrize("emit", [lambda ctx: ctx.reply({}, type="shop.Sold"), lambda ctx: ctx.return_(0)])
def test_reply_without_reply_to(house: House, emit: Any) -> None:
    """Case 26: a clear error, before COMMIT."""
    house.app.handler(dict, type=SELL, policy=Idempotent())(lambda message, ctx: emit(ctx) and None)
    with pytest.raises(OutputError, match="no reply_to"):
        house.deliver()
    assert house.pending() == 0
    assert house.deliver(sale(reply_to="stock")) is Outcome.HANDLED


def test_output_after_the_unit_closed(house: House) -> None:
    """Case 27."""
    kept: list[Context] = []
    house.app.handler(dict, type=SELL, policy=Idempotent())(lambda message, ctx: kept.append(ctx))
    house.deliver()
    with pytest.raises(OutputError, match="after its handling had ended"):
        kept[0].send({}, to="stock", type="stock.Reserve")
    assert house.sent() == []


def test_threads_of_one_handler_emit(house: House) -> None:
    """Case 28: all stored, order per thread."""

    def sell(message: dict[str, Any], ctx: Context) -> None:
        def emit(thread: int) -> None:
            for number in range(25):
                ctx.send({"thread": thread, "n": number}, to="stock", type="stock.Reserve")

        threads = [threading.Thread(target=emit, args=(thread,)) for thread in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)

    house.app.handler(dict, type=SELL, policy=Idempotent())(sell)
    house.deliver()
    bodies = [output.message.body for output in house.publisher.sent]
    assert (len(bodies), len(set(bodies))) == (200, 200)
    for thread in range(8):
        own = [body for body in bodies if body.startswith(b'{"thread":%d,' % thread)]
        assert own == [b'{"thread":%d,"n":%d}' % (thread, number) for number in range(25)]


@pytest.mark.parametrize(
    "headers", [{"a": b"bytes"}, {"a": {1: "number as key"}}, {"a": (1, 2)}, {"a": float("nan")}, {"a": timedelta(1)}]
)
def test_headers_that_a_store_would_change(house: House, headers: dict[str, Any]) -> None:
    """An error where they are emitted: a redispatch would send others."""
    house.app.handler(dict, type=SELL, policy=Idempotent())(
        lambda message, ctx: ctx.send({}, to="stock", type="stock.Reserve", headers=headers) and None
    )
    with pytest.raises(OutputError, match="headers"):
        house.deliver()


@pytest.mark.parametrize(
    "name", ["x" * 256, "é" * 128, "a\x00b", "\ud800", 5], ids=["long", "bytes", "zero", "half", "5"]
)
@pytest.mark.parametrize("what", ["to", "type", "correlation_id", "reply_to", "headers"])
def test_names_that_tables_or_brokers_do_not_take(house: House, what: str, name: Any) -> None:
    """An error where they are emitted, and no DataError of the database after each attempt."""
    if (what, name) == ("headers", 5):
        return  # no JSON
    given: dict[str, Any] = {"to": "stock", "type": "stock.Reserve", what: {name: 1} if what == "headers" else name}
    house.app.handler(dict, type=SELL, policy=Idempotent())(lambda message, ctx: ctx.send({}, **given) and None)
    with pytest.raises(OutputError, match="of an output can't be") as told:
        house.deliver()
    assert "255 bytes" in told.value.fix
    assert house.sent() == []


def test_names_as_long_as_they_may_be(house: House) -> None:
    longest = "é" * 127 + "x"
    given: dict[str, Any] = {"type": longest, "correlation_id": longest, "reply_to": longest, "headers": {longest: 1}}
    house.app.handler(dict, type=SELL, policy=Idempotent())(
        lambda message, ctx: ctx.send({}, to="stock", **given) and None
    )
    assert house.deliver() is Outcome.HANDLED


def test_ids_are_the_same_after_the_window(house: House) -> None:
    """Even a handling that runs once more, long after it was purged, sends the same ids."""
    house.sells(outputs=2)
    house.deliver()
    house.restart()
    upkeep = house.app.store.upkeep
    for _ in range(20):
        upkeep.beat("w", relay=False, consumers=["shop"])
        house.clock.advance(timedelta(seconds=30))
    upkeep.beat("w", relay=False, consumers=["shop"])
    assert upkeep.purge("shop", {SELL: timedelta(minutes=5)}, 10) == 1
    assert house.deliver() is Outcome.HANDLED
    assert house.sales() == 2
    assert house.sent()[:2] == house.sent()[2:]
