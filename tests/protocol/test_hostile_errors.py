"""Handlers raise exceptions that fail, or exit, when they are looked at: each is counted and parked as any other."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from idemp import App, Context, Idempotent, Outcome, Policy
from idemp.broker.memory import InMemoryBroker
from idemp.broker.port import Ack, Park
from idemp.cli.logs import JsonLines, TextLines
from idemp.effects.runner import reason_of
from idemp.errors import HandlerError
from idemp.inbox.memory import InMemoryStore
from idemp.showing import class_of, described, stack_of
from idemp.telemetry import Telemetry, Watch, together
from idemp.testing.faulty import Crash
from idemp.testing.store_bench import Background
from idemp.worker import Worker
from tests.house import SELL, House, sale
from tests.protocol.test_classification import POLICIES, until_parked
from tests.servers.process import wait_until

T = TypeVar("T")


def leave(*_: object) -> Any:
    raise SystemExit(3)


@cache
def kinds() -> SimpleNamespace:
    """The classes; out of sight of whoever looks through this module."""

    class Text(str):
        """A text that can't be worked on."""

        __slots__ = ()
        encode = __str__ = __format__ = leave

    class Hostile(type):
        """The class of classes that don't say what they are called."""

        __name__ = __module__ = __mro__ = property(leave)  # type: ignore[assignment,misc]
        __eq__ = __instancecheck__ = leave  # type: ignore[assignment]
        __hash__ = type.__hash__

    class Unnamed(Exception, metaclass=Hostile):
        pass

    class Exits(Exception):
        __str__ = __repr__ = __format__ = leave  # type: ignore[assignment]

    class Closed(Exception):
        """Nothing of it can be read or written."""

        __getattribute__ = __setattr__ = __str__ = __reduce__ = __eq__ = add_note = leave  # type: ignore[assignment]
        __hash__ = Exception.__hash__

    class Disguised(Exception):
        __class__ = __traceback__ = __cause__ = __context__ = __notes__ = property(leave)  # type: ignore[assignment]

    class Says(Exception):
        def __str__(self) -> str:
            return Text("no stock")

    class Nameless:
        """What an `AttributeError` is about, and is asked for names that are nearly right."""

        __dir__ = leave  # type: ignore[assignment]

    return SimpleNamespace(**{each: made for each, made in locals().items() if each[0].isupper()})


def with_cause() -> Exception:
    error = ValueError("no stock")
    error.__cause__ = kinds().Closed()
    return error


def with_notes() -> Exception:
    error = ValueError("no stock")
    error.__notes__ = kinds().Exits()  # type: ignore[assignment]
    return error


HOSTILE: dict[str, Callable[[], Exception]] = {
    "exits when it is shown": lambda: kinds().Exits(),
    "has no name": lambda: kinds().Unnamed(),
    "is closed": lambda: kinds().Closed(),
    "is disguised": lambda: kinds().Disguised(),
    "says a text that can't be worked on": lambda: kinds().Says(),
    "has a hostile cause": with_cause,
    "has hostile notes": with_notes,
    "has hostile members": lambda: ExceptionGroup(
        "two", [kinds().Exits(), ExceptionGroup("one", [kinds().Closed(), kinds().Unnamed()])]
    ),
    "is about an object that has no names": lambda: AttributeError(
        "no attribute", name="stock", obj=kinds().Nameless()
    ),
}
hostile = pytest.mark.parametrize("make", HOSTILE.values(), ids=HOSTILE)


def unharmed(call: Callable[[], T]) -> T:
    """What a call answers. What it raises is not shown: pytest, too, would look at what is behind it."""
    with suppress(BaseException):
        return call()
    pytest.fail("an error that should be settled came out", pytrace=False)


def raising(house: House, make: Callable[[], Exception], policy: Policy) -> None:
    def sell(message: dict[str, Any], ctx: Context) -> None:
        if ctx.message.message_id == "bad":
            raise make()

    house.app.handler(dict, type=SELL, policy=policy)(sell)


@hostile
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("redelivered", [False, True])
def test_it_is_counted_and_parked(
    house: House, make: Callable[[], Exception], policy: Policy, redelivered: bool
) -> None:
    raising(house, make, policy.model_copy(update={"refuse_on": (KeyError,)}))
    became = unharmed(lambda: until_parked(house, sale("bad"), redelivered=redelivered))
    assert became[:-1] == ["counted"] * 2
    told = "HandlerError" if (name := class_of(make())) in {"Closed", "Disguised"} else name
    assert became[-1] == told
    assert house.handle(sale("good")) == (Outcome.HANDLED, Ack())


@hostile
def test_it_does_not_spoil_its_batch(house: House, make: Callable[[], Exception]) -> None:
    raising(house, make, Idempotent(attempts=1, batch=10))
    ended = unharmed(lambda: house.together(sale("good"), sale("bad"), sale("fine")))
    assert [outcome for outcome, _ in ended] == [Outcome.HANDLED, Outcome.PARKED, Outcome.HANDLED]


def raised(make: Callable[[], Exception]) -> Exception:
    error = make()
    try:
        raise error  # noqa: TRY301
    except Exception as caught:
        return caught


@hostile
@pytest.mark.parametrize("formatter", [JsonLines(), TextLines()], ids=["json", "text"])
def test_it_is_shown_somehow(make: Callable[[], Exception], formatter: logging.Formatter) -> None:
    """Its class at least; in a log as in the story of a dead letter, and as the reason of an effect."""
    error = raised(make)
    found = logging.LogRecord("idemp", logging.ERROR, __file__, 1, "failed", (), (type(error), error, None))
    name = described(error).partition(":")[0]
    assert name in stack_of(error)
    assert "in raised" in stack_of(error)
    assert name in formatter.format(found)
    assert name in reason_of(HandlerError.if_closed(error))


def test_a_process_that_dies_while_it_looks_is_counted_against_the_message(house: House) -> None:
    """The handler has raised by then; nothing is settled yet, so its start stays until it is."""

    class Kills(Exception):
        def __str__(self) -> str:
            house.script.crash_before = "note end"  # nothing of this process happens any more
            raise Crash

    raising(house, Kills, Idempotent(attempts=2))
    for _ in range(2):
        with house.crashing():
            house.handle(sale("bad"), redelivered=True)
    outcome, settlement = house.handle(sale("bad"), redelivered=True)
    assert outcome is Outcome.PARKED
    assert isinstance(settlement, Park)
    assert settlement.reason == "WorkerDied"


# Workers --------------------------------------------------------------------------------------------------------------


def shop(make: Callable[[], BaseException], **options: Any) -> tuple[App, list[str]]:
    """An app with one message that fails, and five others behind it; which of these were handled."""
    broker = InMemoryBroker()
    app, handled = App("shop", store=InMemoryStore(), broker=broker, **options), list[str]()

    @app.handler(dict, type=SELL, policy=Idempotent(attempts=2, retry_delays=["1ms"]))
    def sell(message: dict[str, Any], ctx: Context) -> None:
        if message["sku"] == "bad":
            raise make()
        handled.append(message["sku"])

    app.start()
    with app.initiate() as unit:
        for sku in ("bad", *"abcde"):
            unit.send({"sku": sku}, to="shop", type=SELL)
    return app, handled


def work_until_parked(app: App, handled: list[str]) -> None:
    worker = Worker([app], threads=1)
    running, broker = Background(worker.run), app.broker
    assert isinstance(broker, InMemoryBroker)
    wait_until(
        lambda: not running.running or (len(handled) == 5 and broker.depth("shop.dead") == 1),
        "five are handled, and one is parked",
    )
    worker.stop()
    unharmed(lambda: running.result(30))
    assert sorted(handled) == [*"abcde"]


def test_neighbours_are_handled_by_the_same_worker() -> None:
    work_until_parked(*shop(kinds().Exits))


class Looks(Telemetry):
    """Fails, or exits, whenever it is told something."""

    def watch(self, consumer: Any) -> Watch:
        del consumer
        watch = Watch()
        watch.failed = watch.left = watch.handler_ended = leave  # type: ignore[method-assign]
        return watch


def test_telemetry_that_exits_changes_nothing() -> None:
    work_until_parked(*shop(kinds().Exits, telemetry=together(Looks())))


@pytest.fixture
def broken_log() -> Iterator[list[str]]:
    """A handler of the log that fails, as one does that sends each line elsewhere; which threads it failed in."""
    failed: list[str] = []

    class Fails(logging.Handler):
        def handle(self, record: logging.LogRecord) -> bool:
            failed.append(threading.current_thread().name)
            raise SystemExit(f"no answer for {record.name}")

    handler, log = Fails(), logging.getLogger("idemp")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    yield failed
    log.removeHandler(handler)
    log.setLevel(level)


def test_a_log_that_fails_changes_nothing(broken_log: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    work_until_parked(*shop(lambda: ValueError("no stock")))
    assert any(name.startswith("idemp-shop") for name in broken_log)
    assert "a logging handler failed: SystemExit: no answer for idemp" in capsys.readouterr().err


def test_a_log_line_says_where_it_was_written(caplog: pytest.LogCaptureFixture) -> None:
    work_until_parked(*shop(lambda: ValueError("no stock")))
    assert {Path(record.pathname).name for record in caplog.records if record.name == "idemp.delivery"} == {
        "deliverylog.py"
    }
