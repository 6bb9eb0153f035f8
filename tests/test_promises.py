"""The promises, each as given, when, then; at every crash point of a process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from sqlalchemy.exc import IntegrityError

import tests.world
from idemp import Context, Idempotent, Retry
from idemp.messages import Output, Refusal
from idemp.sql.records.failures import DeadLetters
from idemp.testing import CrashPoints
from idemp.testing.crash_points import outage
from tests.test_kills import some
from tests.world import Handle, Order, World, effect, insert_and_send, unique

OTHERS = ("mariadb", "postgresql-psycopg", "sqlite-aiosqlite")
KINDS = ["sqlite", "postgresql", *(pytest.param(kind, marks=pytest.mark.slow) for kind in OTHERS)]
pytestmark = pytest.mark.parametrize("kind", KINDS, indirect=True)
Begin = Callable[..., World]


@pytest.fixture
def begin(new_url: Callable[[], str]) -> Iterator[Begin]:
    """Makes worlds, each with a database of its own."""
    worlds: list[World] = []

    def begin(handle: Handle = insert_and_send, **options: Any) -> World:
        worlds.append(World(new_url(), handle, **options))
        return worlds[-1]

    yield begin
    for world in worlds:
        world.close()


def every_crash_point(
    begin: Begin, kind: str, given: Callable[[World], None], first: int = 0, **options: Any
) -> Iterator[tuple[World, str]]:
    """Crash a process at each point that it reaches, once; yield the world as the crash leaves it. The last one has not crashed.

    On databases other than SQLite each test takes a third of them, from another one on, so that together they take each call; with
    asynchronous drivers half of these.
    """
    every = 6 if tests.world.asynchronous else 1 if kind == "sqlite" else 3
    for at in some(every, first):
        world = begin(**options)
        given(world)
        name = world.crash(at)
        yield world, name
        world.close()
        if not name:
            break
    assert at > 10


def one(world: World) -> None:
    world.send("1")


def copies(world: World) -> None:
    world.send("1", "1", "2")


PARTS_NOW = {("1", 0), ("1", 1)}


@pytest.mark.parametrize(
    ("given", "group"),
    [(copies, 20), pytest.param(copies, 1, marks=pytest.mark.slow)],
    ids=["copies", "in flight"],
)
def test_effect_once_and_outputs_at_least_once_under_one_id(
    begin: Begin, kind: str, given: Callable[[World], None], group: int
) -> None:
    """Of groups of one, each executes while the confirms of the one before are on their way."""
    for world, name in every_crash_point(begin, kind, given, int(group == 1), settings={"group": group}):
        world.recover()
        assert world.effects() == {"1": 1, "2": 1}, name
        sent = world.sent()
        assert set(sent) == {(id, part) for id in "12" for part in (0, 1)}, name
        assert all(len(variants) == 1 for variants in sent.values()), name
        assert (world.pending(), world.dead(), world.rows()) == (2, [], []), name  # the delayed ones
        world.recover(660)
        assert {part for _, part in world.sent()} == {0, 1, 2}, name
        assert world.pending() == 0, name


def test_nothing_is_sent_without_commit_and_nothing_is_lost(begin: Begin, kind: str) -> None:
    """As the crash leaves it, before any other process looks."""
    for world, name in every_crash_point(begin, kind, one, 2):
        in_queue, handled, sent = bool(world.rows()), world.effects(), set(world.sent())
        assert handled == {"1": 1} or not (handled or sent), name
        assert world.claims() == len(handled), name
        assert in_queue or (handled and (sent == PARTS_NOW or world.pending() == 3)), name


def test_an_output_of_a_failed_run_never_reaches_the_broker(begin: Begin) -> None:
    def fail_after_sending(message: Order, ctx: Context) -> None:
        insert_and_send(message, ctx)
        if world.runs[message.order_id] < 3:
            raise RuntimeError("boom")

    world = begin(fail_after_sending)
    world.send("1")
    world.work(world.worker())
    assert (world.effects(), world.runs["1"], set(world.sent())) == ({"1": 1}, 3, PARTS_NOW)


class Refusing:
    """A publisher whose broker confirms only what `confirms` takes."""

    def __init__(self, publisher: Any, refuse: Callable[[int], Refusal | Exception | None]) -> None:
        self.publisher, self.refuse = publisher, refuse

    def send(self, outputs: Sequence[Output]) -> None:
        """Leave it to `publish`."""

    def publish(self, outputs: Sequence[Output], timeout: float) -> Sequence[Refusal | None]:
        answers: list[Refusal | None] = []
        for number, output in enumerate(outputs):
            refused = self.refuse(number)
            if isinstance(refused, Exception):
                raise refused
            answers.append(refused or self.publisher.publish([output], timeout)[0])
        return answers


@pytest.mark.parametrize(
    ("refuse", "unconfirmed"),
    [
        (lambda number: Refusal("returned", own=True) if number == 1 else None, 1),
        (lambda number: Refusal("nacked"), 2),
        (lambda number: ConnectionResetError("gone") if number == 1 else None, 0),  # which were taken is unknown: one by one
        (lambda number: ConnectionResetError("gone"), 2),
    ],
)
def test_nothing_is_marked_sent_without_the_brokers_word(begin: Begin, refuse: Any, unconfirmed: int) -> None:
    world = begin()
    world.send("1")
    worker = world.worker()
    worker.protocol.dispatcher.publisher = Refusing(worker.protocol.dispatcher.publisher, refuse)
    world.work(worker, relay=False)
    assert (world.effects(), world.rows()) == ({"1": 1}, [])  # acked: a relay sends the rest
    assert world.pending() == unconfirmed + 1
    world.pass_time(60)
    world.work(world.worker())
    sent = world.sent()
    assert set(sent) == PARTS_NOW
    assert all(len(variants) == 1 for variants in sent.values())
    assert world.pending() == 1


def test_a_failing_message_is_settled_once_at_every_crash_point(begin: Begin, kind: str) -> None:
    def fail(message: Order, ctx: Context) -> None:
        insert_and_send(message, ctx)
        raise RuntimeError("boom")

    for world, name in every_crash_point(begin, kind, copies, handle=fail):
        world.recover()
        assert (world.effects(), world.sent(), world.claims()) == ({}, {}, 0), name
        assert len(world.dead()) == len(world.rows()) == 2, name  # two of the three messages carry one key
        assert {each["rule"] for each in world.dead()} == {"handler"}, name
        assert all(3 <= each["attempts"] <= 5 for each in world.dead()), name  # a copy, and one that comes again, add a run each


def test_the_dead_letter_of_committed_effects_survives_every_crash_after_it(begin: Begin, kind: str) -> None:
    def commit(message: Order, ctx: Context) -> None:
        insert_and_send(message, ctx)
        ctx.connection.connection.dbapi_connection.commit()  # type: ignore[union-attr]

    for world, name in every_crash_point(begin, kind, one, handle=commit):
        known = world.dead()
        world.recover()
        assert world.effects() == {"1": 1}, name
        assert [each["committed"] for each in known] == [each["committed"] for each in world.dead()] or not known, name


def test_only_the_inbox_key_makes_a_duplicate(begin: Begin) -> None:
    def insert_unique(message: Order, ctx: Context) -> None:
        ctx.connection.execute(effect.insert(), {"what": message.order_id})
        ctx.connection.execute(unique.insert(), {"what": "the same for all"})

    world = begin(insert_unique)
    world.send("1", "2")
    world.work(world.worker())
    assert world.effects() == {"1": 1}
    (dead,) = world.dead()
    assert (dead["rule"], dead["attempts"]) == ("handler", 3)
    assert "IntegrityError" in dead["error"]
    assert "2" not in dead["error"].partition("[parameters")[2]  # values stay out of texts


def test_another_payload_under_the_id_is_a_conflict(begin: Begin) -> None:
    world = begin()
    world.send("1", message_id="first")
    world.send("1", message_id="white space")
    world.send("1", message_id="other", price=7)
    world.work(world.worker())
    assert world.effects() == {"1": 1}
    (dead,) = world.dead()
    assert (dead["rule"], dead["attempts"]) == ("conflict", 0)


@pytest.mark.parametrize("committed", [True, False])
def test_a_lost_answer_to_commit_is_resolved_by_running_again(begin: Begin, committed: bool) -> None:
    calm = CrashPoints()
    world = begin()
    world.send("1")
    world.work(world.worker(calm))
    at = calm.names.index(f"store.finish {'after' if committed else 'before'}")
    world = begin()
    world.send("1")
    world.work(world.worker(CrashPoints(at, outage)), relay=False)
    assert (world.effects(), set(world.sent()), world.rows()) == ({"1": 1}, PARTS_NOW, [])
    assert world.runs["1"] == (1 if committed else 2)
    assert world.pending() == 1


def test_a_plain_type_runs_on_each_delivery_and_keeps_delayed_outputs(begin: Begin) -> None:
    world = begin()
    world.send("1", "1", type="shop.Plain")
    world.work(world.worker())
    assert (world.effects(), world.claims(), world.pending()) == ({"1": 2}, 0, 2)
    assert all(len(variants) == 2 for variants in world.sent().values())
    world.pass_time(600)
    worker = world.worker()
    world.work(worker)
    assert (world.pending(), len(world.sent()["1", 2])) == (0, 2)


def test_a_plain_type_whose_outputs_are_refused_runs_again(begin: Begin) -> None:
    world = begin()
    world.send("1", type="shop.Plain")
    worker = world.worker()
    worker.protocol.dispatcher.publisher = Refusing(worker.protocol.dispatcher.publisher, lambda number: Refusal("nacked"))
    world.work(worker)
    (row,) = world.rows()
    assert (row.attempts, world.runs["1"]) == (0, 1)
    world.pass_time(6)
    world.work(world.worker())
    assert (world.rows(), world.runs["1"]) == ([], 2)


@pytest.mark.parametrize("redispatch", ["pending", "always"])
def test_a_redelivery_sends_confirmed_outputs_only_on_demand(begin: Begin, redispatch: Any) -> None:
    world = begin(policy=Idempotent(key="order_id", redispatch=redispatch))
    world.send("1", "1")
    world.work(world.worker())
    assert len(world.rows("sink")) == (4 if redispatch == "always" else 2)
    assert all(len(variants) == 1 for variants in world.sent().values())


def test_a_database_error_of_the_handler_is_its_own(begin: Begin) -> None:
    def swallow(message: Order, ctx: Context) -> None:
        with pytest.raises(IntegrityError), ctx.session.begin_nested():
            ctx.session.execute(unique.insert(), [{"what": "1"}, {"what": "1"}])
        insert_and_send(message, ctx)

    world = begin(swallow, policy=Idempotent(key="order_id", retry=Retry(attempts=1)))
    world.send("1")
    world.work(world.worker())
    assert (world.effects(), world.dead()) == ({"1": 1}, [])


@pytest.mark.parametrize("late", ["park", "handle"])
def test_a_message_beyond_the_window_is_parked_or_handled(begin: Begin, late: Any) -> None:
    world = begin(policy=Idempotent(key="order_id", retention="1h", late=late))
    world.send("1")
    worker = world.worker()
    world.work(worker)
    world.pass_time(600)
    world.work(worker)  # the delayed output
    world.pass_time(3600)
    worker.adapters.scheduler.purge()
    assert world.claims() == 0
    old = {"type": "shop.Order", "timestamp": 1.6e9}
    world.send_raw(b'{"order_id": "1"}', {**old, "message_id": "1"})
    world.send("2")
    world.work(worker)
    if late == "handle":
        assert (world.effects(), world.dead()) == ({"1": 2, "2": 1}, [])
        return
    (dead,) = world.dead()
    assert (dead["rule"], dead["attempts"], world.effects()) == ("late", 0, {"1": 1, "2": 1})
    letters = DeadLetters(world.database)
    assert letters.replay(letters.find()) == 1
    world.work(worker)
    assert (world.effects(), world.dead()) == ({"1": 2, "2": 1}, [])
