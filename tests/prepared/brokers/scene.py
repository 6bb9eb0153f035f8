"""Messages by number modulo five, from a producer that may be killed at every step, to consumers with an inbox.

0: committed at once. 1: rolled back at once. 2: committed, and its producer says nothing. 3: no work, and its producer says
nothing. 4: its work stays in flight.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from threading import Event
from typing import Any
from uuid import UUID

from sqlalchemy import Column, Engine, Integer, MetaData, Table, insert, select
from sqlalchemy.orm import Session

from idemp import App, Context, Idempotent
from idemp.broker.kombu import KombuBroker
from idemp.errors import AlreadyPassed, BrokerError, IdempError, RolledBack
from idemp.inbox.memory import InMemoryStore
from idemp.inbox.sql import create_engine_safely
from idemp.prepared import Home, PreparedMessages, State
from idemp.prepared.sql import SqlBarrier
from idemp.testing.store_bench import Background
from idemp.worker import Worker
from tests.inbox.sql.kept import make_tables
from tests.servers.process import wait_until

NOW, BACK, BY_CHECK, BACK_BY_CHECK, IN_FLIGHT = range(5)
QUEUE = "stock"
WORK = Table("work", MetaData(), Column("i", Integer, primary_key=True, autoincrement=False))
SEEN = Table("seen", WORK.metadata, Column("row", Integer, primary_key=True), Column("i", Integer))
STEPS = [
    f"{when} {call}" for call in ("prepare", "pass_", "probe", "publish", "published") for when in ("before", "after")
]
"""Where a producer is killed: around each call of home, barrier and broker. Between `pass_` and `probe` is its COMMIT."""


class Died(BaseException):
    """The producer is gone: it says nothing more, and cleans nothing up."""


@dataclass(frozen=True)
class Scene:
    """Where all happens.

    Attributes:
        database: of the local work and of the consumers' inbox.
        broker: of the final messages.
        open_home: opens the home, in any process.
        folder: for the producer's notes.
        count: of messages.
    """

    database: str
    broker: str
    open_home: Callable[[], Home]
    folder: Path
    count: int
    check_after: timedelta = timedelta(seconds=1)

    def of(self, *classes: int) -> set[int]:
        """The numbers of these classes."""
        return {i for i in range(self.count) if i % 5 in classes}

    @contextmanager
    def engine(self) -> Iterator[Engine]:
        engine = create_engine_safely(self.database)
        try:
            yield engine
        finally:
            engine.dispose()

    @contextmanager
    def messages(self) -> Iterator[PreparedMessages]:
        """The producer's half of the service, of which each process has one."""
        with self.engine() as engine:
            app = App("orders", store=InMemoryStore(), broker=KombuBroker(self.broker))
            made = PreparedMessages(
                app,
                self.open_home(),
                barrier=SqlBarrier(engine, wait=timedelta(milliseconds=20)),
                check_after=self.check_after,
                max_checks=2,
                lease=timedelta(seconds=4),  # for which a message is hidden whose delivery was lost
                timeout=timedelta(seconds=2),
            )
            try:
                yield made
            finally:
                made.close()

    @contextmanager
    def running(self) -> Iterator[PreparedMessages]:
        """Tables, a worker of the consumers, and a checker."""
        with self.engine() as engine, ExitStack() as stack:
            make_tables(engine)
            WORK.metadata.create_all(engine)
            consumers = App(QUEUE, database=engine, broker=KombuBroker(self.broker))

            @consumers.handler(dict, type="stock.Reserve", policy=Idempotent())
            def reserve(message: dict[str, Any], ctx: Context) -> None:
                ctx.connection.execute(insert(SEEN), {"i": message["i"]})

            consumers.start()
            stack.callback(consumers.close)
            messages = stack.enter_context(self.messages())
            messages.verify()
            worker, stop = Worker([consumers], threads=1), Event()
            for run, end in (
                (worker.run, worker.stop),
                (lambda: messages.run(stop, timedelta(milliseconds=50)), stop.set),
            ):
                running = Background(run)
                stack.callback(running.result, 40)
                stack.callback(end)
            yield messages

    # The producer ----------------------------------------------------------------------------------------------------

    def produce(self, messages: PreparedMessages, i: int, attempt: int = 1) -> None:
        """One message of the first four classes; under another key if the checker was faster than we."""
        try:
            self._produce(messages, i, attempt)
        except RolledBack:
            self.produce(messages, i, attempt + 1)

    def _produce(self, messages: PreparedMessages, i: int, attempt: int) -> None:
        engine = messages.barrier.engine  # type: ignore[union-attr]
        with suppress(Died), messages.prepare(*said(i), **told(i, attempt)) as half:
            if i % 5 in {NOW, BY_CHECK}:
                with suppress(AlreadyPassed), Session(engine) as session, session.begin():
                    half.pass_barrier(session)
                    session.execute(insert(WORK), {"i": i})
            if i % 5 in {BY_CHECK, BACK_BY_CHECK}:
                raise Died
            if i % 5 == NOW:
                half.commit()
            else:
                half.rollback()

    def leave_in_flight(self, messages: PreparedMessages, session: Session) -> list[UUID]:
        """The last class, its work in one transaction that stays open."""
        ids = []
        for i in sorted(self.of(IN_FLIGHT)):
            prepared = messages.make(*said(i), **told(i))
            until_done(lambda prepared=prepared: messages.home.prepare(prepared, self.check_after))
            messages.barrier.pass_(session, prepared.id)  # type: ignore[union-attr]
            session.execute(insert(WORK), {"i": i})
            ids.append(prepared.id)
        return ids

    def produce_all(self) -> None:
        """In this process; what the home or the broker refuses is tried again, under the same key."""
        with self.messages() as messages:
            for i in sorted(self.of(NOW, BACK, BY_CHECK, BACK_BY_CHECK)):
                until_done(lambda i=i: self.produce(messages, i))

    def produce_killed(self) -> Counter[str]:
        """In processes that are killed, each at another step, and start again where they were; by step, how many."""
        killed: Counter[str] = Counter()
        numbers = sorted(self.of(NOW, BACK, BY_CHECK, BACK_BY_CHECK))
        place = self.folder / "place"
        place.write_text("0 spared")
        while True:
            pid = os.fork()
            if pid == 0:
                self._produce_until_killed(numbers, place)
            _, status = os.waitpid(pid, 0)
            at, step = place.read_text().split(maxsplit=1)
            if not os.WIFSIGNALED(status):
                assert (os.waitstatus_to_exitcode(status), int(at)) == (0, len(numbers)), f"the producer failed at {at}"
                return killed
            assert os.WTERMSIG(status) == signal.SIGKILL
            killed[step] += 1
            place.write_text(f"{at} spared")

    def _produce_until_killed(self, numbers: Sequence[int], place: Path) -> None:
        code = 1
        try:
            at, step = place.read_text().split(maxsplit=1)
            with self.messages() as messages:
                for number in range(int(at), len(numbers)):
                    if step != "spared":
                        step = STEPS[number // 4 % len(STEPS)]
                    place.write_text(f"{number} {step}")
                    with deadly(messages, step):
                        self.produce(messages, numbers[number])
                    step = ""
            place.write_text(f"{len(numbers)} done")
            code = 0
        finally:
            os._exit(code)  # nothing of the parent's is cleaned up here

    # What came of it -------------------------------------------------------------------------------------------------

    def play(self, produce: Callable[[], object]) -> None:
        """Run all, and see that consumers had what was committed, once in effect, and nothing else; the rest is parked."""
        with self.running() as messages, self.engine() as engine:
            home = messages.home
            with Session(engine) as session:
                ids = self.leave_in_flight(messages, session)
                produce()
                committed = self.of(NOW, BY_CHECK)
                assert self.worked() == committed
                self.wait_until_seen(committed)
                wait_until(lambda: self.parked(home) == set(ids), "those in flight are parked", seconds=60)
                session.commit()
            for id_ in ids:
                until_done(lambda id_=id_: home.resume(id_))
            self.wait_until_seen(committed | self.of(IN_FLIGHT))
            wait_until(lambda: home.browse(None, 10) == [], "nothing is left")

    def parked(self, home: Home) -> set[UUID]:
        with suppress(BrokerError):
            return {record.prepared.id for record in home.browse(State.PARKED, 10 * self.count)}
        return set()

    def worked(self) -> set[int]:
        with self.engine() as engine, engine.connect() as connection:
            return set(connection.scalars(select(WORK.c.i)))

    def wait_until_seen(self, numbers: set[int]) -> None:
        """All of them, once each, and no others."""
        with self.engine() as engine:

            def seen() -> Counter[int]:
                with engine.connect() as connection:
                    return Counter(connection.scalars(select(SEEN.c.i)))

            wait_until(lambda: seen().keys() >= numbers, "all are seen", seconds=60)
            assert seen() == Counter(numbers)


def said(i: int) -> tuple[dict[str, int]]:
    return ({"i": i},)


def told(i: int, attempt: int = 1) -> dict[str, str]:
    return {"to": QUEUE, "type": "stock.Reserve", "key": f"order-{i}/{attempt}"}


def until_done(call: Callable[[], object]) -> None:
    """As a producer does who is told that nothing is lost: again, until nothing is in the way."""

    def done() -> bool:
        with suppress(IdempError):
            call()
            return True
        return False

    wait_until(done, "it is done", seconds=60)


@contextmanager
def deadly(messages: PreparedMessages, step: str) -> Iterator[None]:
    """The process is killed at this step, if it comes there."""

    def armed(owner: Any, name: str) -> Callable[..., Any]:
        call = getattr(owner, name)

        def calling(*arguments: Any, **options: Any) -> Any:
            if step == f"before {name}":
                os.kill(os.getpid(), signal.SIGKILL)
            result = call(*arguments, **options)
            if step == f"after {name}":
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return calling

    places = [
        (messages.home, "prepare"),
        (messages.barrier, "pass_"),
        (messages.barrier, "probe"),
        (messages.publishers, "publish"),
        (messages.home, "published"),
    ]
    for owner, name in places:
        setattr(owner, name, armed(owner, name))
    yield
    for owner, name in places:
        delattr(owner, name)
