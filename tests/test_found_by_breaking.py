"""Schedules and inputs that broke a promise once, found by trying to; each stays as a test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from idemp import App, Context, Idempotent, Key, Message, Outcome, Previous
from idemp.broker.memory import InMemoryBroker
from idemp.broker.port import Refusal, Topology
from idemp.dispatch import publish_all
from idemp.errors import ConfigurationError, HandlerError, OutputError
from idemp.inbox.memory import InMemoryStore
from idemp.settings import Settings
from idemp.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from idemp.messages import Output


def shop(**options: Any) -> App:
    broker = InMemoryBroker()
    broker.declare(Topology(exchange="idemp", queues=("stock",)))
    return App("shop", store=InMemoryStore(), broker=broker, settings=Settings(), **options)


def test_run_once_does_not_take_another_initiations_answer_for_its_own() -> None:
    app = shop()
    app.run_once("inner", lambda unit: unit.send({}, to="stock", type="stock.Reserve"))

    def outer(unit: Any) -> None:
        unit.send({"n": 1}, to="stock", type="stock.Reserve")
        with app.initiate(id="inner"):
            pass

    with pytest.raises(Exception, match="'inner' was handled before"):
        app.run_once("outer", outer)
    (output,) = app.run_once("outer", lambda unit: unit.send({"n": 2}, to="stock", type="stock.Reserve"))
    assert output.message.body == b'{"n":2}'


@pytest.mark.parametrize(
    "options",
    [{"ttl": float("inf")}, {"ttl": -1}, {"ttl": "10"}, {"delay": float("nan")}, {"priority": 256}, {"delay": True}],
    ids=str,
)
def test_what_no_broker_can_write_is_refused_before_commit(options: dict[str, Any]) -> None:
    app = shop()

    @app.handler(dict, type="shop.Sell", policy=Idempotent())
    def sell(message: dict[str, Any], ctx: Context) -> None:
        ctx.send(message, to="stock", type="stock.Reserve", **options)

    protocol = app.protocol(app.broker.publisher())
    with pytest.raises(OutputError):
        protocol.process(Message(body=b"{}", type="shop.Sell", message_id="m-1"))
    assert app.store.upkeep.pending_count() == 0


def test_one_output_that_a_publisher_cannot_send_does_not_hold_up_the_others() -> None:
    class Picky:
        def publish(self, outputs: Sequence[Output], timeout: float) -> list[Refusal | None]:
            if any(output.ordinal == 1 for output in outputs):
                raise OverflowError("cannot write it")
            return [None for _ in outputs]

        def keep_alive(self) -> None: ...

        def close(self) -> None: ...

    app = shop()
    with app.initiate() as unit:
        for number in range(3):
            unit.send({"n": number}, to="stock", type="stock.Reserve")
    answers = publish_all(Picky(), unit.outputs, 1.0)
    assert [answer is None for answer in answers] == [True, False, True]
    assert answers[1] is not None
    assert answers[1].kind == "unsendable"


def test_equal_values_of_two_headers_or_of_the_message_id_are_different_ids() -> None:
    message = Message(body=b"{}", message_id="7", headers={"seq": "7", "no": "7"})
    keys = [
        key.effective(message, {}, "shop.Sell").key for key in (Key.message_id(), Key.header("seq"), Key.header("no"))
    ]
    assert len(set(keys)) == 3


def test_a_former_header_key_is_not_mistaken_for_a_message_id() -> None:
    app = shop()
    ran: list[str] = []

    @app.handler(
        dict, type="shop.Sell", policy=Idempotent(fingerprint="off", previous=[Previous(key=Key.header("seq"))])
    )
    def sell(message: dict[str, Any], ctx: Context) -> None:
        ran.append(ctx.message_id or "")

    protocol = app.protocol(app.broker.publisher())
    for message_id, seq in (("100", "7"), ("7", "8")):
        message = Message(body=b"{}", type="shop.Sell", message_id=message_id, headers={"seq": seq})
        assert protocol.process(message) is Outcome.HANDLED
    assert ran == ["100", "7"]


def test_one_settings_file_serves_two_apps_but_a_near_miss_is_an_error() -> None:
    policies = {"shop.Sell": {"attempts": 2}, "stock.Reserve": {"attempts": 3}}
    for name in policies:
        app = App(
            name.partition(".")[0], store=InMemoryStore(), broker=InMemoryBroker(), settings=Settings(messages=policies)
        )
        app.handler(dict, type=name)(lambda message: None)
        app.registry.build(app.settings.messages)
        assert app.registry.find_by_name(name).policy.attempts == policies[name]["attempts"]
    app = App("shop", store=InMemoryStore(), broker=InMemoryBroker(), settings=Settings(messages={"shop.Sel": {}}))
    app.handler(dict, type="shop.Sell")(lambda message: None)
    with pytest.raises(ConfigurationError, match=r"Did you mean 'shop.Sell'"):
        app.registry.build(app.settings.messages)


def test_a_handler_that_exits_ends_the_worker_as_a_failure_of_its_own() -> None:
    app = shop()

    @app.handler(dict, type="shop.Sell", policy=Idempotent())
    def sell(message: dict[str, Any], ctx: Context) -> None:
        raise SystemExit(3)

    app.start()
    with app.initiate() as unit:
        unit.send({}, to="shop", type="shop.Sell")
    with pytest.raises(HandlerError, match="ended the process"):
        Worker([app]).run()
    assert app.broker.depth("shop") == 1
    assert app.broker.depth("shop.dead") == 0


@pytest.mark.parametrize(
    "error", [GeneratorExit(), BaseExceptionGroup("two", [SystemExit(1), ValueError()]), KeyboardInterrupt()]
)
def test_whatever_ends_the_worker_is_one_line(error: BaseException) -> None:
    """Not the forty lines of a traceback, in which the reason is hard to find."""
    app = shop()

    @app.handler(dict, type="shop.Sell", policy=Idempotent())
    def sell(message: dict[str, Any], ctx: Context) -> None:
        raise error

    app.start()
    with app.initiate() as unit:
        unit.send({}, to="shop", type="shop.Sell")
    with pytest.raises(HandlerError, match=f"ended the process: {type(error).__name__}.*Raise Refuse to park"):
        Worker([app]).run()
    assert app.broker.depth("shop") == 1
