"""An app on a database and a broker of its own, for tests."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from secrets import token_hex
from typing import Any, Self

from pydantic import BaseModel
from sqlalchemy import Engine, MetaData, func, inspect, select, update
from sqlalchemy.orm import Session

from idemp.app import App
from idemp.errors import ConfigurationError
from idemp.handling import Handling
from idemp.hooks import Hooks
from idemp.identity import uuid7
from idemp.messages import Output, Refusal, encode, parse, type_name
from idemp.policy import Duration, seconds
from idemp.ports import Broker
from idemp.process import Adapters, Process
from idemp.sql.engine import Database
from idemp.sql.records.failures import DeadLetters, FailedMessage
from idemp.sql.schema import upgrade
from idemp.sql.tables import DEFAULT_PREFIX
from idemp.testing.crash_points import CrashPoints
from idemp.testing.memory import MemoryBroker
from idemp.worker import Worker
from idemp.worker.tasks import Tasks

__all__ = ["AppTest", "SteppedWorker", "busy", "event_loop", "let_pass", "step"]


class AppTest:
    """An app on a database and a broker of its own. `App.test` makes it.

    Attributes:
        app: The app, which uses them until the block ends; so does what it initiates.
        database: idemp's tables, in the same database as the handlers'.
        broker: Where it consumes and sends.
        taken: Outputs that the broker has taken from the app, in order.
        delivers: Whether these go to their queues; else they are taken, and go nowhere.
        runs: How often handlers have run to their COMMIT, by the type of the message.

    Example:
        >>> from idemp import Context, Idempotent
        >>> app = App("orders")
        >>> class PlaceOrder(BaseModel):
        ...     __message_type__ = "shop.PlaceOrder"
        ...     order_id: int
        >>> @app.handler(PlaceOrder, policy=Idempotent(key="order_id"))
        ... def place_order(command: PlaceOrder, ctx: Context) -> None:
        ...     ctx.send({"order_id": command.order_id}, to="stock", type="shop.ReserveStock")
        >>> with app.test() as test:
        ...     test.send(PlaceOrder(order_id=7))
        ...     test.send(PlaceOrder(order_id=7))
        ...     test.run_until_idle()
        ...     test.sent("stock"), test.runs["shop.PlaceOrder"]
        ([{'order_id': 7}], 1)
    """

    def __init__(self, app: App, *, tables: MetaData | None, database: str | None, broker: Callable[[], Broker] | None) -> None:
        self.app, self._tables, self._url = app, tables, database
        self.broker: Any = broker() if broker is not None else MemoryBroker(strict=False)
        self.runs: Counter[str] = Counter()
        self.taken: list[Output] = []
        self.delivers = True
        self.loop = event_loop()  # of `async def` handlers
        self._errors: list[Exception] = []
        self._worker: Worker | None = None

    def __enter__(self) -> Self:
        app, self._stack = self.app, ExitStack()
        app.configure()
        process, hooks = app.process, app.hooks
        with self._stack:
            self._stack.callback(lambda: app.__dict__.update(process=process, hooks=hooks))
            url, prefix = self._url or self._stack.enter_context(_temporary()), DEFAULT_PREFIX
            if self._url is not None:
                prefix = f"idemp_test_{token_hex(4)}_"
                self._stack.enter_context(_installed(url, prefix))
            if self._tables is not None:
                self._stack.enter_context(_created(url, self._tables))
            self.url, self.database = url, Database(url, prefix)
            self._stack.callback(self.database.close)
            changes = {"database_url": url, "broker_url": "sql://", "table_prefix": prefix}
            # One engine compiles each statement once for all processes.
            app.process = Process(None if app.is_async else self.database.engine, app.settings.model_copy(update=changes))
            app.hooks = [*app.hooks, _Noting(self)]
            app.process.opened = self._open()  # for what it initiates
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            asyncio.run_coroutine_threadsafe(self.app.aclose(), self.loop).result()  # what it initiated
        finally:
            self._stack.close()

    # Given

    @property
    def engine(self) -> Engine:
        """Engine of the database."""
        return self.database.engine

    @contextmanager
    def session(self) -> Iterator[Session]:
        """Begin a session of the test's own; it is committed at the end of the block."""
        with Session(self.engine) as session, session.begin():
            yield session

    def send(self, message: BaseModel | Mapping[str, Any] | bytes, **properties: Any) -> None:
        """Send a message to the queue of the app.

        Args:
            message: A model, a mapping with `type=`, or JSON text.
            properties: As a producer sets them; by default a new `message_id`, and the type of the model.
        """
        if isinstance(message, BaseModel):
            properties.setdefault("type", type_name(type(message)))
        body = message if isinstance(message, bytes) else encode(message)
        properties.setdefault("message_id", uuid7())
        output = Output("", "send", "", self.app.name, properties, body)
        refused = self.broker.publisher().publish([output], 10.0)[0]
        if refused is not None:
            raise ConfigurationError(f"the broker did not take the message: {refused.reason}")

    def pass_time(self, duration: Duration) -> None:
        """Let time pass for all that waits in the tables: delays, retries, leases, retention. Clocks are not changed."""
        let_pass(self.database, seconds(duration, "duration"))

    # When

    def run_until_idle(self, *, raises: bool = True) -> None:
        """Run the worker and the relay of the app until nothing is due.

        Args:
            raises: Whether to raise what a handler raises, or why a message was not handled. If not, retries and dead letters
                take their way.
        """
        worker = self._worker = self._worker or self.worker()
        while True:
            taken = step(worker)
            if raises and self._errors:
                raise self._errors.pop(0)
            if not taken and not busy(worker) and not self.due():
                break
        self._errors.clear()

    def worker(self, points: CrashPoints | None = None) -> Worker:
        """Start a process of the app, whose calls of ports may be crash points. Its turns are run by `step`."""
        app, adapters, initiating = self.app, self._open(), self.app.process
        app.process = Process(initiating.engine, initiating.settings)
        app.process.opened = adapters if points is None else points.wrap_adapters(adapters)
        worker = SteppedWorker(app, self.loop) if app.is_async else Worker(app)
        if (store := app.process.async_store) is not None:
            self._stack.callback(lambda: asyncio.run_coroutine_threadsafe(store.close(), self.loop).result())
        app.process = initiating
        worker.upkeep()
        return worker

    def _open(self) -> Adapters:
        adapters = self.app.open(_Recording(self.broker, self))
        self._stack.callback(adapters.close)
        if self.app.handlers:
            adapters.broker.declare(self.app.name, sorted(self.app.handlers))
        return adapters

    # Then

    @property
    def outputs(self) -> list[Output]:
        """Outputs that the broker has taken from the app, in order; each id once."""
        found = {output.id: output for output in self.taken}
        return list(found.values())

    def sent(self, name: str) -> list[Any]:
        """Return the documents that were sent to a queue, or published under a type; each id once."""
        return [parse(output.body) for output in self.outputs if output.routing_key == name]

    def dead_letters(self) -> list[FailedMessage]:
        """Return the messages that no worker takes any more, and why."""
        return DeadLetters(self.database).find()

    def due(self, within: float = 0.0) -> bool:
        """Return whether a retry or an output is due within some seconds."""
        tables, now = self.database.tables, self.database.dialect.now + within
        message, pending = tables.message, tables.pending
        retries = select(func.count()).where(message.c.queue == self.app.name, message.c.due_at <= now)
        outputs = select(func.count()).where(pending.c.due_at <= now, pending.c.quarantined_at.is_(None))
        with self.database.queue_engine.connect() as queues, self.engine.connect() as connection:
            return bool(queues.scalar(retries) or connection.scalar(outputs))


class _Noting(Hooks):
    """Notes what handlers did."""

    def __init__(self, test: AppTest) -> None:
        self._test = test

    def after_commit(self, handling: Handling) -> None:
        assert handling.handler is not None
        self._test.runs[handling.handler.type] += 1

    def on_settled(self, handling: Handling) -> None:
        if handling.error is not None:
            self._test._errors.append(handling.error)  # noqa: SLF001


class _Recording:
    """A broker that remembers what it has taken."""

    def __init__(self, port: Any, test: AppTest) -> None:
        self._port, self._test = port, test

    def __getattr__(self, name: str) -> Any:
        return getattr(self._port, name)

    def publisher(self) -> Any:
        return _RecordingPublisher(self._port.publisher(), self._test)


class _RecordingPublisher(_Recording):
    def publish(self, outputs: Sequence[Output], timeout: float) -> Sequence[Refusal | None]:
        answers: Sequence[Refusal | None] = [None] * len(outputs)
        if self._test.delivers:
            answers = self._port.publish(outputs, timeout)
        self._test.taken += [output for output, refused in zip(outputs, answers, strict=True) if refused is None]
        return answers


class SteppedWorker(Worker):
    """A worker of `async def` handlers that consumes in the thread of a test; a step ends when all that was taken is settled.

    Args:
        app: The consumer.
        loop: Runs its `async def` handlers, in another thread.

    Example:
        >>> SteppedWorker(App("orders"))
        Traceback (most recent call last):
        idemp.errors.ConfigurationError: the app 'orders' has no handlers: import the modules that define them
    """

    runner: Tasks

    def __init__(self, app: App, loop: asyncio.AbstractEventLoop | None = None) -> None:
        super().__init__(app)
        self.runner.loop = loop or event_loop()

    def step(self, *, poll: float = 0.0) -> int:
        """Run one turn, and wait for its tasks."""
        taken, runner = super().step(poll=poll), self.runner
        while runner.in_hand and not self.intake.held and self._failure is None:
            runner.news.wait(0.05)
            runner.news.clear()
            runner.run([])
        if self._failure is not None:
            raise self._failure
        return taken


@cache
def event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all stepped workers, which runs in a thread.

    Example:
        >>> event_loop() is event_loop()
        True
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="idemp-test", daemon=True).start()
    return loop


def step(worker: Worker, *, relay: bool = True) -> int:
    """Run one turn of a worker, and one of its relay if it has one; return how many deliveries were taken.

    Example:
        >>> step.__name__
        'step'
    """
    worker.intake.look_again()
    taken = worker.step(poll=0.0)
    if relay:
        worker.relay.turn()
    return taken


def busy(worker: Worker) -> bool:
    """Return whether a worker has anything in its hands: on a loaded machine each handler may count as slow.

    Example:
        >>> busy.__name__
        'busy'
    """
    runner: Any = worker.runner
    in_hand = runner.in_hand if isinstance(runner, Tasks) else worker.protocol.sent or runner.slow
    return bool(in_hand or worker.intake.held or worker.intake.suspect_due)


def let_pass(database: Database, seconds: float) -> None:
    """Move all times in the tables back: the clock is the database's, and cannot be turned.

    Example:
        >>> let_pass.__name__
        'let_pass'
    """
    tables = database.tables
    for queues, table, names in (
        (False, tables.inbox, ["claimed_at"]),
        (False, tables.pending, ["due_at", "counts_at", "quarantined_at"]),
        (False, tables.identity, ["covers_since", "purged_before"]),
        (True, tables.message, ["due_at"]),
        (True, tables.worker, ["seen_at"]),
    ):
        with database.short(queues=queues) as connection:
            connection.execute(update(table).values({name: table.c[name] - seconds for name in names}))


@cache
def _pristine() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory()
    database = Database(f"sqlite:///{folder.name}/test.db")
    upgrade(database)
    database.close()
    return folder


@contextmanager
def _temporary() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(_pristine().name, folder, dirs_exist_ok=True)
        yield f"sqlite:///{Path(folder, 'test.db')}"


@contextmanager
def _installed(url: str, prefix: str) -> Iterator[None]:
    """Make idemp's tables under a prefix of their own, and drop them."""
    database = Database(url, prefix)
    upgrade(database)
    try:
        yield
    finally:
        tables = database.tables
        for engine, metadata in ((database.engine, tables.metadata), (database.queue_engine, tables.queue_metadata)):
            metadata.drop_all(engine)
            with engine.begin() as connection:
                connection.exec_driver_sql(f"DROP TABLE IF EXISTS {tables.version_table}")
        database.close()


@contextmanager
def _created(url: str, metadata: MetaData) -> Iterator[None]:
    """Make the tables of handlers; in the end, drop those, and empty tables that were there."""
    engine = Database(url).engine
    known = [table for table in metadata.sorted_tables if inspect(engine).has_table(table.name, schema=table.schema)]
    with engine.connect() as connection:
        for table in known:
            if connection.execute(select(table).limit(1)).first() is not None:
                raise ConfigurationError(f"the table {table.name} has rows: use an empty database for tests, or none")
    metadata.create_all(engine)
    try:
        yield
    finally:
        with engine.begin() as connection:
            for table in reversed(known):
                connection.execute(table.delete())
        metadata.drop_all(engine, tables=[table for table in metadata.sorted_tables if table not in known])
        engine.dispose()
