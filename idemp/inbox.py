"""The inbox around an existing consumer: no app, no worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from pydantic import BaseModel

from idemp.context import FINGERPRINT, AsyncContext, BaseContext, Context
from idemp.dispatcher import Dispatcher, Sent
from idemp.envelopes import read_delivery
from idemp.errors import (
    ConfigurationError,
    DispatchIncomplete,
    Unavailable,
    UnknownType,
    describe_error,
)
from idemp.events import log
from idemp.executor import Executor
from idemp.handlers import AnyMessage, Handler, Handlers, function_name
from idemp.handling import Handling
from idemp.joining import Caller, join
from idemp.messages import Delivery, Refusal, encode, type_name
from idemp.patient import PatientPublisher
from idemp.policy import Idempotent, Policy
from idemp.ports import Outlet, Publisher, Scheduler, Verdict
from idemp.process import Process
from idemp.settings import Settings

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
    from sqlalchemy.orm import Session

    from idemp.sql.aio import AsyncSqlStore
    from idemp.sql.engine import Database
    from idemp.sql.scheduler import SqlScheduler
    from idemp.sql.store import SqlStore
    from idemp.worker.relay_thread import RelayThread

__all__ = ["AsyncInbox", "Inbox", "Outcome"]

LONGEST_WAIT: Final = 3600.0  # seconds for which a claim may wait for another one
T = TypeVar("T")


@dataclass(frozen=True)
class Outcome:
    """The result of a wrapped handler. If it was returned, the caller may acknowledge the message.

    Attributes:
        verdict: `CLAIMED` if the handler ran, `DUPLICATE` if it had run before.
        outputs: Number of outputs that were sent.
        result: Bytes that the handler has put into `ctx.result`; for a duplicate, those of the first handling. None if there are
            none, or if they were erased.

    Example:
        >>> Outcome(Verdict.DUPLICATE, 0).verdict.value
        'duplicate'
    """

    verdict: Verdict
    outputs: int
    result: bytes | None = None


class Inbox:
    """Claims around handlers and transactions that exist already.

    Args:
        engine: SQLAlchemy engine of the database that the handlers change.
        settings: By default read from the environment.

    Attributes:
        engine: That of the argument.
        broker: Takes what the thread of `relay` sends; None for the one that the settings name.

    Example:
        >>> import tempfile
        >>> from sqlalchemy import create_engine
        >>> from idemp.sql.engine import Database
        >>> from idemp.sql.schema import upgrade
        >>> class TakePayment(BaseModel):
        ...     __message_type__ = "billing.TakePayment"
        ...     payment_id: int
        >>> folder = tempfile.TemporaryDirectory()
        >>> engine = create_engine(f"sqlite:///{folder.name}/shop.db")
        >>> upgrade(Database(engine))
        >>> def take_payment(message: TakePayment, ctx: Context) -> None:
        ...     print("payment", message.payment_id)
        >>> handle = Inbox(engine).wrap(
        ...     take_payment, message=TakePayment, consumer="billing", policy=Idempotent(key="payment_id")
        ... )
        >>> handle(b'{"payment_id": 7}').verdict, handle({"payment_id": 7}).verdict
        payment 7
        (<Verdict.CLAIMED: 'claimed'>, <Verdict.DUPLICATE: 'duplicate'>)
        >>> engine.dispose()
        >>> folder.cleanup()
    """

    def __init__(self, engine: Engine, *, settings: Settings | None = None, _async_engine: AsyncEngine | None = None) -> None:
        if hasattr(engine, "sync_engine") or not hasattr(engine, "dialect"):
            raise ConfigurationError(f"{engine!r} is not an Engine: an AsyncEngine is for AsyncInbox")
        self.engine, self._settings, self._async_engine = engine, settings or Settings(), _async_engine
        self._process: Process[tuple[SqlStore, SqlScheduler]] = Process(engine)
        self.broker: Outlet | None = None
        self._relay: RelayThread | None = None

    @property
    def has_broker(self) -> bool:
        """Whether a broker is named: by `broker`, or by the settings, whose default is the one in the database."""
        return self.broker is not None or "broker_url" in self._settings.model_fields_set

    def wrap(
        self,
        function: Callable[..., Any],
        *,
        message: type[BaseModel],
        consumer: str,
        policy: Policy | None = None,
        publisher: Publisher | None = None,
        type: str | None = None,
    ) -> Callable[..., Outcome]:
        """Return a function that handles one message: `handle(message, properties=None, *, redelivered=False)`.

        A message is JSON as bytes, a mapping, a model, or a kombu message. A model is compared with nothing, because its JSON text
        is not the producer's. `properties` are AMQP properties, such as `message_id`. If the broker says that a message is
        `redelivered`, outputs that a duplicate finds pending are sent at once; a kombu message brings its own flag.

        Args:
            function: Takes a message, and a context if it needs one.
            message: pydantic model of the messages.
            consumer: Scope of the inbox keys.
            policy: By default `Idempotent()`.
            publisher: Sends the outputs; without one, a relay does, at once if it is the one of `relay`.
            type: Type name; by default `__message_type__`, else package and class.

        Raises:
            ConfigurationError: The policy does not fit the model.
            IdempError: The returned function raises if the message must not be acknowledged:
                `InFlight`, `Conflict`, `Unreadable`, `DispatchIncomplete`, `Unavailable` while the database takes no work,
                and what the handler raises.
        """
        handler = self._configured(Handler(consumer, message, function, policy or Idempotent(), type=type))
        if handler.is_async:
            raise ConfigurationError(f"{function_name(function)} is async def: wrap it by an AsyncInbox")
        publisher = PatientPublisher(publisher) if publisher is not None else None

        def handle(message: Any, properties: Mapping[str, Any] | None = None, *, redelivered: bool = False) -> Outcome:
            delivery = _delivery(handler.consumer, handler.type, message, properties, redelivered=redelivered)
            handling, scheduler = self._execute(handler, delivery)
            return _outcome(scheduler, handling, self._dispatcher(scheduler, publisher).dispatch([handling]), self._relay)

        return handle

    @contextmanager
    def claim(
        self,
        session: Session,
        message: Any,
        *,
        consumer: str,
        type: str | None = None,
        policy: Idempotent | None = None,
        properties: Mapping[str, Any] | None = None,
        wait: float = 2.0,
        grace: float | None = None,
    ) -> Iterator[Context]:
        """Claim a message in a transaction of your own. Commit the session after the block; a relay sends the outputs.

        Commit after a duplicate, too, before you acknowledge it: its claim may not be on disk before that.
        If the block raises, or what it emitted cannot be stored, the session is rolled back.

        Args:
            session: Its transaction takes the claim and the outputs.
            message: JSON as bytes, a mapping, a model, or a kombu message.
            consumer: Scope of the inbox keys.
            type: Type name; by default the message's or the model's.
            policy: By default `Idempotent()`.
            properties: AMQP properties, such as `message_id`, where the message has none of its own.
            wait: Seconds to wait for another transaction that holds the id; on MariaDB and MySQL whole ones, rounded up.
            grace: Seconds for which relays leave the outputs to you, because you call `dispatch` after your COMMIT; 0 for a relay
                that may start later. By default a relay sends them at once, and has to be alive.

        Raises:
            InFlight: Another transaction has held the id for longer; the session was rolled back.
            Conflict: Another message was handled under the id.
            Unreadable: The message has no usable id.
            DispatchIncomplete: Outputs were emitted without `grace`, and no relay is alive.
            BlockEnded: The block has ended its transaction, or tried to commit it.
            BlockRolledBack: The block has caught a database error, after which nothing can be committed.
            ConfigurationError: The session commits each statement (AUTOCOMMIT).

        Example:
            >>> def pay(inbox: Inbox, session: "Session", body: bytes) -> None:
            ...     with inbox.claim(session, body, consumer="billing", type="billing.Pay", policy=Idempotent(key="id")) as unit:
            ...         if not unit.duplicate:
            ...             unit.send({"paid": True}, to="shop", type="billing.Paid")
            ...     session.commit()
        """
        with self._claim(session, Context, Caller(session), message, consumer, type, policy, properties, wait, grace) as unit:
            yield unit

    def prepare(self, *, consumer: str, type: str, policy: Idempotent | None = None) -> None:
        """Check the database, and register a name that `claim` will use, in a transaction of its own.

        `claim` does this, too, at its first use in a process. On SQLite, which has one writer, call it before your transaction.

        Args:
            consumer: Scope of the inbox keys.
            type: Type name.
            policy: By default `Idempotent()`.

        Raises:
            ConfigurationError: The tables are missing, or the policy is not the one of earlier claims.

        Example:
            >>> def start(inbox: Inbox) -> None:
            ...     inbox.prepare(consumer="billing", type="billing.Pay", policy=Idempotent(key="id"))
        """
        self._open(self._claiming(consumer, type, policy))

    def dispatch(self, unit: Context, publisher: Publisher) -> int:
        """Send the outputs of a block of `claim`, after your COMMIT. What is refused is left to a relay, and no error is raised.

        Outputs that are not committed, or that a relay has sent meanwhile, are not sent.

        Args:
            unit: Of the block, which had `grace`.
            publisher: Sends the outputs; of one thread at a time.

        Returns:
            The number of outputs that the broker has confirmed.

        Example:
            >>> def pay(inbox: Inbox, session: "Session", body: bytes, publisher: Publisher) -> None:
            ...     with inbox.claim(session, body, consumer="billing", type="billing.Pay", grace=15.0) as unit:
            ...         if not unit.duplicate:
            ...             unit.send({"paid": True}, to="shop", type="billing.Paid")
            ...     session.commit()
            ...     inbox.dispatch(unit, publisher)
        """
        if (handling := self._committed(unit)) is None:
            return 0
        dispatcher = self._dispatcher(self._open(None)[1], publisher)
        sent = self._send(dispatcher, handling)
        return len(sent.outputs) - len(dispatcher.record(sent))

    def _send(self, dispatcher: Dispatcher, handling: Handling) -> Sent:
        with self._process.sending:  # a publisher is used by one thread at a time
            return dispatcher.confirm(dispatcher.send([handling]))

    def _committed(self, unit: BaseContext) -> Handling | None:
        """Return the outputs of a block that are pending, as other transactions see them; None if that is unknown."""
        try:
            pending = self._open(None)[1].pending([output.id for output in unit.stored])
        except Exception as error:  # noqa: BLE001 - after COMMIT nothing may escape
            log("output.unrecorded", error=error)
            return None
        outputs = [output for output in unit.stored if output.id in pending]
        return Handling(Delivery(unit.consumer, {}, b""), claim=unit._claim, outputs=outputs)  # noqa: SLF001

    def relay(self, broker: Outlet | None = None, *, engine: Engine | None = None) -> RelayThread:
        """Return the relay of this inbox: a thread that sends what is stored, for processes without a worker of idemp.

        It starts with `start()`, or with the first `wake()`, which belongs after each of your COMMITs. What `wrap` has committed
        wakes it by itself.

        Args:
            broker: Takes the outputs; by default `self.broker`. Without it, a repeated call returns the same thread.
            engine: For the thread alone, at the first call; by default the inbox's.

        Raises:
            ConfigurationError: The inbox has a relay to another broker.

        Example:
            >>> def pay(inbox: Inbox, session: "Session", body: bytes) -> None:
            ...     with inbox.claim(session, body, consumer="billing", type="billing.Pay", grace=0) as unit:
            ...         unit.send({"paid": True}, to="shop", type="billing.Paid")
            ...     session.commit()
            ...     inbox.relay().wake()
        """
        from idemp.worker.relay_thread import RelayThread

        if self._relay is None:
            own = engine is not None or self._async_engine is not None
            inbox = Inbox(engine or _plain(self.engine), settings=self._settings) if own else self
            self._relay = RelayThread(lambda: inbox._open(None), self._settings, broker or self.broker, own=own)  # noqa: SLF001
        elif broker is not None and broker is not self._relay.broker:
            raise ConfigurationError("this inbox has a relay to another broker: call relay(broker) once, before relay()")
        return self._relay

    def _claiming(self, consumer: str, type: str, policy: Idempotent | None) -> Handler:
        return self._configured(Handler(consumer, AnyMessage, lambda _: None, policy or Idempotent(), type=type))

    @contextmanager
    def _claim(
        self,
        session: Session,
        kind: Callable[..., Any],
        tx: Any,
        message: Any,
        consumer: str,
        type: str | None,
        policy: Idempotent | None,
        properties: Mapping[str, Any] | None,
        wait: float,
        grace: float | None,
    ) -> Iterator[Any]:
        if not isinstance(wait, int | float) or not 0 < wait <= LONGEST_WAIT:
            raise ConfigurationError(
                f"wait={wait!r} has to be more than 0 and at most {LONGEST_WAIT:g} seconds; nothing was claimed"
            )
        usable = isinstance(grace, int | float) and not isinstance(grace, bool) and 0 <= grace <= LONGEST_WAIT
        if grace is not None and not usable:
            raise ConfigurationError(f"grace={grace!r} has to be 0 to {LONGEST_WAIT:g} seconds; nothing was claimed")
        name = type or (type_name(message.__class__) if isinstance(message, BaseModel) else None)
        delivery = read_delivery(_delivery(consumer, name, message, properties))
        name = delivery.properties.get("type")
        if not name:
            raise UnknownType("the message does not say its type: pass type='package.Name'")
        handler = self._claiming(consumer, name, policy)
        store, scheduler = self._open(handler, apart=session.in_transaction())
        _, claim = handler.accept(delivery)
        assert claim is not None
        rules: Any = {"wait": wait, "parks_late": handler.parks_late, "unrelayed": _refuse_to_wait, "grace": grace}
        with join(session, store, scheduler, kind, tx, claim, delivery.properties, **rules) as unit:
            yield unit

    def _execute(self, handler: Handler, delivery: Delivery) -> tuple[Handling, SqlScheduler]:
        try:
            store, scheduler = self._open(handler)
        except Exception as error:
            from idemp.sql.engine import dialect_of

            if dialect_of(self.engine).classify(error) is None and not isinstance(error, OSError):  # asyncpg's, unwrapped
                raise
            raise Unavailable(f"the database takes no work: {describe_error(error)}") from error
        executor = Executor(Handlers(dict.fromkeys(handler.types, handler)), store)
        if self._async_engine is not None:
            executor = executor.for_task(cast("AsyncSqlStore", store))
        handling = executor.accept(delivery)
        if handling.error is None:
            executor.execute([[handling]])
            executor.read_back([handling])
        return handling, scheduler

    def _dispatcher(self, scheduler: Scheduler, publisher: Publisher | None) -> Dispatcher:
        return Dispatcher(publisher, scheduler, self._settings.publish_timeout)

    def _configured(self, handler: Handler) -> Handler:
        options = self._settings.messages.get(handler.type)
        return handler.with_options(options) if options else handler

    def _open(self, handler: Handler | None, *, apart: bool = False) -> tuple[SqlStore, SqlScheduler]:
        """Open the adapters at first use in a process, and register a handler once.

        Args:
            handler: Its names are registered; None registers nothing.
            apart: Whether to connect by a pool of its own, because the caller holds a connection of the engine's.
        """
        from idemp.sql.store import SqlStore

        process = self._process
        if process.opened is None:  # no lock: another task may be here while this one waits for the database
            from idemp.sql.checks import check_database
            from idemp.sql.engine import Database, worker_name
            from idemp.sql.scheduler import SqlScheduler

            database, worker = Database(self.engine, self._settings.table_prefix, fast=self._settings.fast_path), worker_name()
            with database.apart() if apart else nullcontext(database) as own:
                if red := [str(finding) for finding in check_database(own) if finding.level == "red"]:
                    raise ConfigurationError("; ".join(red))
                database.tables = own.tables
            adapters = self._store(database, worker), SqlScheduler(database, worker, self._settings.lease)
            process.opened = process.opened or adapters
        store, scheduler = process.opened
        if handler is None:
            return store, scheduler
        known = (handler.consumer, handler.type, handler.identity)
        if known not in process.registered:
            identities = [handler.identity] if handler.identity else []
            with store.database.apart() if apart else nullcontext() as own:
                (store if own is None else SqlStore(own, store.worker)).register(handler.consumer, handler.types, identities)
            process.registered.add(known)
        return store, scheduler

    def _store(self, database: Database, worker: str) -> SqlStore:
        if self._async_engine is None:
            from idemp.sql.store import SqlStore

            return SqlStore(database, worker)
        from idemp.sql.aio import AsyncSqlStore

        store = AsyncSqlStore(self._async_engine, database, worker)
        store.check()
        return store


class AsyncInbox:
    """Claims around `async def` handlers and transactions of an `AsyncSession`.

    Args:
        engine: SQLAlchemy engine of the database that the handlers change. Its connections belong to one event loop.
        settings: By default read from the environment.

    Example:
        >>> async def consume(inbox: AsyncInbox, bodies: list[bytes]) -> None:
        ...     handle = inbox.wrap(
        ...         take_payment, message=TakePayment, consumer="billing", policy=Idempotent(key="payment_id")
        ...     )
        ...     for body in bodies:
        ...         await handle(body)
    """

    def __init__(self, engine: AsyncEngine, *, settings: Settings | None = None) -> None:
        if not hasattr(engine, "sync_engine"):
            raise ConfigurationError(f"{engine!r} is not an AsyncEngine: an Engine is for Inbox")
        self.engine, self._inbox = engine, Inbox(engine.sync_engine, settings=settings, _async_engine=engine)

    @property
    def broker(self) -> Outlet | None:
        """What the thread of `relay` sends to; None for the broker that the settings name."""
        return self._inbox.broker

    @broker.setter
    def broker(self, broker: Outlet | None) -> None:
        self._inbox.broker = broker

    @property
    def has_broker(self) -> bool:
        """Whether a broker is named; see `Inbox.has_broker`."""
        return self._inbox.has_broker

    def wrap(
        self,
        function: Callable[..., Any],
        *,
        message: type[BaseModel],
        consumer: str,
        policy: Policy | None = None,
        publisher: Publisher | None = None,
        type: str | None = None,
    ) -> Callable[..., Awaitable[Outcome]]:
        """Return a function that handles one message: `await handle(message, properties=None, *, redelivered=False)`.

        See `Inbox.wrap`.

        It may be awaited by many tasks at once. A task that is cancelled before COMMIT rolls back.

        Args:
            function: `async def`; takes a message, and a context if it needs one.
            message: pydantic model of the messages.
            consumer: Scope of the inbox keys.
            policy: By default `Idempotent()`.
            publisher: Sends the outputs, in a thread; without one, a relay does.
            type: Type name; by default `__message_type__`, else package and class.

        Raises:
            ConfigurationError: The policy does not fit the model, or the function is not asynchronous.
            IdempError: The returned function raises if the message must not be acknowledged.
        """
        inbox = self._inbox
        handler = inbox._configured(Handler(consumer, message, function, policy or Idempotent(), type=type))  # noqa: SLF001
        if not handler.is_async:
            raise ConfigurationError(f"{function_name(function)} is a plain function: wrap it by an Inbox")
        publisher = PatientPublisher(publisher) if publisher is not None else None

        async def handle(message: Any, properties: Mapping[str, Any] | None = None, *, redelivered: bool = False) -> Outcome:
            delivery = _delivery(handler.consumer, handler.type, message, properties, redelivered=redelivered)
            await self._wait_for_first(handler)
            handling, scheduler = await self._run(inbox._execute, handler, delivery)  # noqa: SLF001
            dispatcher = inbox._dispatcher(scheduler, publisher)  # noqa: SLF001
            if publisher is None or not handling.outputs:
                sent = dispatcher.confirm(dispatcher.send([handling]))
            else:
                sent = await asyncio.to_thread(inbox._send, dispatcher, handling)  # noqa: SLF001
            return await self._run(lambda: _outcome(scheduler, handling, dispatcher.record(sent), inbox._relay))  # noqa: SLF001

        return handle

    @asynccontextmanager
    async def claim(
        self,
        session: AsyncSession,
        message: Any,
        *,
        consumer: str,
        type: str | None = None,
        policy: Idempotent | None = None,
        properties: Mapping[str, Any] | None = None,
        wait: float = 2.0,
        grace: float | None = None,
    ) -> AsyncIterator[AsyncContext]:
        """Claim a message in a transaction of your own. Commit the session after the block; see `Inbox.claim`.

        Args:
            session: Its transaction takes the claim and the outputs.
            message: JSON as bytes, a mapping, a model, or a kombu message.
            consumer: Scope of the inbox keys.
            type: Type name; by default the message's or the model's.
            policy: By default `Idempotent()`.
            properties: AMQP properties, such as `message_id`, where the message has none of its own.
            wait: Seconds to wait for another transaction that holds the id; on MariaDB and MySQL whole ones, rounded up.
            grace: Seconds for which relays leave the outputs to you, because you call `dispatch` after your COMMIT; 0 for a relay
                that may start later. By default a relay sends them at once, and has to be alive.

        Raises:
            InFlight: Another transaction has held the id for longer; the session was rolled back.
            Conflict: Another message was handled under the id.
            Unreadable: The message has no usable id.
            DispatchIncomplete: Outputs were emitted without `grace`, and no relay is alive.
            BlockEnded: The block has ended its transaction, or tried to commit it.
            BlockRolledBack: The block has caught a database error, after which nothing can be committed.

        Example:
            >>> async def pay(inbox: AsyncInbox, session: "AsyncSession", body: bytes) -> None:
            ...     async with inbox.claim(session, body, consumer="billing", type="billing.Pay") as unit:
            ...         if not unit.duplicate:
            ...             unit.send({"paid": True}, to="shop", type="billing.Paid")
            ...     await session.commit()
        """
        from idemp.sql.aio import AsyncCaller

        if not session.in_transaction():  # whose connection the first task may need
            await self._wait_for_first(None)
        tx = AsyncCaller(session)
        block = self._inbox._claim(  # noqa: SLF001
            session.sync_session, AsyncContext, tx, message, consumer, type, policy, properties, wait, grace
        )
        unit: AsyncContext = await self._run(block.__enter__)
        try:
            yield unit
        except BaseException as error:
            await self._run(block.__exit__, error.__class__, error, error.__traceback__)
            raise
        await self._run(block.__exit__, None, None, None)

    async def prepare(self, *, consumer: str, type: str, policy: Idempotent | None = None) -> None:
        """Check the database, and register a name that `claim` will use; see `Inbox.prepare`.

        Raises:
            ConfigurationError: The tables are missing, or the policy is not the one of earlier claims.
        """
        await self._run(self._inbox._open, self._inbox._claiming(consumer, type, policy))  # noqa: SLF001

    async def dispatch(self, unit: AsyncContext, publisher: Publisher) -> int:
        """Send the outputs of a block of `claim`, after your COMMIT; see `Inbox.dispatch`. The publisher is used in a thread.

        Returns:
            The number of outputs that the broker has confirmed.
        """
        inbox = self._inbox
        if (handling := await self._run(inbox._committed, unit)) is None:  # noqa: SLF001
            return 0
        dispatcher = inbox._dispatcher(inbox._open(None)[1], publisher)  # noqa: SLF001 - opened by `claim`
        sent = await asyncio.to_thread(self._inbox._send, dispatcher, handling)  # noqa: SLF001
        return len(sent.outputs) - len(await self._run(dispatcher.record, sent))

    def relay(self, broker: Outlet | None = None, *, engine: Engine | None = None) -> RelayThread:
        """Return the relay of this inbox; see `Inbox.relay`.

        The thread has an engine of its own, because it has no event loop. By default it is made from the URL alone: if yours needs
        more, such as `connect_args` or `async_creator`, call `relay(engine=…)` once before all others, with a plain engine.

        Call `wake` by `await asyncio.to_thread(relay.wake)`, because its first call in a process connects.

        Raises:
            ConfigurationError: The inbox has a relay to another broker, or there is no plain driver for the URL.
        """
        return self._inbox.relay(broker, engine=engine)

    async def _wait_for_first(self, handler: Handler | None) -> None:
        """Wait for the first task to open the adapters: if all did so, each would need a connection of the pool for that.

        If that fails, each task tries, and raises an error of its own.
        """
        process = self._inbox._process  # noqa: SLF001
        if process.opened is None:
            if process.first is None or process.first.done():
                process.first = asyncio.create_task(self._run(self._inbox._open, handler))  # noqa: SLF001
                process.first.add_done_callback(lambda first: first.cancelled() or first.exception())
            await asyncio.wait([process.first])

    async def _run(self, function: Callable[..., T], *arguments: Any) -> T:
        from idemp.sql.aio import run_on

        return await run_on(self.engine, function, *arguments)


def _plain(engine: Engine) -> Engine:
    """Return an engine for a thread, which has no event loop, by the URL of an asynchronous one."""
    from idemp.sql.engine import Database

    return Database(engine.url.render_as_string(hide_password=False)).engine


def _refuse_to_wait(count: int) -> None:
    raise DispatchIncomplete(
        f"{count} outputs would wait for a relay, and none is alive, so the transaction was rolled back: start one (idemp worker)"
    )


def _outcome(scheduler: Scheduler, handling: Handling, refused: Mapping[str, Refusal], relay: RelayThread | None) -> Outcome:
    """Return the result of a handling; raise if the message must not be acknowledged."""
    if handling.held:
        raise Unavailable(f"the database takes no work: {handling.obstacle}") from handling.error
    if handling.error is not None:
        raise handling.error
    assert handling.verdict is not None
    unsent = [output for output in handling.outputs if not output.sendable or output.id in refused]
    if unsent:
        if relay is not None:
            relay.wake()
        text = f"the message was handled and committed; {len(unsent)} of its outputs wait for a relay"
        try:
            alive = scheduler.relay_alive()
        except Exception as error:
            unknown = f"it could not be asked whether one is alive ({describe_error(error)}): deliver the message again"
            raise DispatchIncomplete(f"{text}, and {unknown}") from error
        if not alive:
            raise DispatchIncomplete(f"{text}, and none is alive: start one (idemp worker), and deliver the message again")
    return Outcome(handling.verdict, len(handling.outputs) - len(unsent), handling.result)


def _delivery(
    consumer: str, type: str | None, message: Any, properties: Mapping[str, Any] | None, *, redelivered: bool = False
) -> Delivery:
    """Return what was passed to a wrapped handler as a delivery."""
    given: dict[str, Any] = {"type": type} if type else {}
    if isinstance(message, BaseModel):
        body = encode(message)
        given["headers"] = {FINGERPRINT: "none"}
    elif isinstance(message, Mapping):
        body = encode(message)
    elif hasattr(message, "delivery_info"):  # kombu's
        body, redelivered = message.body, redelivered or bool((message.delivery_info or {}).get("redelivered"))
        headers = {name: value for name, value in (message.headers or {}).items() if name != "compression"}  # undone by kombu
        theirs = {**(message.properties or {}), "headers": headers}
        theirs |= {"content_type": message.content_type, "content_encoding": message.content_encoding}
        given |= {name: value for name, value in theirs.items() if value is not None}
    else:
        body = message
    if isinstance(body, str):
        body = body.encode()
    if not isinstance(body, bytes | bytearray | memoryview):
        raise TypeError(f"a message is bytes, a mapping, a model or a kombu message, not {message.__class__.__name__}")
    if properties:
        marks = given.get("headers") if isinstance(message, BaseModel) else None
        given |= properties
        if marks and isinstance(headers := given.get("headers") or {}, Mapping):
            given["headers"] = {**headers, **marks}
    if isinstance(stamp := given.get("timestamp"), datetime):  # as aio-pika has it
        given["timestamp"] = (stamp if stamp.tzinfo else stamp.replace(tzinfo=UTC)).timestamp()
    return Delivery(consumer, given, bytes(body), redelivered)
