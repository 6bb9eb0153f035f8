"""The app: a consumer by name, its handlers, and initiations outside of them."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
import typing
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from math import ceil
from shlex import quote
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast, overload
from weakref import WeakSet

from pydantic import BaseModel

from idemp.context import AsyncContext, Context
from idemp.dispatcher import Dispatcher
from idemp.errors import ConfigurationError, describe_error, describe_place
from idemp.events import log
from idemp.handlers import Handler, Handlers, check_model
from idemp.handling import Handling
from idemp.hooks import Hooks
from idemp.initiation import INITIATION, INITIATION_KEY, Initiating
from idemp.joining import Caller, join
from idemp.messages import Refusal, check_text
from idemp.patient import PatientPublisher
from idemp.policy import Idempotent, Policy, configured, seconds
from idemp.ports import AsyncStore, Broker, Claim, Finding, Identity, Receiver, Scheduler, Store
from idemp.process import Adapters, Judge, Process, open_adapters, raise_red
from idemp.settings import Settings

if TYPE_CHECKING:
    from sqlalchemy import Engine, MetaData
    from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
    from sqlalchemy.orm import Session

    from idemp.sql.engine import Database
    from idemp.sql.scheduler import SqlScheduler
    from idemp.testing.app import AppTest

__all__ = ["APPS", "App", "load_app"]

APPS: WeakSet[App] = WeakSet()
"""Those of this process, so that a test finds the app of a handler."""
AGAIN = 900.0
"""Seconds within which an output comes again that its queue refuses: until it is in quarantine, and some more."""
M = TypeVar("M", bound=BaseModel)
A = TypeVar("A", bound=Awaitable[Any] | AsyncIterator[Any])
P = ParamSpec("P")
R = TypeVar("R")


class Decorator(typing.Protocol[M]):
    """Makes a function a handler, and returns it as it is."""

    @overload
    def __call__(self, function: Callable[[M], R]) -> Callable[[M], R]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[M, AsyncContext, P], A]
    ) -> Callable[Concatenate[M, AsyncContext, P], A]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[M, Context, P], R]) -> Callable[Concatenate[M, Context, P], R]: ...
    @overload
    def __call__(self, function: Callable[[list[M]], R]) -> Callable[[list[M]], R]: ...
    @overload
    def __call__(self, function: Callable[[list[M], list[AsyncContext]], A]) -> Callable[[list[M], list[AsyncContext]], A]: ...
    @overload
    def __call__(self, function: Callable[[list[M], list[Context]], R]) -> Callable[[list[M], list[Context]], R]: ...


class App:
    """A consumer: the scope of its inbox keys, and the queue of the same name.

    Args:
        name: Name of the consumer and of its queue.
        policy: Default policy of its message types.
        engine: SQLAlchemy engine; by default one for `settings.database_url`. With an `AsyncEngine`, which `async def` handlers
            use, connections of idemp's own go by `settings.database_url`, or by the engine's URL if that is not set.
        settings: By default read from the environment.
        hooks: Called by its workers.

    Raises:
        ConfigurationError: An argument is invalid.

    Example:
        >>> from idemp import Idempotent
        >>> class PlaceOrder(BaseModel):
        ...     __message_type__ = "shop.PlaceOrder"
        ...     order_id: int
        >>> app = App("orders")
        >>> @app.handler(PlaceOrder, policy=Idempotent(key="order_id"))
        ... def place_order(command: PlaceOrder, ctx: Context) -> None:
        ...     ctx.send({"order_id": command.order_id}, to="stock", type="shop.ReserveStock")
        >>> sorted(app.handlers)
        ['shop.PlaceOrder']
    """

    def __init__(
        self,
        name: str,
        *,
        policy: Policy | None = None,
        engine: Engine | AsyncEngine | None = None,
        settings: Settings | None = None,
        hooks: Sequence[Hooks] = (),
    ) -> None:
        self.hooks = hooks
        APPS.add(self)
        self.name = check_text(name, "the name of an app")
        self.policy = policy or Policy()
        self.handlers = Handlers()
        self.process: Process[Adapters] = Process(engine, settings)
        """What this process has opened; `test` puts another one in its place."""
        self._configured = False
        self.chores: list[Callable[[], object]] = []
        """What the relay of its workers does between its turns."""
        self.on_open: list[Callable[[Adapters], Adapters]] = []
        """Change the adapters of a process when they are opened."""

    @property
    def settings(self) -> Settings:
        """Settings, read at first use."""
        return self.process.settings

    @property
    def engine(self) -> Engine | AsyncEngine | None:
        """The engine that was given."""
        return self.process.engine

    def handler(
        self,
        model: type[M],
        *,
        policy: Policy | None = None,
        type: str | None = None,
        replies: bool = False,
        default: bool = False,
    ) -> Decorator[M]:
        """Return a decorator that makes a function the handler of a message class. The function stays as it is.

        What the function returns or yields is published, or with `replies=True` sent to the queue that asked.
        A function whose first parameter is a list of the class gets the fresh messages of a batch at once, and a list of their
        contexts; it returns None, or one result a message.

        Args:
            model: pydantic model of the messages.
            policy: By default the app's.
            type: Type name; by default `__message_type__`, else package and class.
            replies: Whether returned messages are replies.
            default: Whether messages that do not say their type are of this type; for queues with other producers.

        Raises:
            ConfigurationError: The type has a handler already, or the policy does not fit the model.
        """
        check_model(model)

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            handler = Handler(self.name, model, function, policy or self.policy, type=type, replies=replies)
            if default and self.handlers.default:
                raise ConfigurationError(f"{self.name}: {self.handlers.default!r} and {handler.type!r} are both the default type")
            self._add(handler)
            self.handlers.default = handler.type if default else self.handlers.default
            return function

        return decorate

    def _add(self, handler: Handler) -> None:
        for each in handler.types:
            if each in self.handlers:
                raise ConfigurationError(f"{self.name}: messages of type {each!r} have two handlers")
            self.handlers[each] = handler

    def initiate(self, id: str | None = None, *, session: Session | AsyncSession | None = None) -> Initiating:
        """Begin changes and messages in one transaction, outside a handler, by `with` or `async with`.

        With a session, they are in the transaction of that session: commit it after the block, and the relay of a worker sends the
        messages. If the block raises, or what it emitted cannot be stored, the session is rolled back.

        Args:
            id: With an id, a second initiation runs its block, rolls its changes back and sends what the first one stored.
                Nothing is rolled back in a session of yours: look at `unit.duplicate`.
            session: `Session` for `with`, `AsyncSession` for `async with`, of the app's database. On SQLite, call `adapters` before:
                the first use of an app writes, and a session may have the only write lock.

        Raises:
            ConfigurationError: The id is empty, too long or not text; or the session is of another database, or commits each
                statement (AUTOCOMMIT).
            InFlight: Another transaction initiates this id.

        Example:
            >>> def place(app: App, session: "Session") -> None:
            ...     with app.initiate(session=session) as unit:
            ...         unit.send({"order_id": 7}, to="orders", type="shop.PlaceOrder")
            ...     session.commit()
        """
        return Initiating(self.name, id, lambda: self.adapters().store, self.async_store, self.dispatch, session, self._joining)

    def _joining(self) -> Callable[..., AbstractContextManager[Any]]:
        """Open the adapters, and return what claims an id in the transaction of a session."""
        from idemp.sql.dialects import CLAIM_SECONDS
        from idemp.sql.store import SqlStore

        process, adapters = self.process, self.adapters()

        def joining(given: Any, claim: Claim) -> AbstractContextManager[Any]:
            session: Session = getattr(given, "sync_session", given)
            kind: Any = Context
            tx: Any = Caller(session)
            if session is not given:
                from idemp.sql.aio import AsyncCaller

                kind, tx = AsyncContext, AsyncCaller(given)
            engine = session.connection().engine
            if process.joined is None or process.joined.database.engine is not engine:
                process.joined = SqlStore(adapters.database.on(engine), adapters.worker)
            store, scheduler = process.joined, cast("SqlScheduler", adapters.scheduler)
            rules: Any = {"wait": CLAIM_SECONDS, "parks_late": False, "unrelayed": _log_unrelayed}
            return join(session, store, scheduler, kind, tx, claim, {}, **rules)

        return joining

    def dispatch(self, handling: Handling) -> Mapping[str, Refusal]:
        """Send what was emitted outside of a handler, and return what was refused; one at a time: a publisher has one thread."""
        process, adapters = self.process, self.adapters()
        with process.sending:
            if process.publisher is None:
                process.publisher = PatientPublisher(adapters.broker.publisher())
            if not process.declared and not process.publisher.resting:  # what is sent to the app's own queue is to find it
                with suppress(Exception):  # the broker is away, so nothing is sent now
                    self.declare(_log_all)
            refused = Dispatcher(process.publisher, adapters.scheduler, self.settings.publish_timeout).dispatch([handling])
        if refused and not _relay_alive(adapters.scheduler):
            log("output.waiting", count=len(refused))
        return refused

    def configure(self) -> None:
        """Give handlers the options that the settings have for their message types. Done at first use.

        Raises:
            ConfigurationError: An option is unknown or invalid.
        """
        if self._configured:
            return
        for type, options in self.settings.messages.items():
            if (handler := self.handlers.get(type)) is None or handler.type != type:
                configured(Policy(), options, type)  # a misspelt option is refused, also if no handler takes the type
                continue
            changed = handler.with_options(options)
            for each in handler.types:
                del self.handlers[each]
            self._add(changed)
        self._configured = True

    @property
    def unhandled(self) -> list[str]:
        """Types that the settings have options for, and that no handler has as its present type."""
        return sorted(set(self.settings.messages) - {handler.type for handler in self.handlers.values()})

    def describe(self) -> dict[str, Any]:
        """Return the settings and the policy of each message type, without passwords.

        Example:
            >>> App("orders").describe()["settings"]["broker_url"]
            'sql://'
        """
        settings = self.settings.model_dump(exclude={"messages"})
        settings |= {name: _without_password(settings[name]) for name in ("database_url", "broker_url")}
        messages = [handler.describe() for type, handler in sorted(self.handlers.items()) if type == handler.type]
        return {"consumer": self.name, "settings": settings, "messages": messages, "unhandled": self.unhandled}

    def database(self) -> Database:
        """Return the database of the app, which is not checked, and which the caller closes."""
        from idemp.sql.engine import Database, engines

        return Database(engines(self.settings, self.engine)[0], self.settings.table_prefix)

    def adapters(self) -> Adapters:
        """Return the adapters of this process, opened and checked at first use.

        Raises:
            ConfigurationError: A start-up check has a red finding.
        """
        return self.process.open(self.open)

    def async_store(self) -> AsyncStore[Any]:
        """Return the store of `async def` handlers and of `async with`, opened at first use. It belongs to one event loop.

        Raises:
            ConfigurationError: A start-up check has a red finding, or the engine is not asynchronous.
        """
        process, adapters = self.process, self.adapters()
        with process.opening:
            if process.async_store is None:
                process.async_store = adapters.open_async()
            return process.async_store

    @property
    def is_async(self) -> bool:
        """Whether it has `async def` handlers, so that its worker runs an event loop."""
        return any(handler.is_async for handler in self.handlers.values())

    def declare(self, judge: Judge | None = None) -> None:
        """Declare the queue of the app and what it takes; a worker does so, and the first one to send. Done once.

        Args:
            judge: Is given the findings; by default `raise_red`.

        Raises:
            ConfigurationError: The queue cannot be used.
            Unavailable: The broker is away.
        """
        if self.handlers and not self.process.declared:
            (judge or raise_red)(self.adapters().broker.declare(self.name, sorted(self.handlers)))
        self.process.declared = True

    def receiver(self) -> Receiver:
        """Return a new receiver of the app's queue, with enough messages for the group that was sent, the present and the next one."""
        together = self.settings.concurrency if self.is_async else self.settings.group
        most = max(together, *(handler.batch for handler in self.handlers.values()), 1)
        return self.adapters().broker.receiver(self.name, 3 * most)

    async def aclose(self) -> None:
        """Close what `async with` has opened, and all that `close` does."""
        if self.process.async_store is not None:
            await self.process.async_store.close()
        self.process.async_store = None
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Forget the adapters; the next use opens new ones."""
        process = self.process
        if process.opened is not None:
            process.opened.close()
        process.opened = process.publisher = process.joined = None
        process.declared = False

    def test(
        self,
        *,
        tables: MetaData | None = None,
        database: str | None = None,
        broker: Callable[[], Broker] | None = None,
    ) -> AppTest:
        """Return the app on a database and a broker of its own, for tests: `with app.test() as test`.

        Args:
            tables: Tables of the handlers, which are created and, at the end, emptied or dropped.
            database: URL of a database for tests; by default a temporary SQLite file.
            broker: Makes a broker; by default one in memory, which takes all that is sent.

        Raises:
            ConfigurationError: The tables have rows: it is not a database for tests.
        """
        from idemp.testing.app import AppTest

        return AppTest(self, tables=tables, database=database, broker=broker)

    def open(self, broker: Broker | None = None, judge: Judge | None = None) -> Adapters:
        """Open adapters of a process, check them and register the handlers; the database alone is needed. `adapters` does it once.

        Args:
            broker: In place of the one that the settings name.
            judge: Is given the findings of the checks; by default `raise_red`.

        Raises:
            ConfigurationError: A start-up check has a red finding.
        """
        self.configure()
        judge = judge or raise_red
        judge(self._check_windows())
        adapters = open_adapters(self.settings, self.engine, judge)
        with ExitStack() as on_error:
            on_error.callback(adapters.close)
            adapters = adapters if broker is None else replace(adapters, broker=broker)
            for adapt in self.on_open:
                adapters = adapt(adapters)
            self.register(adapters.store)
            on_error.pop_all()
        return adapters

    def _check_windows(self) -> list[Finding]:
        """Compare the retention of claims with the time after which a message may come again by idemp's own doing."""
        findings = []
        for handler in dict.fromkeys(self.handlers.values()):
            horizon = ceil(handler.policy.retry.longest + AGAIN)
            if handler.identity is not None and handler.identity.retention < horizon:
                text = f"{handler.type} is kept for {handler.identity.retention:.0f} s, and may come again after {horizon} s"
                fix = f"IDEMP_MESSAGES={quote(json.dumps({handler.type: {'retention': horizon}}))}"
                findings.append(Finding("yellow", text, fix))
        return findings

    def register(self, store: Store[Any]) -> None:
        """Let a store know the handlers, and compare the identities of their messages with the stored ones.

        Raises:
            ConfigurationError: An identity was changed while former claims count.
        """
        self.configure()
        initiations = Identity(self.name, INITIATION, INITIATION_KEY, seconds(Idempotent.retention))
        identities = {handler.type: handler.identity for handler in self.handlers.values() if handler.identity}
        types = [*sorted(self.handlers), INITIATION]
        store.register(self.name, types, [initiations, *identities.values()], complete=bool(self.handlers))


def load_app(target: str) -> App:
    """Return the app that `module:name` names; the name is `app` where it is left out.

    Raises:
        ConfigurationError: There is no such module or app, or the module raises an error.

    Example:
        >>> load_app("idemp.nowhere")
        Traceback (most recent call last):
        idemp.errors.ConfigurationError: idemp.nowhere cannot be imported: ModuleNotFoundError: No module named 'idemp.nowhere'
    """
    module, _, name = target.partition(":")
    if not module or "/" in module or module.endswith(".py"):
        raise ConfigurationError(f"{target!r} names no module: write it as in shop.orders:app")
    if (here := os.getcwd()) not in sys.path:  # noqa: PTH109 - as an entry of the path
        sys.path.insert(0, here)
    try:
        app = getattr(importlib.import_module(module), name or "app", None)
    except (Exception, SystemExit) as error:
        where = "" if isinstance(error, SyntaxError) else describe_place(error, module.partition(".")[0])  # its text has both
        raise ConfigurationError(f"{module} cannot be imported: {describe_error(error)}{where}") from error
    if not isinstance(app, App):
        raise ConfigurationError(f"{module} has no app {name or 'app'!r}: name it as in shop.orders:app")
    return app


def _without_password(url: str) -> str:
    """Hide everything between scheme and host, and the query: an unescaped `@` would show a part of the password."""
    scheme, separator, rest = url.partition("://")
    if "@" not in rest:
        return url.partition("?")[0]
    return f"{scheme}{separator}***@{rest.rpartition('@')[2].partition('?')[0]}"


def _log_unrelayed(count: int) -> None:
    log("output.unrelayed", count=count)


def _log_all(findings: Sequence[Finding]) -> None:
    for finding in findings:
        log("check.warned", finding=str(finding))


def _relay_alive(scheduler: Scheduler) -> bool:
    try:
        return scheduler.relay_alive()
    except Exception:  # noqa: BLE001 - no error may escape after a COMMIT, and a relay that cannot be asked for does not count
        return False
