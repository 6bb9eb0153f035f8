"""Streams of events: one commit a message, numbers without gaps, each decided on what comes before it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from sqlalchemy import func, select, update

import tests.streams
from idemp import App, AsyncContext, ConfigurationError, Context, Idempotent, Settings
from idemp.errors import HandlerError
from idemp.messages import Output, encode
from idemp.sql.broker import SqlBroker
from idemp.sql.engine import Database
from idemp.sql.scheduler import SqlScheduler
from idemp.sql.store import SqlStore
from idemp.streams import FOREVER, Event, Streams, streams
from idemp.streams.streams import StreamStore
from idemp.testing import CrashPoints, StoreConformance
from idemp.testing.app import busy, let_pass, step
from idemp.worker import Worker
from tests.streams import AUDIT, QUEUE, VERSION, Move, Moved, balance, bank
from tests.test_kills import run_until, some, watch

every_kind = pytest.mark.parametrize(
    "kind", ["sqlite", "postgresql", pytest.param("mariadb", marks=pytest.mark.slow)], indirect=True
)


class Bank:
    """Everything of one process."""

    def __init__(self, url: str) -> None:
        self.settings = Settings(database_url=url)
        self.database = Database(url)
        self.app, self.streams = bank(self.settings)
        broker = SqlBroker(self.database, "producer")
        broker.declare(QUEUE, [])
        broker.declare(AUDIT, ["bank.Moved"])
        self.publisher = broker.publisher()
        self._worker: Worker | None = None

    def send(self, *moves: tuple[int, int], account: str = "a") -> None:
        outputs = [
            Output(
                "",
                "send",
                "",
                QUEUE,
                {"message_id": f"m{id}", "type": "bank.Move"},
                encode(Move(id=id, account=account, cents=cents)),
            )
            for id, cents in moves
        ]
        assert self.publisher.publish(outputs, 10.0) == [None] * len(outputs)

    def work(self) -> None:
        self._worker = self._worker or Worker(self.app)
        for _ in range(3):
            while step(self._worker) or busy(self._worker):
                pass
            let_pass(self.database, 60)

    def events(self, account: str = "a") -> list[tuple[int, int]]:
        return [(event.number, event.data["cents"]) for event in self.streams.events(account)]

    def heard(self) -> dict[int, set[str]]:
        """Return the ids under which each event was published."""
        message, found = self.database.tables.message, dict[int, set[str]]()
        with self.database.queue_engine.connect() as connection:
            for row in connection.execute(select(message).where(message.c.queue == AUDIT)):
                found.setdefault(json.loads(row.body)["id"], set()).add(json.loads(row.headers)["message_id"])
        return found

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
        self.app.close()
        self.database.close()


@pytest.fixture
def begin(url: str) -> Iterator[Callable[[], Bank]]:
    made: list[Bank] = []

    def begin() -> Bank:
        made.append(Bank(url))
        return made[-1]

    yield begin
    for each in made:
        each.close()


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)], indirect=True)
class TestStore(StoreConformance):
    @pytest.fixture
    def open_store(self, database: Database) -> Callable[[str], StreamStore]:
        def open_store(worker: str) -> StreamStore:
            store = SqlStore(database, worker)
            for consumer in ("billing", "shop"):
                store.register(consumer, ["shop.Pay", "shop.Order"], [])
            return StreamStore(store, Streams(App("shop")))

        return open_store

    @pytest.fixture
    def open_scheduler(self, database: Database) -> Callable[[str], SqlScheduler]:
        return lambda worker: SqlScheduler(database, worker, 30.0)


@every_kind
def test_what_is_published_is_the_stream(begin: Callable[[], Bank]) -> None:
    bank = begin()
    bank.send((1, 100), (1, 100), (2, -70), (3, -70), (4, 5))
    bank.send((9, 1), account="b")
    bank.work()
    assert bank.events() == [(1, 100), (2, -70), (3, 5)]  # a copy adds nothing, and a refusal is no event
    assert bank.streams.read("a", balance, 0).state == 35
    assert (bank.events("b"), bank.streams.read("c", balance, 0).number) == ([(1, 1)], 0)
    heard = bank.heard()
    assert {event.data["id"]: {event.id} for name in "ab" for event in bank.streams.events(name)} == heard
    assert [event.number for event in bank.streams.events("a", after=2)] == [3]


@pytest.mark.parametrize("kind", ["postgresql", pytest.param("mariadb", marks=pytest.mark.slow)], indirect=True)
def test_a_lost_race_runs_again_on_the_stream_as_it_is(begin: Callable[[], Bank], monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have seen 100, and take 70."""
    one, other = begin(), begin()
    one.send((1, 100))
    one.work()
    append, seen = Streams.append, list[Any]()

    def late(self: Streams, unit: Any, store: Any, handled: Any) -> None:
        seen.append(handled)
        if len(seen) == 1:
            handler = other.app.handlers["bank.Move"]
            with other.app.adapters().store.connect() as tx:
                _, claim = handler.accept(delivery(3, -70))
                assert claim is not None
                other.app.adapters().store.claim(tx, [claim])
                context = handler.context("storm", {}, tx, claim, 1)
                outputs = handler.call([Move(id=3, account="a", cents=-70)], [context])[0]
                other.app.adapters().store.finish(tx, [streams.Handled("storm", claim, outputs)])
        append(self, unit, store, handled)

    monkeypatch.setattr(Streams, "append", late)
    one.send((2, -70))
    one.work()
    assert one.events() == [(1, 100), (2, -70)]
    assert [event.data["id"] for event in one.streams.events("a")] == [1, 3]
    with one.database.engine.connect() as connection:  # refused, on the stream as it was then
        assert connection.scalar(select(func.count()).select_from(one.database.tables.inbox)) == 3


def delivery(id: int, cents: int) -> Any:
    from idemp.messages import Delivery

    return Delivery(QUEUE, {"type": "bank.Move"}, encode(Move(id=id, account="a", cents=cents)))


@every_kind
def test_snapshots_keep_the_time_flat(begin: Callable[[], Bank], monkeypatch: pytest.MonkeyPatch) -> None:
    bank, counts = begin(), list[int]()
    events = streams._events

    def counted(*arguments: Any) -> Iterator[Event]:
        counts.append(0)
        for event in events(*arguments):
            counts[-1] += 1
            yield event

    monkeypatch.setattr(streams, "EVERY", 10)
    monkeypatch.setattr(streams, "_events", counted)
    bank.send(*((id, 1) for id in range(60)))
    bank.work()
    assert (len(counts), max(counts)) == (60, 10)
    assert bank.streams.read("a", balance, 0, version=VERSION).state == 60
    counts.clear()
    assert (bank.streams.read("a", balance, 0).state, counts) == (60, [60])  # without a version, no snapshots


@every_kind
def test_snapshots_of_another_version_are_not_used_and_go(begin: Callable[[], Bank], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each movement has a fee by now, so that nothing is left to take."""
    monkeypatch.setattr(streams, "EVERY", 10)
    one = begin()
    one.send(*((id, 10) for id in range(1, 31)))
    one.work()
    bank, snapshot = begin(), one.database.tables.snapshot
    with one.database.engine.connect() as connection:
        (before,) = connection.execute(select(snapshot)).all()
    monkeypatch.setattr(balance, "__defaults__", (10,))
    monkeypatch.setattr(tests.streams, "VERSION", "2")
    assert bank.streams.read("a", balance, 0).state == bank.streams.read("a", balance, 0, version="2").state == 0
    bank.send((31, -70))
    bank.work()
    assert (len(bank.events()), bank.streams.read("a", balance, 0, version="2").state) == (30, 0)
    with one.database.engine.connect() as connection:
        (after,) = connection.execute(select(snapshot)).all()  # in place of the former one
    assert (before.fold, before.state == after.state) == (after.fold, False)
    assert bank.streams.read("a", balance, 5, version="2").state == 5  # another initial state is another version, too


def test_a_fold_with_snapshots_has_a_name(begin: Callable[[], Bank]) -> None:
    bank = begin()

    class Rates:
        def fold(self, cents: int, event: Event) -> int:
            return cents

    for fold in (Rates().fold, partial(balance), lambda cents, event: cents):
        assert bank.streams.read("a", fold, 0).state == 0
        with pytest.raises(HandlerError, match="a function at the top level of a module"):
            bank.streams.read("a", fold, 0, version="1")


def test_events_are_not_purged_and_can_be_erased(begin: Callable[[], Bank]) -> None:
    bank = begin()
    bank.send((1, 100))
    bank.work()
    tables = bank.database.tables
    with bank.database.short() as connection:
        connection.execute(update(tables.inbox).values(claimed_at=0.0))
    assert SqlScheduler(bank.database, "x").purge() == 0
    assert bank.events() == [(1, 100)]
    with bank.database.short() as connection:
        connection.execute(update(tables.output).values(body=b""))
    assert bank.streams.events("a")[0].data is None


def test_what_is_of_no_use_is_refused(url: str) -> None:
    settings = Settings(database_url=url)
    for policy in (Idempotent(key="id"), Idempotent(key="id", retention=FOREVER, batch=5)):
        app = App("storm", settings=settings)
        Streams(app)
        app.handler(Move, policy=policy)(lambda message: None)
        with pytest.raises(ConfigurationError, match=r"retention=FOREVER\), without batch"):
            app.adapters()
    app = App("storm", settings=settings, policy=Idempotent(key="id", retention=FOREVER))
    found = Streams(app)

    @app.handler(Move)
    def move(message: Move, ctx: Context) -> Moved:
        with pytest.raises(HandlerError, match="not a JSON value"):
            found.open(ctx, "a", balance, {1, 2})  # type: ignore[arg-type]
        found.open(ctx, "a", balance, 0)
        with pytest.raises(HandlerError, match="about the stream 'a': read"):
            found.open(ctx, "b", balance, 0)
        return Moved(id=1, cents=1)

    with app.test() as test:
        test.send(Move(id=1, account="a", cents=1))
        test.run_until_idle()
        assert len(test.sent("bank.Moved")) == 1
    with app.initiate() as unit, pytest.raises(HandlerError, match="opted in"):
        found.open(unit, "a", balance, 0)
    for ctx in (Context("x", {}, None, None), AsyncContext("x", {}, None, None)):
        with pytest.raises(HandlerError, match="opted in"):
            found.open(ctx, "a", balance, 0)
    app.close()


STEPS: dict[Any, tuple[str, ...]] = {
    SqlStore: ("claim", "finish"),
    Streams: ("open", "append"),
    SqlScheduler: ("confirm", "settle"),
}


def live(points: CrashPoints, url: str) -> None:
    """The body of a process."""
    bank = Bank(url)
    watch(points, STEPS)
    bank.work()


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)], indirect=True)
def test_a_process_is_killed_at_each_step(begin: Callable[[], Bank], url: str) -> None:
    bank = begin()
    for count, at in enumerate(some(3), 1):
        bank.send((at, 1), (at, 1))
        name = run_until(at, live, url)
        let_pass(bank.database, 60)
        bank.work()
        assert bank.events() == [(number, 1) for number in range(1, count + 1)], name
        assert (len(bank.heard()), max(map(len, bank.heard().values()))) == (count, 1), name
        if not name:
            break
    assert at > 8
