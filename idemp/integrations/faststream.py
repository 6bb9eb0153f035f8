"""FastStream: the changes of a subscriber and everything that it publishes are committed together, once for each message id."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from hashlib import sha256
from types import SimpleNamespace
from typing import Annotated, Any, Final, TypeVar

from idemp.context import FOREIGN, AsyncContext
from idemp.errors import ConfigurationError, Unreadable, UnusableOutput, needs
from idemp.events import log
from idemp.inbox import AsyncInbox
from idemp.integrations._capture import captured_into, capturing
from idemp.integrations._settling import Fate, fate
from idemp.policy import Duration, Idempotent

with needs("faststream"):
    from aio_pika import Message
    from faststream import AckPolicy, BaseMiddleware, Context, StreamMessage
    from faststream.exceptions import AckMessage, IgnoredException
    from faststream.rabbit import RabbitBroker
    from faststream.rabbit.parser import AioPikaParser
    from faststream.rabbit.response import RabbitPublishCommand
    from sqlalchemy import exc
    from sqlalchemy.ext.asyncio import AsyncSession

    from idemp.brokers.rabbitmq.broker import RabbitBroker as RabbitOutlet

__all__ = ["IdempotentSubscribers", "Session", "install"]

DLX: Final = "x-dead-letter-exchange"
OUTAGE: Final = (exc.InterfaceError, exc.OperationalError, exc.TimeoutError)  # what was committed is open: a redelivery finds out
HOLDING: Final = 60.0  # seconds for which a message is kept that has to wait
PAUSE: Final = 1.0  # seconds before a message is claimed again, or goes back to its queue, which delivers it at once
F = TypeVar("F", bound=Callable[..., Any])
Key = Callable[[StreamMessage[Any]], Any]

Session = Annotated[AsyncSession, Context("idemp_session")]
"""Type of an argument of a subscriber that is the session of its claim: a commit or a rollback by it makes the message fail."""


class IdempotentSubscribers:
    """The idempotent subscribers of a broker; a call returns the decorator of one. `install` makes it.

    Example:
        >>> IdempotentSubscribers.__name__
        'IdempotentSubscribers'
    """

    def __init__(self, broker: Any, inbox: AsyncInbox, consumer: str) -> None:
        self.broker, self.inbox, self.consumer = broker, inbox, consumer
        self._rules, self._prepared, self.relaying = dict[Any, tuple[str, Key | None, Idempotent]](), 0, False
        self.outlet = inbox.broker = RabbitOutlet(broker._connection_kwargs["url"])  # noqa: SLF001
        self._start, self._stop, broker.start, broker.stop = broker.start, broker.stop, self._start_all, self._stop_all
        broker.add_middleware(type("Installed", (_Middleware,), {"owner": self}))

    def __call__(self, name: str, *, key: Key | None = None, retention: Duration = "7d") -> Callable[[F], F]:
        """Return a decorator, which belongs below `@broker.subscriber(…)` and above an `async def`.

        Args:
            name: Type name, stored for good; each function has its own.
            key: Function that returns the id of a message, text or an integer; by default the `message_id` of AMQP.
            retention: How long duplicates are recognized.

        Raises:
            ConfigurationError: By the decorator, if the name is taken, or the function is not asynchronous.
        """

        def mark(function: F) -> F:
            if not inspect.iscoroutinefunction(function):
                raise ConfigurationError(f"{name} belongs on an async def, below @broker.subscriber and @broker.publisher")
            if function in self._rules or name in [taken for taken, *_ in self._rules.values()]:
                raise ConfigurationError(f"{name}: each function has one name of its own, by which its messages are claimed")
            self._rules[function] = name, key, Idempotent(key="id", retention=retention)
            return function

        return mark

    async def _start_all(self) -> None:
        await self.prepare()
        await asyncio.to_thread(self.inbox.relay().start)
        self.relaying = True
        await self._start()

    async def _stop_all(self, *error: Any) -> None:
        await self._stop(*error)
        self.relaying = False
        await asyncio.to_thread(self.inbox.relay().stop)  # which sends what the last subscribers have committed

    def rule(self, function: Any) -> Any:
        """Return the rule of a subscriber, which other decorators may have wrapped; None if it is not idempotent."""
        return self._rules.get(inspect.unwrap(function, stop=self._rules.__contains__))

    async def prepare(self) -> None:
        """Check the subscribers and register their names: at the start, or with the first message of one that was added later.

        Raises:
            ConfigurationError: A setting may lose messages, or the tables are missing.
        """
        if self._prepared != (count := len(self.broker.subscribers)):
            if found := [*self._faults()]:
                raise ConfigurationError("; ".join(found))
            for name, _, policy in self._rules.values():
                await self.inbox.prepare(consumer=self.consumer, type=name, policy=policy)
            self._prepared = count

    def _faults(self) -> Iterator[str]:
        """Yield what may lose messages or keep them waiting, with what to change."""
        taken, pool = dict[Any, int](), self.inbox.engine.pool
        for it in self.broker.subscribers:
            for name, *_ in {rule for call in it.calls if (rule := self.rule(call.handler._original_call))}:  # noqa: SLF001
                if it.ack_policy not in (AckPolicy.NACK_ON_ERROR, DLX in it.queue.arguments and AckPolicy.REJECT_ON_ERROR):
                    yield f"{name} may lose messages by {it.ack_policy}: set AckPolicy.NACK_ON_ERROR, or reject into {DLX}"
                if it.queue.arguments["x-queue-type"] == "stream":
                    yield f"{name} reads a stream, which takes nothing back: use a classic or a quorum queue"
                if not (prefetch := getattr(it.channel, "prefetch_count", None)):
                    yield f"{name} takes any number of messages at once: set channel=Channel(prefetch_count=10)"
                taken[it] = prefetch or 0
        if 0 <= getattr(pool, "_max_overflow", -1) < sum(taken.values()) - getattr(pool, "size", int)():
            yield f"prefetch_count is {sum(taken.values())} in all, the engine has fewer connections: set its pool_size to that"

    @asynccontextmanager
    async def transaction(self, message: Any, name: str, key: Key | None, policy: Idempotent) -> AsyncIterator[AsyncContext]:
        """Claim a message, capture what is published, and commit."""
        try:
            id = key(message) if key else message.raw_message.message_id  # FastStream's own would be random for a missing one
        except Exception as error:
            raise Unreadable(f"{name}: key= failed, so the message was not claimed: {error!r}") from error
        if not isinstance(id, str | int) or id == "":
            raise Unreadable(f"{name}: the message was not claimed, because its id is {id!r}: publish it with one, or set key=")
        claimed = {"id": id, "body": sha256(message.body).hexdigest()}
        place: Any = {"consumer": self.consumer, "type": name, "policy": policy, "grace": 0.0}
        session = AsyncSession(self.inbox.engine, close_resets_only=False)  # what is closed stays so
        async with session as made, made.begin(), self.inbox.claim(made, claimed, **place) as unit:
            with capturing(unit, self.outlet):
                yield unit

    async def record(self, unit: AsyncContext, command: Any) -> None:
        """Store what FastStream would publish, as other middleware has left it."""
        if not isinstance(command, RabbitPublishCommand):
            raise UnusableOutput("a subscriber of RabbitMQ cannot publish to another broker: nothing was committed")
        config = self.broker.config
        options: Any = {"serializer": config.fd_config._serializer, "codec": config.broker_codec, "headers": command.headers}  # noqa: SLF001
        options |= {"correlation_id": command.correlation_id, "reply_to": command.reply_to or None, **command.message_options}
        made = await AioPikaParser.encode_message(command.body, **options)
        kept = {name: getattr(made, name, None) for name in FOREIGN} | {"expiration": made.properties.expiration}
        kept |= {"headers": dict(made.headers), "message_id": made.message_id or config.id_generator()}
        kept["timestamp"] = made.timestamp and made.timestamp.timestamp()
        mandatory, exchange = command.publish_options["mandatory"], command.exchange.name
        # FastStream sends None as no body, which cannot be stored.
        unit.forward(made.body or b"null", kept, to=command.destination, exchange=exchange, mandatory=mandatory)

    async def deliver(self, unit: AsyncContext) -> Any:
        """Let the relay send what is committed. A test broker has none, and runs the next subscribers at once."""
        if self.relaying:
            return await asyncio.to_thread(self.inbox.relay().wake) if unit.stored else None
        for it in unit.stored:
            await self.broker.publish(Message(it.body, **it.properties | {"expiration": None}), it.routing_key, it.exchange)
        return await self.inbox.dispatch(unit, SimpleNamespace(send=len, publish=lambda outputs, _: [None] * len(outputs)))


class _Middleware(BaseMiddleware):
    """One delivery of a message; or, without a message, one call of `publish`."""

    owner: IdempotentSubscribers
    unit: AsyncContext | None = None
    error: BaseException | None = None  # of the subscriber

    async def consume_scope(self, call_next: Any, message: Any) -> Any:
        """Claim the message, then run the subscriber; a duplicate does not run it.

        A message that has to wait is kept for a while: its queue would deliver it again at once.
        """
        if not (rule := self.owner.rule(getattr(getattr(_innermost(call_next), "__self__", None), "_original_call", install))):
            return await call_next(message)
        self.message, self.error, until = message, None, time.monotonic() + HOLDING
        while self.unit is None:
            self.block = self.owner.transaction(message, *rule)
            try:
                await self.owner.prepare()
                self.unit = await self.block.__aenter__()
            except Exception as error:  # noqa: BLE001
                await self._fail(error, until)
        try:
            with self.context.scope("idemp_session", self.unit.session):
                return None if self.unit.duplicate else await call_next(message)
        except AckMessage:
            raise
        except BaseException as error:  # other middleware may call again, or count it as handled: then nothing of it stays
            self.unit, self.error = None, error
            with suppress(type(error)):
                await self.block.__aexit__(type(error), error, error.__traceback__)
            raise

    async def publish_scope(self, call_next: Any, command: Any) -> Any:
        """Store what a subscriber publishes, returns or replies; a duplicate has stored it. Requests pass."""
        unit: Any = captured_into(self.owner.outlet) if self.msg is None else self.unit
        if unit is None or _innermost(call_next).__name__ == "request":
            return await call_next(command)
        return None if unit.duplicate else await _ending(call_next, partial(self.owner.record, unit))(command)

    async def after_processed(self, exc_type: Any = None, exc_val: Any = None, exc_tb: Any = None) -> None:
        """Commit, so that FastStream acknowledges behind it; or roll back."""
        if self.unit is None:
            return await self._fail(exc_val) if isinstance(exc_val, Exception) and exc_val is self.error else None
        error = None if isinstance(exc_val, AckMessage) else exc_val
        try:
            await self.block.__aexit__(error and exc_type, error, error and exc_tb)
            if error is not None:
                raise error
            await self.owner.deliver(self.unit)
        except Exception as raised:  # noqa: BLE001 - also of COMMIT
            await self._fail(raised)

    async def _fail(self, error: Exception, until: float = 0.0) -> None:
        """Wait, if the message is to be claimed again; else settle it, unless its ack policy does, and raise the error."""
        if error is self.error:  # of the subscriber, whose connection may be gone
            outage = bool(getattr(error, "connection_invalidated", False))
        else:
            outage = fate(error) is Fate.HOLD or isinstance(error, OUTAGE if self.unit else (*OUTAGE, OSError))
        if outage and self.owner.relaying and time.monotonic() < until:
            log("wrapped.paused", id=self.message.message_id, error=error)
            return await asyncio.sleep(PAUSE)
        if fate(error) is Fate.DEAD and DLX in self.context.get_local("handler_").queue.arguments:
            await self.message.reject()
        elif self.owner.relaying and not isinstance(error, IgnoredException):
            await asyncio.sleep(PAUSE)
        if outage:
            await self.message.nack()  # FastStream settles nothing twice
        raise error


def _innermost(call: Any) -> Any:
    return _innermost(call.args[0]) if isinstance(call, partial) else call


def _ending(call: Any, end: Any) -> Any:
    """Return the calls of the middleware that comes behind, which ends in this function instead of the client's."""
    return partial(call.func, _ending(call.args[0], end)) if isinstance(call, partial) else end


def install(broker: RabbitBroker, inbox: AsyncInbox, *, consumer: str) -> IdempotentSubscribers:
    """Return the decorator of the idempotent subscribers of a broker: `@idempotent(name, key=None, retention="7d")`.

    A broker whose settings may lose messages does not start: a `ConfigurationError` names what to change.
    Its start registers the names and starts a relay, which its stop ends.

    Args:
        broker: With its other middleware.
        inbox: On the database that the subscribers change; of this broker alone.
        consumer: Scope of the inbox keys.

    Raises:
        ConfigurationError: Another broker was installed on the inbox, or the kind of the broker is not supported.

    Example:
        >>> from faststream.rabbit import Channel
        >>> from sqlalchemy.ext.asyncio import create_async_engine
        >>> broker = RabbitBroker("amqp://localhost")
        >>> idempotent = install(broker, AsyncInbox(create_async_engine("sqlite+aiosqlite:///shop.db")), consumer="shop")
        >>> @broker.subscriber("orders", ack_policy=AckPolicy.NACK_ON_ERROR, channel=Channel(prefetch_count=10))
        ... @idempotent("shop.Pay", retention="30d")
        ... async def pay(order_id: int, session: Session) -> None:
        ...     await session.execute(...)
    """
    if not isinstance(broker, RabbitBroker):
        raise ConfigurationError(f"{type(broker).__name__} is not supported, as outputs are sent by AMQP: use a RabbitBroker")
    if inbox.broker is not None:
        raise ConfigurationError("this inbox has a broker: give each one an inbox and tables of its own (IDEMP_TABLE_PREFIX)")
    return IdempotentSubscribers(broker, inbox, consumer)
