"""Messages of five fates, for any home: decided at once, decided by the checker, and never known.

Consumers with an inbox must see exactly those whose local work is committed, once in effect; what nobody knows is parked.
Nothing here knows what kind of home it is: `Place.home` makes one, in any process.
"""

from __future__ import annotations

import enum
import os
import signal
import threading
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from sqlalchemy import text

from idemp import App, Context, Idempotent
from idemp.errors import AlreadyPassed, RolledBack
from idemp.inbox.memory import InMemoryStore
from idemp.inbox.sql import create_engine_safely
from idemp.prepared import PreparedMessages, State
from idemp.prepared.sql import SqlBarrier
from idemp.settings import Settings
from idemp.testing.store_bench import Background
from idemp.worker import Worker
from tests.inbox.sql.kept import make_tables
from tests.servers.forked import forking
from tests.servers.process import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from uuid import UUID

    from sqlalchemy import Engine
    from sqlalchemy.orm import Session

    from idemp.prepared import Home

MESSAGES = int(os.environ.get("IDEMP_TEST_PREPARED", "100"))
"""How many messages a run has; the whole is 1000."""
PATIENCE = 60.0 + MESSAGES / 10
BRIEF = timedelta(milliseconds=10)


class Fate(enum.IntEnum):
    """What becomes of a message, by its number modulo 5."""

    COMMIT = 0
    ROLLBACK = 1
    COMMIT_BY_CHECK = 2
    ROLLBACK_BY_CHECK = 3
    UNKNOWN = 4

    @classmethod
    def of(cls, number: int) -> Fate:
        return cls(number % len(cls))


COMMITTED = {Fate.COMMIT, Fate.COMMIT_BY_CHECK}
STEPS = {
    Fate.COMMIT: ("prepared", "worked", "committed", "decided", "published"),
    Fate.ROLLBACK: ("prepared", "failed", "decided"),
    Fate.COMMIT_BY_CHECK: ("prepared", "worked", "committed"),
    Fate.ROLLBACK_BY_CHECK: ("prepared",),
    Fate.UNKNOWN: ("prepared",),
}
"""After which steps a producer of such a message may die."""
KILLS = tuple((fate, step) for fate, steps in STEPS.items() for step in steps)

Kill = tuple[int, str]


@dataclass(frozen=True)
class Place:
    """Where everything is; goes to other processes.

    Attributes:
        home: makes the home; to be pickled.
        business: URL of the database of the local work, with the barrier.
        inbox: URL of the consumer's database.
        broker: URL.
        check_after: of all messages; the checker begins when the producers have ended.
    """

    home: Callable[[], Home]
    business: str
    inbox: str
    broker: str
    check_after: timedelta = timedelta(0)


class Unwell(Exception):
    pass


class Killing:
    """A port whose process dies at a step. All else is the port's."""

    def __init__(self, port: Any, step: Callable[[str], None]) -> None:
        self._port = port
        self._step = step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._port, name)

    def prepare(self, *arguments: Any) -> None:
        self._port.prepare(*arguments)
        self._step("prepared")

    def decide(self, *arguments: Any) -> Any:
        answer = self._port.decide(*arguments)
        self._step("decided")
        return answer

    def published(self, *arguments: Any) -> None:
        self._step("published")
        self._port.published(*arguments)

    @contextmanager
    def begin(self) -> Iterator[Any]:
        with self._port.begin() as session:
            try:
                yield session
            except Exception:
                self._step("failed")
                raise
            self._step("worked")
        self._step("committed")


class Producer:
    """One process's producer; dies at `kill`, which is a number and a step."""

    def __init__(self, place: Place, kill: Kill | None = None) -> None:
        self.kill = kill
        self.number = -1
        self.engine = create_engine_safely(place.business)
        app = App("orders", store=InMemoryStore(), broker=place.broker, settings=Settings())
        home: Any = Killing(place.home(), self._step)
        barrier: Any = Killing(SqlBarrier(self.engine, wait=BRIEF), self._step)
        times = {"check_after": place.check_after, "lease": timedelta(seconds=5), "timeout": timedelta(seconds=4)}
        self.prepared = PreparedMessages(app, home, barrier=barrier, max_checks=2, **times)

    def produce(self, number: int) -> None:
        """One message; again after a death it comes to the same."""
        self.number = number
        what: dict[str, Any] = {
            "message": {"n": number},
            "to": "stock",
            "type": "stock.Reserve",
            "key": f"order-{number}",
        }
        match Fate.of(number):
            case Fate.COMMIT:
                self.prepared.submit_after(partial(work, number), **what)
            case Fate.ROLLBACK:
                with suppress(Unwell, RolledBack):
                    self.prepared.submit_after(partial(work_and_fail, number), **what)
            case fate:
                made = self.prepared.make(**what)
                self.prepared.home.prepare(made, self.prepared.check_after)
                if fate is Fate.COMMIT_BY_CHECK:
                    barrier = self.prepared.needed_barrier()
                    with suppress(AlreadyPassed), barrier.begin() as session:
                        barrier.pass_(session, made.id)
                        work(number, session)

    def close(self) -> None:
        self.prepared.close()
        for engine in (self.engine, getattr(self.prepared.home, "engine", None)):
            if engine is not None:
                engine.dispose()

    def _step(self, name: str) -> None:
        if (self.number, name) == self.kill:
            os.kill(os.getpid(), signal.SIGKILL)


def work(number: int, session: Session) -> None:
    session.execute(text("INSERT INTO business (n) VALUES (:n)"), {"n": number})


def work_and_fail(number: int, session: Session) -> None:
    work(number, session)
    raise Unwell


def produce(place: Place, numbers: Iterable[int], kill: Kill | None) -> None:
    """What a producing process does."""
    producer = Producer(place, kill)
    for number in numbers:
        producer.produce(number)
    producer.close()


class Scene:
    """Producers, a checker, and a real consumer with an inbox. A context manager."""

    def __init__(self, place: Place, messages: int = MESSAGES) -> None:
        self.place = place
        self.messages = messages
        self.deaths = 0

    def __enter__(self) -> Self:
        self.business = self._database(self.place.business, "business")
        self.inbox = self._database(self.place.inbox, "seen")
        app = App("stock", database=self.inbox, broker=self.place.broker, settings=Settings())

        @app.handler(dict, type="stock.Reserve", policy=Idempotent())
        def reserve(message: dict[str, int], ctx: Context) -> None:
            ctx.session.execute(text("INSERT INTO seen (n) VALUES (:n)"), {"n": message["n"]})

        app.broker.declare(app.topology())
        self.app = app
        self.worker = Worker([app], threads=1, relay=False)
        self._running = Background(self.worker.run)
        self.checker = Producer(self.place)
        self.checker.prepared.verify()
        self._held = self.business.connect()
        self._held.begin()
        for number in self.numbers(Fate.UNKNOWN):  # local work that is in flight for as long as anybody asks
            self.checker.prepared.needed_barrier().pass_(self._held, self.id_of(number))
        return self

    def __exit__(self, *_: object) -> None:
        self.worker.stop()
        self._running.result(PATIENCE)
        self._held.close()
        self.checker.close()
        for engine in (self.business, self.inbox):
            engine.dispose()

    def numbers(self, *fates: Fate) -> list[int]:
        return [number for number in range(self.messages) if Fate.of(number) in fates]

    def id_of(self, number: int) -> UUID:
        return self.checker.prepared.id_of(f"order-{number}")

    def produce(self, kills: Sequence[Kill] = (), *, first: int = 0, last: int | None = None) -> None:
        """The messages; each kill ends a process, and the next one goes on with the message at which it died."""
        start, end = first, self.messages if last is None else last
        for kill in [*sorted(kills), None]:
            child = forking(__name__).Process(target=produce, args=(self.place, range(start, end), kill))
            child.start()
            child.join(PATIENCE)
            if kill is None:
                assert child.exitcode == 0, child.exitcode
                return
            assert child.exitcode == -signal.SIGKILL, (kill, child.exitcode)
            start, self.deaths = kill[0], self.deaths + 1

    def check_all(self) -> None:
        """Rounds of the checker until nothing is left that it could decide."""
        stop = threading.Event()
        running = Background(lambda: self.checker.prepared.run(stop, timedelta(milliseconds=20)))
        try:
            wait_until(lambda: not self._undecided() or not running.running, "all are decided", seconds=PATIENCE)
        finally:
            stop.set()
            running.result(PATIENCE)

    def assert_kept(self) -> None:
        """Consumers see exactly what is committed, once in effect; the rest is parked, and goes nowhere."""
        expected = self.numbers(*COMMITTED)
        assert self.rows(self.business, "business") == Counter(expected)
        wait_until(lambda: len(self.rows(self.inbox, "seen")) >= len(expected), "all are consumed", seconds=PATIENCE)
        parked = self.checker.prepared.home.browse(State.PARKED, 10 * self.messages)
        assert sorted({record.prepared.id for record in parked}) == sorted(map(self.id_of, self.numbers(Fate.UNKNOWN)))
        self._held.rollback()
        for record in parked:
            assert self.checker.prepared.home.resume(record.prepared.id)
        self.check_all()
        assert not self.checker.prepared.home.browse(None, 1)
        wait_until(lambda: self.app.broker.depth("stock") == 0, "all is taken", seconds=PATIENCE)
        assert self.rows(self.inbox, "seen") == Counter(expected)

    def rows(self, engine: Engine, table: str) -> Counter[int]:
        with engine.connect() as connection:
            return Counter(connection.scalars(text(f"SELECT n FROM {table}")))

    def _undecided(self) -> bool:
        waiting = self.checker.prepared.home.browse(None, 10 * self.messages)
        return any(record.state is not State.PARKED for record in waiting)

    @staticmethod
    def _database(url: str, table: str) -> Engine:
        engine = create_engine_safely(url)
        make_tables(engine)
        with engine.begin() as connection:
            connection.exec_driver_sql(f"CREATE TABLE {table} (n INTEGER NOT NULL)")
        return engine


def kills(messages: int = MESSAGES) -> list[Kill]:
    """One death at each step of each fate, spread over the messages."""
    apart = max(1, messages // len(Fate) // len(KILLS))
    return [((place * apart) * len(Fate) + int(fate), step) for place, (fate, step) in enumerate(KILLS)]
