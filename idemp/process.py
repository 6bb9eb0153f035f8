"""Opened parts of a process: the adapters of an app, or the store of an inbox."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from idemp.errors import ConfigurationError
from idemp.events import log
from idemp.forks import forget_in_children, let_go
from idemp.patient import PatientPublisher
from idemp.ports import AsyncStore, Broker, Finding, Identity, Scheduler, Store
from idemp.settings import Settings

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from idemp.sql.engine import Database
    from idemp.sql.store import SqlStore

__all__ = ["Adapters", "Judge", "Process", "open_adapters", "open_broker", "raise_red"]

Judge = Callable[[Sequence[Finding]], None]
T = TypeVar("T")


@dataclass(frozen=True)
class Adapters:
    """The adapters that a process of an app works with.

    Attributes:
        worker: Name of the process.
        database: Engines and tables of the store and the scheduler; `close` closes its pools.
        open_async: Opens the store of `async def` handlers.
    """

    store: Store[Any]
    scheduler: Scheduler
    broker: Broker
    worker: str
    database: Database
    open_async: Callable[[], AsyncStore[Any]]

    def close(self) -> None:
        """Close pooled connections."""
        self.database.close()


class Process(Generic[T]):
    """Holder of everything that this process has opened, each thing at its first use. A forked child begins with nothing.

    Args:
        engine: Engine of the user's, by which a child must not use connections of its parent either.
        settings: By default read from the environment at first use.

    Attributes:
        opened: Adapters.
        async_store: Store of `async def` handlers and of `async with`.
        publisher: Sends what is emitted outside of handlers; one thread at a time, which holds `sending`.
        declared: Whether the queue of the app was declared.
        joined: Store on the engine of the session that was joined last.
        registered: Handlers whose names and identities are stored.
        first: Task that opens the adapters while others wait.

    Example:
        >>> Process(None).opened is None
        True
    """

    def __init__(self, engine: Engine | AsyncEngine | None, settings: Settings | None = None) -> None:
        self.engine, self._settings, self._inherited = engine, settings, list[object]()
        self._begin()
        forget_in_children(self)

    def _begin(self) -> None:
        self.opened: T | None = None
        self.async_store: AsyncStore[Any] | None = None
        self.publisher: PatientPublisher | None = None
        self.joined: SqlStore | None = None
        self.declared = False
        self.registered: set[tuple[str, str, Identity | None]] = set()
        self.first: asyncio.Task[object] | None = None
        self.opening, self.sending = threading.Lock(), threading.Lock()

    @property
    def settings(self) -> Settings:
        """Settings, read at first use."""
        if self._settings is None:
            self._settings = Settings()
        return self._settings

    def open(self, opener: Callable[[], T]) -> T:
        """Return what is opened; open it at first use, once, whichever thread is the first."""
        with self.opening:
            if self.opened is None:
                self.opened = opener()
            return self.opened

    def forget(self) -> None:
        """Begin with nothing, in a forked child; another thread may have held the locks at the fork."""
        self._inherited += [self.opened, self.async_store, self.publisher]
        if self.engine is not None:
            self._inherited.append(let_go(self.engine))
        self._begin()


def open_adapters(settings: Settings, engine: Engine | AsyncEngine | None = None, judge: Judge | None = None) -> Adapters:
    """Return the adapters of a process, opened and checked.

    Raises:
        ConfigurationError: A start-up check has a red finding.

    Example:
        >>> open_adapters(Settings(database_url="sqlite:///nowhere.db"))
        Traceback (most recent call last):
        idemp.errors.ConfigurationError: the file nowhere.db does not exist: idemp db upgrade
    """
    from idemp.sql.checks import check_broker, check_database
    from idemp.sql.engine import Database, engines, refusal_of_url, worker_name
    from idemp.sql.scheduler import SqlScheduler
    from idemp.sql.store import SqlStore

    judge = judge or raise_red
    own, asynchronous = engines(settings, engine)
    database = Database(own, settings.table_prefix, fast=settings.fast_path)
    worker = worker_name()
    with ExitStack() as on_error:
        on_error.callback(database.close)
        judge(check_database(database))
        broker = open_broker(settings, database, worker)
        judge(check_broker(database, broker.identity))
        on_error.pop_all()
    store = SqlStore(database, worker, lazy=settings.commits == "group")
    scheduler = SqlScheduler(database, worker, settings.lease)

    def open_async() -> AsyncStore[Any]:
        with refusal_of_url(settings.database_url, asynchronous=True):
            from idemp.sql.aio import AsyncSqlStore

        return AsyncSqlStore.beside(store, asynchronous())

    return Adapters(store, scheduler, broker, worker, database, open_async)


def open_broker(settings: Settings, database: Database, worker: str) -> Broker:
    """Return the broker that the settings name; it connects at its first use.

    Args:
        settings: Name it.
        database: Has the queues of `sql://`.
        worker: Name of this process.

    Raises:
        ConfigurationError: There is no adapter for it.

    Example:
        >>> open_broker(Settings(broker_url="carrier-pigeon://roof"), None, "worker-1")
        Traceback (most recent call last):
        idemp.errors.ConfigurationError: broker_url=carrier-pigeon:… is not supported: use sql://, ...
    """
    scheme = settings.broker_url.partition(":")[0]
    if settings.broker_url == "sql://":
        from idemp.sql.broker import SqlBroker

        return SqlBroker(database, worker, settings.lease)
    if adapters := list(entry_points(group="idemp.brokers", name=scheme)):
        broker: Broker = adapters[0].load()(settings)
        return broker
    raise ConfigurationError(
        f"broker_url={scheme}:… is not supported: use sql://, amqp://USER:PASSWORD@HOST/VHOST or stomp://HOST"
    )


def raise_red(findings: Sequence[Finding]) -> None:
    """Refuse to start with a red finding, and log the others.

    Raises:
        ConfigurationError: There is one.

    Example:
        >>> raise_red([Finding("yellow", "a classic queue", "declare a quorum queue")])
    """
    for finding in findings:
        if finding.level == "yellow":
            log("check.warned", finding=" ".join(str(finding).splitlines()))
    if red := [str(finding) for finding in findings if finding.level == "red"]:
        raise ConfigurationError("; ".join(red))
