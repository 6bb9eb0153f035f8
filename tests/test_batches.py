"""Batches: one transaction for many, and the same verdicts as alone."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.exc import OperationalError

from idemp import App, ConfigurationError, Context, Idempotent, Retry, Settings
from idemp.handling import batches
from idemp.messages import Delivery
from idemp.sql.broker import SqlBroker
from idemp.sql.records.failures import DeadLetters
from tests.test_kills import some
from tests.world import QUEUE, SINK, Order, Shipped, World, effect, insert_and_send, unique

IDS = [f"{number:02}" for number in range(20)]


@pytest.fixture
def world(url: str) -> World:
    return World(url, policy=Idempotent(key="order_id", batch=10, retry=Retry(attempts=2, delays=(0.0,))))


@pytest.fixture
def commits(world: World) -> Iterator[list[int]]:
    """The number of COMMITs of units of work, as the only item."""
    count = [0]

    def committed(connection: Any) -> None:
        count[0] += "idemp_unit" in connection.get_execution_options()

    app = world.app()
    world.app = lambda: app  # type: ignore[method-assign]
    units = app.adapters().store.database.units  # type: ignore[attr-defined]
    event.listen(units, "commit", committed)
    yield count
    event.remove(units, "commit", committed)


def handled(*ids: str) -> dict[str, int]:
    return dict.fromkeys(ids, 1)


def start(world: World) -> Any:
    """Start a worker that knows its handler to be fast: a type that never ran runs alone first."""
    worker = world.worker()
    for handler in worker.app.handlers.values():
        handler.seconds = 0.0
    return worker


def test_each_batch_claims_in_the_order_of_keys(world: World) -> None:
    worker = start(world)
    properties = {"type": "shop.Order"}
    group = [
        worker.protocol.executor.accept(Delivery("shop", properties, b'{"order_id": "%d"}' % number)) for number in range(25)
    ]
    keys = [[handling.claim.key for handling in batch if handling.claim] for batch in batches(group)]
    assert [len(batch) for batch in keys] == [10, 10, 5]
    assert keys == [sorted(batch) for batch in keys]


def test_many_share_a_transaction(world: World, commits: list[int]) -> None:
    world.send(*IDS)
    world.work(start(world))
    assert (world.effects(), commits, len(world.sent())) == (handled(*IDS), [2], 40)
    world.send(*IDS)
    world.work(start(world))
    assert (world.effects(), commits, world.rows()) == (handled(*IDS), [2], [])


def test_copies_and_duplicates_in_a_batch_run_once(world: World, commits: list[int]) -> None:
    world.send("1")
    world.work(start(world))
    world.send("2", "1", "2", "3")
    world.work(start(world))
    assert (world.effects(), commits, world.rows()) == (handled("1", "2", "3"), [2], [])


@pytest.mark.parametrize("bad", [["00"], ["05"], ["09"], ["03", "04", "08"], IDS[:10]])
def test_a_failing_one_runs_alone_and_the_others_without_it(world: World, commits: list[int], bad: list[str]) -> None:
    def fail(message: Order, ctx: Context) -> None:
        insert_and_send(message, ctx)
        if message.order_id in bad:
            raise RuntimeError("boom")

    world.handle = fail
    world.send(*IDS[:10])
    world.work(start(world))
    good = set(IDS[:10]) - set(bad)
    assert world.effects() == handled(*good)
    assert {id for id, _ in world.sent()} == good
    assert [each["attempts"] for each in world.dead()] == [2] * len(bad)
    assert all(world.runs[id] <= 2 for id in good)
    assert commits[0] <= len(bad) + 1


def test_messages_are_fresh_in_each_run(world: World) -> None:
    def change(message: Order, ctx: Context) -> None:
        insert_and_send(message, ctx)
        message.order_id += "!"
        if message.order_id == "3!" and world.runs["3"] == 1:
            raise RuntimeError("boom")

    world.handle = change
    world.send("1", "2", "3")
    world.work(start(world))
    assert world.effects() == handled("1", "2", "3")


def test_a_failure_at_the_end_is_found_by_halves(world: World) -> None:
    def violate(message: Order, ctx: Context) -> None:
        ctx.connection.execute(effect.insert(), {"what": message.order_id})
        if message.order_id in ("03", "07"):
            ctx.connection.execute(text("INSERT INTO child VALUES (99)"))  # checked by COMMIT

    with world.database.short() as connection:
        connection.execute(text("CREATE TABLE child (parent INTEGER REFERENCES one (row) DEFERRABLE INITIALLY DEFERRED)"))
    world.handle = violate
    worker = start(world)

    def enforce(connection: sqlite3.Connection, _record: Any) -> None:
        connection.execute("PRAGMA foreign_keys = ON")

    event.listen(worker.adapters.store.database.engine, "connect", enforce)
    worker.adapters.store.database.engine.dispose()
    world.send(*IDS[:10])
    world.work(worker)
    assert world.effects() == handled(*set(IDS[:10]) - {"03", "07"})
    assert [(each["rule"], each["attempts"]) for each in world.dead()] == [("handler", 2)] * 2


def test_doubtful_verdicts_are_decided_alone(world: World) -> None:
    world.send("1", message_id="m")
    world.work(start(world))
    world.send("2", "3", message_id="m")
    world.send("1", price=7)
    world.work(start(world))
    assert world.effects() == handled("1", "2", "3")
    assert [each["rule"] for each in world.dead()] == ["conflict"]


@pytest.mark.parametrize("again", [False, True])
def test_a_handler_that_commits_takes_its_batch_along(world: World, again: bool) -> None:
    def commit(message: Order, ctx: Context) -> None:
        insert_and_send(message, ctx)
        if message.order_id == "02":
            driver: Any = ctx.connection.connection.driver_connection
            driver.commit()
            if again:
                driver.execute("BEGIN")

    world.send("09")
    world.work(start(world))
    world.handle = commit
    world.send("00", "01", "02", "03", "09")
    world.work(start(world))
    dead = world.dead()
    assert [(each["rule"], each["committed"]) for each in dead] == [("transaction ended", True)] * 4  # 09 is a duplicate
    world.handle = insert_and_send
    letters = DeadLetters(world.database)
    assert letters.replay(letters.find()) == 4
    world.work(start(world))
    effects = world.effects()  # those that ran before the commit are there twice: that is what the operator was asked
    assert (set(effects), effects["02"], effects["09"], world.dead()) == ({"00", "01", "02", "03", "09"}, 2, 1, [])


@pytest.mark.parametrize("how", ["commit", "rollback", "refused"])
def test_a_handler_that_rolls_back_or_is_refused_fails_alone(world: World, how: str) -> None:
    def end(message: Order, ctx: Context) -> None:
        insert_and_send(message, ctx)
        if message.order_id == "02":
            if how == "rollback":
                ctx.connection.connection.driver_connection.rollback()  # type: ignore[union-attr]
            elif how == "commit":
                ctx.session.commit()
            else:
                with pytest.raises(Exception, match="ended the transaction"):
                    ctx.session.close()

    world.handle = end
    world.send("00", "01", "02", "03")
    world.work(start(world))
    assert world.effects() == handled("00", "01", "03")
    assert len(world.dead()) == 1


def test_a_shared_session_fails_for_its_culprit(world: World) -> None:
    def insert(message: Order, ctx: Context) -> None:
        ctx.session.execute(effect.insert(), {"what": message.order_id})
        ctx.session.execute(unique.insert(), {"what": message.order_id[0]})

    world.handle = insert
    world.send("a1", "a2", "b1", "b2")
    world.work(start(world))
    assert (sorted(each[0] for each in world.effects()), len(world.dead())) == (["a", "b"], 2)


def test_an_outage_holds_the_rest(world: World) -> None:
    away = [True]

    def handle(message: Order, ctx: Context) -> None:
        if away[0] and message.order_id == "04":
            raise OperationalError("INSERT", None, sqlite3.OperationalError("gone"))
        insert_and_send(message, ctx)

    world.handle = handle
    world.send(*IDS[:10])
    worker = start(world)
    probe, classify = worker.adapters.store.probe, worker.adapters.store.classify
    worker.adapters.store.probe = lambda: not away[0]
    from idemp.ports import Kind

    worker.adapters.store.classify = lambda error: Kind.LOST if away[0] else classify(error)
    worker.step(poll=0.0)
    before = len(world.effects())  # what ran before the outage is settled
    assert len(worker.intake.held) == len(world.rows()) == 10 - before > 0
    away[0], worker.adapters.store.probe = False, probe
    world.work(worker)
    assert (world.effects(), world.dead(), world.rows()) == (handled(*IDS[:10]), [], [])


@pytest.mark.parametrize("committed", [True, False])
def test_a_lost_answer_to_commit_is_resolved_in_parts(world: World, committed: bool) -> None:
    world.send(*IDS[:4])
    finish = start(world)
    store = finish.adapters.store

    def lose(tx: Any, handled: Any, *, lazy: bool, done: list[int] = []) -> None:  # noqa: B006
        if committed or done:
            type(store).finish(store, tx, handled, lazy=lazy)
        if not done:
            done.append(1)
            raise OperationalError("COMMIT", None, ConnectionResetError("gone"))

    store.finish = lose
    world.work(finish, relay=False)
    assert (world.effects(), len(world.sent()), world.rows(), world.pending()) == (handled(*IDS[:4]), 8, [], 4)


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)], indirect=True)
@pytest.mark.parametrize("lists", [False, True])
def test_effects_happen_once_at_every_crash_point(world: World, new_url: Any, kind: str, lists: bool) -> None:
    for at in some(2 if kind == "sqlite" else 3):
        new = World(new_url(), policy=world.policy)
        if lists:
            take_lists(new, insert_and_send_all)
        new.send("0", "1", "2", "2", "3")
        name = new.crash(at)
        new.recover()
        assert new.effects() == handled("0", "1", "2", "3"), name
        sent = new.sent()
        assert set(sent) == {(id, part) for id in "0123" for part in (0, 1)}, name
        assert all(len(variants) == 1 for variants in sent.values()), name
        assert (new.dead(), new.rows(), new.pending()) == ([], [], 4), name
        new.close()
        if not name:
            break
    assert at > 10


def take_lists(world: World, handle: Any, policy: Any = None) -> list[int]:
    """Let a handler of lists handle the orders of a world; return the lengths of its lists."""
    lengths: list[int] = []

    def app() -> App:
        app = App(QUEUE, settings=Settings(database_url=world.url))

        def orders(messages: list[Order], contexts: list[Context]) -> Any:
            lengths.append(len(messages))
            return handle(messages, contexts)

        app.handler(Order, policy=policy or world.policy)(orders)
        app.handlers[Order.__message_type__].seconds = 0.0
        world.apps.append(app)
        return app

    world.app = app  # type: ignore[method-assign]
    return lengths


def insert_and_send_all(messages: list[Order], contexts: list[Context]) -> None:
    contexts[0].connection.execute(effect.insert(), [{"what": message.order_id} for message in messages])
    for message, ctx in zip(messages, contexts, strict=True):
        for part in range(3):
            ctx.send(Shipped(order_id=message.order_id, part=part), to=SINK, delay="10m" if part == 2 else None)


def test_a_handler_of_lists_gets_what_is_fresh(world: World, new_url: Any) -> None:
    lengths = take_lists(world, insert_and_send_all)
    world.send(*IDS)
    world.work(world.worker())
    world.send(*IDS[:5], "new")
    world.work(world.worker())
    assert lengths == [10, 10, 1]
    assert world.effects() == handled(*IDS, "new")
    alone = World(new_url())
    alone.send(*IDS, "new")
    alone.work(alone.worker())
    assert world.sent() == alone.sent()  # under the same ids
    alone.close()


def test_the_culprit_of_a_list_is_found(world: World) -> None:
    def handle(messages: list[Order], contexts: list[Context]) -> None:
        insert_and_send_all(messages, contexts)
        if any(message.order_id == "07" for message in messages):
            raise RuntimeError("boom")

    lengths = take_lists(world, handle)
    world.send(*IDS[:10])
    world.work(world.worker())
    (dead,) = world.dead()
    assert (dead["rule"], dead["attempts"]) == ("handler", 2)
    assert world.effects() == handled(*(id for id in IDS[:10] if id != "07"))
    assert lengths[0] == 10
    assert lengths.count(1) >= 2  # the culprit, alone, twice


def test_results_of_a_list_belong_to_their_messages(world: World) -> None:
    def handle(messages: list[Order], contexts: list[Context]) -> list[Shipped | None]:
        return [None if each.order_id == "03" else Shipped(order_id=each.order_id, part=0) for each in messages]

    take_lists(world, handle)
    SqlBroker(world.database, "producer").declare(SINK, ["shop.Shipped"])
    world.send(*IDS[:5])
    world.work(world.worker())
    assert set(world.sent()) == {(id, 0) for id in IDS[:5] if id != "03"}


def test_a_list_of_results_has_the_length_of_the_list(world: World) -> None:
    take_lists(world, lambda messages, _: [Shipped(order_id="x", part=0)] * 2)
    world.send("1")
    world.work(world.worker())
    (dead,) = world.dead()
    assert "returns one result a message, or None: 2 for 1" in dead["error"]


def test_a_large_batch_of_which_all_fail_ends(url: str) -> None:
    def fail(message: Order, ctx: Context) -> None:
        raise RuntimeError("boom")

    world = World(url, fail, Idempotent(key="order_id", batch=400, retry=Retry(attempts=1)))
    for number in range(400):
        world.send(f"{number:04}")
    world.work(start(world))
    assert (world.effects(), len(world.dead())) == ({}, 400)


@pytest.mark.parametrize("batch", [0, True, 1.5, 1001])
def test_a_batch_is_a_number(batch: Any) -> None:
    with pytest.raises(ConfigurationError, match="has to be a whole number from 1 to 1000"):
        Idempotent(batch=batch)
