"""The redelivery machine finds handlers that are not idempotent, tells how, and leaves correct ones alone."""

from __future__ import annotations

import ast
import re
import sqlite3
import time
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test
from pydantic import BaseModel
from sqlalchemy import Column, Integer, MetaData, String, Table, insert, select, update
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from idemp import App, Context, Idempotent, Inbox, Key
from idemp.errors import ConfigurationError, Refuse
from idemp.inbox.memory import InMemoryStore
from idemp.testing.crash_points import CRASH_POINTS
from idemp.testing.findings import NotIdempotent
from idemp.testing.machine import redelivery_machine, replay
from idemp.testing.promises import PromiseBroken
from tests.lanes import mostly_slow

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

METADATA = MetaData()
SALE = Table("sale", METADATA, Column("id", Integer, primary_key=True), Column("sku", String, nullable=False))
STOCK = Table("stock", METADATA, Column("sku", String, primary_key=True), Column("left", Integer, nullable=False))
PLACE = "orders.Place"
ORDERS = {PLACE: st.fixed_dictionaries({"id": st.integers(0, 5), "sku": st.sampled_from("ab")})}


def sales(session: Session) -> Sequence[Any]:
    return session.execute(select(SALE.c.sku)).all()


def sell(message: dict[str, Any], ctx: Context) -> None:
    ctx.connection.execute(insert(SALE).values(sku=message["sku"]))
    ctx.send({"sku": message["sku"]}, to="stock", type="stock.Reserve")


def shop(*handlers: Callable[..., Any], **policy: Any) -> App:
    app = App("shop")
    for number, handler in enumerate(handlers):
        name = PLACE if not number else f"{PLACE}{number}"
        app.handler(dict, type=name, policy=Idempotent(**policy))(handler)
    return app


def attack(app: Any, *, examples: int = 100, messages: Any = ORDERS, tables: Any = METADATA, **options: Any) -> Any:
    machine = redelivery_machine(app, messages=messages, tables=tables, **options)
    wanted = settings(machine.TestCase.settings, max_examples=examples, database=None, derandomize=True)
    try:
        run_state_machine_as_test(machine, settings=wanted)
    finally:
        machine.world.close()
    return machine


def story_of(error: BaseException) -> tuple[list[str], list[tuple[Any, ...]]]:
    """The sentences and the schedule that a failure shows, read from its text."""
    (note,) = [note for note in error.__notes__ if note.startswith("What happened")]
    schedule = ast.literal_eval(note.partition("schedule =")[2].strip())
    return re.findall(r"^ +\d+\. (.*)$", note, re.MULTILINE), schedule


# Faults that are found


def test_second_connection_found_and_replayed(tmp_path: Path) -> None:
    """It commits by itself: two lines for one message, once the worker dies before its own COMMIT."""
    elsewhere = sqlite3.connect(tmp_path / "elsewhere.db", isolation_level=None)
    elsewhere.executescript("PRAGMA synchronous = OFF; PRAGMA journal_mode = MEMORY; CREATE TABLE mail (id)")

    def mails(message: dict[str, Any], ctx: Context) -> None:
        elsewhere.execute("INSERT INTO mail VALUES (?)", [message["id"]])
        sell(message, ctx)

    def clean(_: Session) -> None:
        elsewhere.execute("DELETE FROM mail")

    def mailed(_: Session) -> list[int]:
        return elsewhere.execute("SELECT id FROM mail").fetchall()

    app, options = shop(mails, key="id"), {"state": mailed, "setup": clean}
    with pytest.raises(PromiseBroken) as found:
        attack(app, rehearse=False, **options)
    sentences, schedule = story_of(found.value)
    assert "The state is not what it is with each message handled once" in str(found.value)
    assert 2 <= len(sentences) <= 4
    assert sentences[0].startswith("A producer published orders.Place 'message-1': {")
    with pytest.raises(PromiseBroken) as again:
        replay(app, schedule, tables=METADATA, **options)
    assert str(again.value) == str(found.value)
    assert story_of(again.value) == (sentences, schedule)
    elsewhere.close()


def test_counter_in_memory_found() -> None:
    handled: list[int] = []

    def counts(message: dict[str, Any], ctx: Context) -> None:
        handled.append(message["id"])
        ctx.send({"number": len(handled)}, to="stock", type="stock.Reserve")

    with pytest.raises(PromiseBroken, match="is not the one that is sent with each message handled once") as found:
        attack(shop(counts, key="id"), rehearse=False)
    sentences, schedule = story_of(found.value)
    assert len(sentences) == 1
    with pytest.raises(PromiseBroken):
        replay(shop(counts, key="id"), schedule)


def test_key_in_message_that_is_not_the_key_of_the_effect() -> None:
    """Two messages about one order: the handler inserts where it should update, keyed by the transport's id."""
    app = shop(sell)

    def one_each(session: Session) -> bool:
        found = [row.sku for row in session.execute(select(SALE.c.sku))]
        return len(found) == len(set(found))

    with pytest.raises(PromiseBroken, match="one_each") as found:
        attack(app, invariants=[one_each], rehearse=False, messages={PLACE: st.just({"sku": "a"})})
    sentences, _ = story_of(found.value)
    assert sentences == [
        'A producer published orders.Place \'message-1\': {"sku":"a"}',
        'A producer published orders.Place \'message-2\': {"sku":"a"}',
    ]


def test_acting_on_the_attempt_found() -> None:
    def only_first(message: dict[str, Any], ctx: Context) -> None:
        if ctx.attempt == 1:
            sell(message, ctx)

    with pytest.raises(PromiseBroken, match=r"The outputs are not those|The state is not") as found:
        attack(shop(only_first, key="id"), rehearse=False, examples=300)
    _, schedule = story_of(found.value)
    assert len(schedule) <= 6
    assert "crash" in {action[0] for action in schedule}


def test_not_opted_in_found() -> None:
    """Without a policy the handler runs on every delivery: the kit says what that means for this one."""
    app = App("shop")
    app.handler(dict, type=PLACE)(sell)
    with pytest.raises(PromiseBroken, match="The state is not") as found:
        attack(app, rehearse=False)
    assert len(story_of(found.value)[0]) <= 4


def test_detectors_run_first() -> None:
    def mutates(message: dict[str, Any], ctx: Context) -> None:
        message["sku"] = message["sku"].upper()
        sell(message, ctx)

    with pytest.raises(NotIdempotent) as found:
        attack(shop(mutates, key="id"))
    assert [finding.kind for finding in found.value.findings] == ["mutation"]
    assert len(story_of(found.value)[0]) <= 2


@pytest.mark.parametrize("own", mostly_slow([{}, {"settings": settings(max_examples=50, database=None)}]))
def test_failure_prints_the_short_story_alone(own: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Also under settings that are all the user's: neither Hypothesis' steps, nor a decorator that no method takes."""
    app = App("shop")
    app.handler(dict, type=PLACE)(sell)
    machine = redelivery_machine(app, messages=ORDERS, tables=METADATA, rehearse=False)
    case: Any = type("TestShop", (machine.TestCase,), own)
    try:
        with pytest.raises(PromiseBroken) as found:
            case("runTest").runTest()
    finally:
        machine.world.close()
    note, report = found.value.__notes__
    assert note.startswith("What happened:")
    assert report.startswith("Tested: orders.Place under Policy(idempotent=False): not opted in.\n  ")
    assert machine.report().deliveries > 0
    assert machine.report().looked_for == ()
    # Two steps are enough; which examples were met is chance, and sometimes nothing shorter is found than a few.
    assert "\n  2. " in note
    assert "\n  6. " not in note
    assert "reproduce_failure" not in note + capsys.readouterr().out


def test_nothing_handled_prints_no_steps() -> None:
    def misspelt(message: dict[str, Any], ctx: Context) -> None:
        ctx.sesion.add(message)  # type: ignore[attr-defined]

    machine = redelivery_machine(shop(misspelt), messages=ORDERS, tables=METADATA, rehearse=False)
    with pytest.raises(AssertionError, match="was ever handled") as found:
        machine.TestCase("runTest").runTest()
    machine.world.close()
    assert getattr(found.value, "__notes__", []) == []


# What is right


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "placed"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    sku: Mapped[str]


class PlaceOrder(BaseModel):
    __message_type__ = "orders.PlaceOrder"
    order_id: int
    sku: str


class CancelOrder(BaseModel):
    __message_type__ = "orders.CancelOrder"
    order_id: int


class OrderPlaced(BaseModel):
    __message_type__ = "orders.OrderPlaced"
    order_id: int


def correct_app(**policy: Any) -> App:
    app = App("orders")

    @app.handler(PlaceOrder, policy=Idempotent(key="order_id", **policy))
    def place(command: PlaceOrder, ctx: Context) -> OrderPlaced:
        ctx.session.add(Order(id=command.order_id, sku=command.sku))
        ctx.send({"sku": command.sku}, to="stock", type="stock.Reserve")
        return OrderPlaced(order_id=command.order_id)

    @app.handler(CancelOrder, policy=Idempotent(key="order_id", attempts=2, **policy))
    def cancel(command: CancelOrder, ctx: Context) -> None:
        order = ctx.session.get(Order, command.order_id)
        if order is None:
            raise LookupError(command.order_id)
        if order.sku == "kept":
            raise Refuse("This one stays.")
        ctx.session.delete(order)

    return app


COMMANDS = {
    PlaceOrder: st.builds(PlaceOrder, order_id=st.integers(0, 4), sku=st.sampled_from(["a", "kept"])),
    CancelOrder: st.builds(CancelOrder, order_id=st.integers(0, 4)),
}


@pytest.mark.parametrize(("claim", "examples"), mostly_slow([("early", 30), ("early", 100), ("late", 100)]))
def test_correct_app_passes(claim: str, examples: int) -> None:
    """Orders, cancellations that fail or are refused, conflicting payloads: nothing is found. Says how fast that is."""
    began = time.process_time()
    attack(
        correct_app(claim=claim, retention="2h"),
        examples=examples,
        messages=COMMANDS,
        tables=Base.metadata,
        state=lambda session: session.scalars(select(Order).order_by(Order.id)).all(),
    )
    print(f"{examples / (time.process_time() - began):.0f} examples per second of processor time")


@pytest.mark.slow
def test_correct_handlers_of_other_kinds_pass() -> None:
    """Headers and transport ids as keys, a relative update, an upsert that is not opted in, rows that are there before."""
    app = App("shop")

    @app.handler(dict, type="stock.Take", policy=Idempotent(key=Key.message_id()))
    def take(message: dict[str, Any], ctx: Context) -> None:
        ctx.connection.execute(update(STOCK).where(STOCK.c.sku == message["sku"]).values(left=STOCK.c.left - 1))
        ctx.publish({"sku": message["sku"]}, type="stock.Taken")

    @app.handler(dict, type="stock.Touch")
    def touch(message: dict[str, Any], ctx: Context) -> None:
        ctx.connection.execute(update(STOCK).where(STOCK.c.sku == message["sku"]).values(sku=message["sku"]))
        ctx.publish({"sku": message["sku"]}, type="stock.Touched")

    messages = st.fixed_dictionaries({"sku": st.sampled_from("ab")})
    attack(
        app,
        examples=60,
        messages={"stock.Take": messages, "stock.Touch": messages},
        setup=lambda session: session.execute(insert(STOCK), [{"sku": sku, "left": 9} for sku in "ab"]),
        state=lambda session: session.execute(select(STOCK)).all(),
    )


@pytest.mark.slow
def test_wrapped_function() -> None:
    inbox = Inbox(InMemoryStore())
    wrapped = inbox.wrap(sell, message=dict, type=PLACE, consumer="billing", policy=Idempotent(key="id"))
    attack(wrapped, examples=20, state=sales)


def test_on_postgresql(postgresql_url: str) -> None:
    """Claims are really held by another transaction, and a second worker comes in right after the first one's claim."""
    machine = attack(shop(sell, key="id"), examples=8, state=sales, database=postgresql_url, rehearse=False)
    assert "after claim" in machine.competing_points
    schedule = [("publish", PLACE, '{"id":1,"sku":"a"}'), ("compete", "after claim"), ("hold claim",), ("deliver",)]
    story = replay(shop(sell, key="id"), schedule, tables=METADATA, state=sales, database=postgresql_url)
    assert "a second worker got it, too: orders.Place 'message-1' was in another worker's hands" in story[1]
    schedule = [("publish", PLACE, '{"id":1,"sku":"a"}'), ("hold claim",)]
    story = replay(shop(sell, key="id"), schedule, tables=METADATA, state=sales, database=postgresql_url)
    assert story[1].startswith("While another transaction held the claim: orders.Place 'message-1' was in another")


# Schedules


@pytest.mark.parametrize("point", [point.name for point in CRASH_POINTS])
@pytest.mark.parametrize("claim", mostly_slow(["early", "late"]))
def test_every_crash_point_can_be_replayed(point: str, claim: str) -> None:
    schedule = [("publish", PLACE, '{"id":1,"sku":"a"}'), ("deliver",)] if point.endswith("record") else []
    schedule = [*(schedule or [("publish", PLACE, '{"id":1,"sku":"a"}')]), ("crash", point)]
    story = replay(shop(sell, key="id", claim=claim), schedule, tables=METADATA, state=sales)
    never = {"early": ["before claim and store", "after claim and store"]}.get(
        claim, ["before claim", "after claim", "before store", "after store"]
    )
    assert (f"The worker died {point} of" in story[-1]) == (point not in never)


def test_every_other_step_can_be_replayed() -> None:
    schedule = [
        ("publish", PLACE, '{"id":1,"sku":"a"}', {"message_id": "m-1", "headers": {"tenant": 1}}),
        ("publish", "orders.Nothing", b"\xff", {"content_type": "text/plain"}),
        ("duplicate", 0),
        ("reorder",),
        ("database away", 6),
        ("database busy", 6),
        ("fail commit", "lost, committed"),
        ("refuse output", "nacked", 0),
        ("lose ack",),
        ("crash relay", 0),
        ("relay",),
        ("compete", "before publish"),
        ("hold claim",),
        ("restart",),
        ("advance", 86_400.0),
        ("purge",),
        ("replay",),
        ("deliver",),
    ]
    app = shop(sell, key="id")
    app.handler(dict, type="orders.Nothing", policy=Idempotent())(sell)
    story = replay(app, schedule, tables=METADATA, state=sales)
    assert len(story) == len(schedule)
    assert story[2] == "The producer published orders.Place 'm-1' again, under the transport id 'm-1-again'."
    assert all(sentence.endswith((".", "}", "\\xff")) for sentence in story)


def test_what_comes_after_its_claim_was_purged_is_late() -> None:
    """Windows pass while the machine's time goes by, and what was purged is not handled twice."""
    schedule = [
        ("publish", PLACE, '{"id":1,"sku":"a"}'),
        ("deliver",),
        ("restart",),
        ("advance", 86_400),
        ("purge",),
        ("duplicate", 0),
        ("deliver",),
    ]
    story = replay(shop(sell, key="id", retention="2h"), schedule, tables=METADATA, state=sales)
    assert story[4] == "The cleaner ran: it deleted 1 claim."
    assert "was parked in the dead-letter queue: LateMessage" in story[6]


def test_a_key_that_is_published_anew_after_its_window_is_no_finding() -> None:
    schedule = [
        ("publish", PLACE, '{"id":1,"sku":"a"}'),
        ("deliver",),
        ("restart",),
        ("advance", 86_400),
        ("purge",),
        ("publish", PLACE, '{"id":1,"sku":"a"}'),
        ("deliver",),
    ]
    story = replay(shop(sell, key="id", retention="2h"), schedule, tables=METADATA, state=sales)
    assert "was parked in the dead-letter queue: LateMessage" in story[6]


def test_wrong_use_is_refused() -> None:
    app = shop(sell, key="id")
    with pytest.raises(ConfigurationError, match="There is no step 'explode'"):
        replay(app, [("explode",)])
    with pytest.raises(ConfigurationError, match="There is no crash point 'after lunch'"):
        replay(app, [("publish", PLACE, '{"id":1,"sku":"a"}'), ("crash", "after lunch")])
    with pytest.raises(ConfigurationError, match="needs Hypothesis strategies"):
        redelivery_machine(app, messages={PLACE: {"id": 1}})  # type: ignore[dict-item]


TestOrders = redelivery_machine(
    shop(sell, key="id"), messages=ORDERS, tables=METADATA, state=sales, rehearse=False
).TestCase
TestOrders.settings = settings(TestOrders.settings, max_examples=10)
