"""What an error means, in each phase, with a store that takes other handlings and one that takes none."""

from __future__ import annotations

import argparse
import asyncio
import signal
import threading
from dataclasses import replace
from typing import Any

import pytest

from idemp import Context, Idempotent, Outcome, Policy
from idemp.broker.copies import attempt_of, retried
from idemp.broker.port import Delivery, Park, Retry
from idemp.classification import MAX_DEFERRALS, RULES, Action, Phase, Rule, phase_of, raised_in, rule_for
from idemp.errors import LostBeforeCommit, SchemaError, StoreUnavailable, UnknownMessageType, WorkerDied
from idemp.messages import DEFERRED_HEADER, Message
from idemp.protocol import Protocol
from idemp.suspects import Turns
from idemp.testing.faulty import FaultyUnit
from tests.house import SELL, House, sale

EARLY, LATE, NOT_OPTED_IN = Idempotent(attempts=3), Idempotent(attempts=3, claim="late"), Policy(attempts=3)
POLICIES = {"early": EARLY, "late": LATE, "not opted in": NOT_OPTED_IN}

LOSSES = [
    *((place, policy) for place in ("handler", "commit") for policy in (EARLY, LATE, NOT_OPTED_IN)),
    ("store_outputs", EARLY),
    ("claim_and_store", LATE),
]
"""Where it is noticed that a connection was lost while the handler ran."""
STATEMENTS = [
    ("claim", EARLY), ("store_outputs", EARLY), ("commit", EARLY), ("claim_and_store", LATE), ("commit", LATE),
    ("commit", NOT_OPTED_IN),
]  # fmt: skip
"""Which statements of idemp's own there are."""


def until_parked(house: House, message: Message, **of_delivery: Any) -> list[str]:
    """Deliver until the message is parked: "free" for a retry that does not count, "counted", and why it was parked."""
    became: list[str] = []
    while len(became) < 99:
        settlement = house.handle(message, attempt=attempt_of(message), **of_delivery)[1]
        if isinstance(settlement, Park):
            return [*became, settlement.reason]
        assert isinstance(settlement, Retry)
        became.append("counted" if settlement.counted else "free")
        message = retried(message, settlement, house.clock.now())
    raise AssertionError(f"never parked: {became}")


def test_every_error_in_every_phase_has_a_rule() -> None:
    for phase in Phase:
        for obstacle in (True, False):
            error = ValueError("no stock")
            raised_in(phase, error)
            assert isinstance(rule_for(error, lambda obstacle=obstacle: obstacle), Rule)  # type: ignore[misc]


def test_no_rule_is_out_of_reach() -> None:
    """Each stands before those that would take its errors."""

    def covers(former: Rule, rule: Rule) -> bool:
        return (
            former.test is None
            and former.stopping is None
            and former.obstacle is None
            and former.phases >= rule.phases
            and all(issubclass(each, former.errors) for each in rule.errors)
        )

    for number, rule in enumerate(RULES):
        assert not [former.what for former in RULES[:number] if covers(former, rule)], rule.what


def test_the_store_is_not_asked_for_what_a_handler_raised() -> None:
    def asked() -> bool:
        raise AssertionError("asked")

    assert rule_for(ValueError("no stock"), asked).action is Action.RETRY


def test_the_first_phase_that_is_noted_stays() -> None:
    error = ValueError("no stock")
    raised_in(Phase.HANDLER, error)
    raised_in(Phase.COMMIT, error)
    assert phase_of(error) is Phase.HANDLER


# A connection that is lost while the handler runs ---------------------------------------------------------------------


def losing(house: House, patch: pytest.MonkeyPatch, policy: Policy, place: str) -> list[str | None]:
    """A handler whose message `bad` loses the connection; where that is noticed. Whose handler was started."""
    runs: list[str | None] = []
    lost = [False]

    def sell(message: dict[str, Any], ctx: Context) -> None:
        runs.append(ctx.message_id)
        lost[0] = ctx.message_id == "bad"
        house.effects.write(ctx, "sale")  # type: ignore[arg-type]
        if lost[0] and place == "handler":
            raise StoreUnavailable("server closed the connection unexpectedly")

    house.app.handler(dict, type=SELL, policy=policy)(sell)

    def gone(name: str) -> Any:
        inner = getattr(FaultyUnit, name)

        def call(unit: FaultyUnit, *arguments: Any) -> Any:
            if lost[0]:
                lost[0] = False
                raise StoreUnavailable("server closed the connection unexpectedly")
            return inner(unit, *arguments)

        return call

    if place == "handler":
        patch.setattr(FaultyUnit, "usable", lambda _: not lost[0], raising=False)
    else:
        patch.setattr(FaultyUnit, place, gone(place))
    return runs


@pytest.mark.parametrize(("place", "policy"), LOSSES)
def test_a_lost_connection_counts_after_a_few_times(
    house: House, monkeypatch: pytest.MonkeyPatch, policy: Policy, place: str
) -> None:
    """The server takes other work: wherever the loss is noticed, it is the handler's, and no neighbour waits for it."""
    runs = losing(house, monkeypatch, policy, place)
    assert house.handle(sale("bad"))[0] is Outcome.RETRIED
    assert house.handle(sale("good"))[0] is Outcome.HANDLED
    assert until_parked(house, sale("bad")) == [*["free"] * 3, *["counted"] * 2, "StoreUnavailable"]
    assert runs.count("bad") == 2 + 2 * 6, "each delivery runs again once, at once"
    assert house.sales() == 1


@pytest.mark.parametrize(("place", "policy"), LOSSES)
def test_a_lost_connection_to_a_database_that_is_away_is_held(
    house: House, monkeypatch: pytest.MonkeyPatch, policy: Policy, place: str
) -> None:
    """Case 36: nothing counts, however often it happens."""
    losing(house, monkeypatch, policy, place)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(house.store.inner, "note_start", _away)
        with pytest.raises(StoreUnavailable):
            house.handle(sale("bad", headers={DEFERRED_HEADER: 99}), attempt=3)


def _away(*_: object) -> int:
    raise StoreUnavailable("down")


def test_batches_lose_a_connection_as_single_deliveries_do(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    losing(house, monkeypatch, Idempotent(attempts=1, batch=10), "handler")
    ended = house.together(sale("good"), sale("bad", headers={DEFERRED_HEADER: 3}), sale("fine"))
    assert [outcome for outcome, _ in ended] == [Outcome.HANDLED, Outcome.PARKED, Outcome.HANDLED]


# Errors of idemp's own statements -------------------------------------------------------------------------------------


class NoSuchTable(Exception):
    """What a driver raises."""


@pytest.mark.parametrize(("call", "policy"), STATEMENTS)
@pytest.mark.parametrize("broken", [True, False])
def test_what_a_store_s_own_statement_meets(
    house: House, monkeypatch: pytest.MonkeyPatch, policy: Policy, call: str, broken: bool
) -> None:
    """Where the store fails as a whole it is held, with what is wrong; else it counts, and the message is parked."""
    house.app.handler(dict, type=SELL, policy=policy)(lambda message: None)

    def refuse(*_: object) -> None:
        raise NoSuchTable("idemp_output")

    def missing() -> None:
        raise SchemaError("These tables are missing: idemp_output.", fix="Restore them.")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FaultyUnit, call, refuse)
        if broken:
            patch.setattr(house.store.inner, "verify", missing)
            for _ in range(5):
                with pytest.raises(
                    StoreUnavailable, match=r"These tables are missing: idemp_output\. .* Restore them\."
                ):
                    house.handle(attempt=3)
        else:
            assert until_parked(house, sale()) == ["counted", "counted", "NoSuchTable"]
    assert house.handle()[0] is Outcome.HANDLED


def test_what_a_handler_raises_counts_though_the_store_is_broken(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is its own failure, and is settled: no outage hides it."""

    def sell(message: dict[str, Any]) -> None:
        raise ValueError("no stock")

    house.app.handler(dict, type=SELL, policy=Idempotent(attempts=1))(sell)
    monkeypatch.setattr(house.store.inner, "verify", _away)
    assert house.handle()[0] is Outcome.PARKED


# What ends the process -------------------------------------------------------------------------------------------------


def no_arguments(_: object = None) -> None:
    argparse.ArgumentParser().parse_args(["--no-such-option"])


ENDS: dict[str, BaseException] = {
    "SystemExit": SystemExit(2),
    "MemoryError": MemoryError(),
    "cancelled": asyncio.CancelledError(),
    "GeneratorExit": GeneratorExit(),
}


def ending(house: House, policy: Policy, error: BaseException, bad: str = "bad") -> list[tuple[str | None, int]]:
    """A handler that raises this for one message; its starts."""
    starts: list[tuple[str | None, int]] = []

    def sell(message: dict[str, Any], ctx: Context) -> None:
        starts.append((ctx.message_id, ctx.attempt))
        house.effects.write(ctx, "sale")  # type: ignore[arg-type]
        if ctx.message_id == bad:
            raise error

    house.app.handler(dict, type=SELL, policy=policy)(sell)
    return starts


def in_a_thread(house: House, message: Message, turns: Turns) -> BaseException | tuple[Outcome, Any]:
    """Handle it as a worker's thread does, in a new process."""
    came: list[Any] = []
    protocol = Protocol(house.app.consumer, house.worker().dispatcher, pause=lambda _: None, turns=turns)

    def run() -> None:
        try:
            came.append(protocol.handle(Delivery(message=message, queue="shop", redelivered=True)))
        except BaseException as error:
            came.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    ended: BaseException | tuple[Outcome, Any] = came[0]
    return ended


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("error", ENDS.values(), ids=ENDS)
def test_what_ends_the_process_counts_as_its_death(house: House, policy: Policy, error: BaseException) -> None:
    """Cases 32 and 35: it is not swallowed, and the message is parked after the limit; neighbours are handled."""
    starts = ending(house, policy, error)
    for _ in range(policy.attempts):
        assert in_a_thread(house, sale("bad"), Turns(solitary=True)) is error
    assert in_a_thread(house, sale("good"), Turns(solitary=True)) == (Outcome.HANDLED, house.handle(sale("fine"))[1])
    parked = in_a_thread(house, sale("bad"), Turns(solitary=True))
    assert isinstance(parked, tuple)
    assert isinstance(parked[1], Park)
    assert (parked[1].reason, parked[1].headers["idemp-dead-attempts"]) == ("WorkerDied", 3)
    assert [attempt for name, attempt in starts if name == "bad"] == [1, 2, 3]


def test_argparse_in_a_handler_counts_as_well(house: House, capsys: pytest.CaptureFixture[str]) -> None:
    house.app.handler(dict, type=SELL, policy=Idempotent(attempts=1))(lambda message: no_arguments())
    assert isinstance(in_a_thread(house, sale(), Turns(solitary=True)), SystemExit)
    assert house.handle(redelivered=True)[0] is Outcome.PARKED
    assert "no-such-option" in capsys.readouterr().err


def test_the_operator_s_stop_is_not_held_against_a_message(house: House) -> None:
    """A worker that was asked to stop, and whose handler takes that for a reason to exit."""
    error = SystemExit(0)
    starts = ending(house, Idempotent(attempts=1), error)
    for _ in range(3):
        turns = Turns(solitary=True)
        turns.stop.set()
        assert in_a_thread(house, sale("bad"), turns) is error
    assert starts == [("bad", 1)] * 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_ends_a_wrapped_function_is_not_held_against_its_message(
    house: House, number: signal.Signals
) -> None:
    """In the main thread, where Python runs signal handlers: SIGINT's own, and one that exits."""

    def leave(*_: object) -> None:
        raise SystemExit(0)

    signals: list[int] = [number] * 3

    def sell(message: dict[str, Any], ctx: Context) -> None:
        assert ctx.attempt == 1
        if signals:
            signal.raise_signal(signals.pop())

    house.app.handler(dict, type=SELL, policy=Idempotent(attempts=1))(sell)
    handlers = {signal.SIGTERM: leave, signal.SIGINT: signal.default_int_handler}  # a shell may have SIGINT ignored
    former = {each: signal.signal(each, handler) for each, handler in handlers.items()}
    try:
        for _ in range(3):
            with pytest.raises((KeyboardInterrupt, SystemExit)):
                house.handle(redelivered=True)
    finally:
        for each, handler in former.items():
            signal.signal(each, handler)
    assert house.handle(redelivered=True)[0] is Outcome.HANDLED


@pytest.mark.parametrize("error", [MemoryError(), SystemExit(2)], ids=repr)
def test_a_message_that_ends_the_process_while_it_is_decoded_is_parked(house: House, error: BaseException) -> None:
    """Its handler is never started, so that no start of it is recorded; the process knows all the same."""

    def key(message: dict[str, Any]) -> str:
        if message.get("bad"):
            raise error
        return "good"

    house.app.handler(dict, type=SELL, policy=Idempotent(attempts=3, key=key))(lambda message: None)
    bad = sale(body={"bad": 1})
    for _ in range(2):
        with pytest.raises(type(error)):
            house.handle(bad)
        assert house.handle(sale())[0] in {Outcome.HANDLED, Outcome.SKIPPED}
    outcome, settlement = house.handle(bad)
    assert outcome is Outcome.PARKED
    assert isinstance(settlement, Park)
    assert (settlement.reason, settlement.headers["idemp-dead-attempts"]) == (WorkerDied.__name__, 3)


def test_a_delivery_that_is_lost_each_time_is_parked(house: House) -> None:
    """A type that is not opted in, and a handler that outlasts the broker's consumer_timeout."""
    runs: list[int] = []
    house.app.handler(dict, type=SELL, policy=Policy(attempts=3))(lambda message, ctx: runs.append(ctx.attempt))
    with pytest.raises(LostBeforeCommit):
        house.handle(alive=lambda: False)
    for _ in range(3):
        with pytest.raises(LostBeforeCommit):
            house.handle(alive=lambda: False, redelivered=True)
    outcome, settlement = house.handle(alive=lambda: False, redelivered=True)
    assert outcome is Outcome.PARKED
    assert isinstance(settlement, Park)
    assert (settlement.reason, runs) == ("WorkerDied", [1, 1, 2, 3])


# Types that no handler takes ------------------------------------------------------------------------------------------


def test_unknown_types_are_not_parked_until_the_queue_is_known_to_be_ours(house: House) -> None:
    """A queue's name that is another app's, or modules that nobody imported: the messages stay in the queue."""
    house.sells(outputs=0)
    strange = sale(type="stock.Reserve")
    for deferred in (0, MAX_DEFERRALS, 1000):
        message = strange.with_headers(**{DEFERRED_HEADER: deferred})
        assert not house.handle(message)[1].counted  # type: ignore[union-attr]
    assert house.handle()[0] is Outcome.HANDLED
    settlement = house.handle(strange.with_headers(**{DEFERRED_HEADER: MAX_DEFERRALS}))[1]
    assert isinstance(settlement, Park)
    assert settlement.reason == UnknownMessageType.__name__


@pytest.mark.parametrize("message_type", ["stock.Reserve", None])
def test_unknown_types_go_round_before_they_are_parked(house: House, message_type: str | None) -> None:
    """Another app of the queue, or the next release, takes them meanwhile."""
    house.sells(outputs=0)
    house.handle()
    strange = replace(sale(), type=message_type)
    assert until_parked(house, strange) == [*["free"] * MAX_DEFERRALS, "UnknownMessageType"]
    assert "begin" not in house.script.calls[2:]
