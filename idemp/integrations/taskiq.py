"""taskiq: the changes of a task, its result and everything that it sends are committed together, once for each task id."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextvars import ContextVar
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import make_url

from idemp.context import AsyncContext
from idemp.errors import ConfigurationError, describe_error, needs
from idemp.events import log
from idemp.handlers import AnyMessage
from idemp.inbox import AsyncInbox
from idemp.integrations._calls import Call, Sender, check_call
from idemp.integrations._capture import current
from idemp.integrations._settling import FIRST_PAUSE, LONGEST_PAUSE
from idemp.messages import Output, Refusal
from idemp.policy import Duration, Idempotent

with needs("taskiq"):
    from taskiq import AckableMessage, AsyncBroker, BrokerMessage, InMemoryBroker, TaskiqMessage, TaskiqMiddleware
    from taskiq.serializers import JSONSerializer
    from taskiq.utils import maybe_awaitable
    from taskiq_dependencies.dependency import Dependency

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession

__all__ = ["Idempotency", "install", "session"]

BROKERS: Final = {"AioPikaBroker", "InMemoryBroker"}
OWN: Final = {"IncorrectRoutingKeyError", "PublishError", "UnknownTaskError"}  # errors of one output
EARLY: Final = {"when_received", "manual"}  # types of acknowledgement
RUNNING: Final[ContextVar[_Delivery | None]] = ContextVar("idemp_taskiq_delivery", default=None)


def session() -> AsyncSession:
    """Return the SQLAlchemy session of the running task's claim. It flushes, and refuses to commit, roll back or close.

    A task that an idempotent one awaits directly, as a function, has the session of that one.

    Raises:
        ConfigurationError: No idempotent task is running here.

    Example:
        >>> session()
        Traceback (most recent call last):
        idemp.errors.ConfigurationError: no idempotent task is running here: use .kiq(…), and a worker runs it
    """
    if not isinstance(unit := current(), AsyncContext):
        raise ConfigurationError("no idempotent task is running here: use .kiq(…), and a worker runs it")
    return unit.session


class _Delivery:
    """A message in the hands of a worker, with its arguments as they were sent."""

    def __init__(self, function: Any, message: TaskiqMessage) -> None:
        self.function, self.id, self.args, self.kwargs = function, message.task_id, [*message.args], {**message.kwargs}
        self.settled = not hasattr(function, "idempotent")
        timeout = None if self.settled else message.labels.pop("timeout", None)  # which taskiq would count from now on
        self.timeout = None if timeout is None else float(timeout)
        self.work: Any = None


class Idempotency(Sender, TaskiqMiddleware):
    """A middleware that captures what idempotent tasks send, and decorates them. `install` makes it.

    It is the broker of the inbox, too: taskiq's own `kick` sends what is stored, in the event loop of the worker.

    Example:
        >>> from sqlalchemy.ext.asyncio import create_async_engine
        >>> Idempotency(InMemoryBroker(), AsyncInbox(create_async_engine("sqlite+aiosqlite:///shop.db"))).identity
        'taskiq:InMemoryBroker'
    """

    def __init__(self, broker: AsyncBroker, inbox: AsyncInbox) -> None:
        super().__init__()
        self._inbox, self._kick, self._listen = inbox, broker.kick, broker.listen
        self.broker: Any = broker

    def __call__(self, name: str, *, key: str | None = None, retention: Duration = "7d") -> Callable[[Any], Any]:
        """Mark an `async def` function as idempotent, below `@broker.task`.

        Args:
            name: Name of its claims, which is stored: it outlives a renamed function.
            key: Argument that identifies the work; by default the task id does.
            retention: How long duplicates are recognized.

        Raises:
            ConfigurationError: The function is not `async def`, or has no such argument, or the retention is no duration.
        """

        async def handle(_: Any, ctx: AsyncContext) -> None:
            await RUNNING.get().work(ctx)  # type: ignore[union-attr]

        options: dict[str, Any] = {"message": AnyMessage, "consumer": "taskiq", "publisher": self}
        settle = self._inbox.wrap(handle, type=name, policy=Idempotent(key="id", retention=retention), **options)

        def mark(function: Callable[..., Any]) -> Callable[..., Any]:
            check_call(function, key, is_async=True)

            @wraps(function)
            async def run(*args: Any, **kwargs: Any) -> Any:
                delivery = RUNNING.get()
                if delivery is None or delivery.function is not run or current(self):
                    return await function(*args, **kwargs)  # called as a function
                call = Call(delivery.id, function, delivery.args, delivery.kwargs, key, Dependency)

                async def work(ctx: AsyncContext) -> None:
                    with call.body(ctx, self):
                        async with asyncio.timeout(delivery.timeout):
                            call.store(ctx, await function(*args, **kwargs))

                delivery.work, pause = work, FIRST_PAUSE
                while True:
                    try:
                        value = call.read((await settle(call.claimed, redelivered=pause > FIRST_PAUSE)).result)
                    except Exception as error:
                        if not call.waits(error):
                            delivery.settled = True
                            raise
                        log("wrapped.paused", id=delivery.id, error=error)
                        await asyncio.sleep(pause)
                        pause = min(2 * pause, LONGEST_PAUSE)
                    else:
                        delivery.settled = True
                        return value

            run.idempotent = True  # type: ignore[attr-defined]
            return run

        return mark

    def pre_execute(self, message: TaskiqMessage) -> TaskiqMessage:
        """Remember the message, in the context of the asyncio task that runs it."""
        task = self.broker.find_task(message.task_name)
        RUNNING.set(_Delivery(task.original_func, message))
        return message

    async def listen(self) -> AsyncIterator[Any]:
        """Yield the messages of the broker, whose acknowledgement checks that the task was committed."""
        async for each in self._listen():
            yield AckableMessage(data=each.data, ack=partial(self._ack, each.ack)) if isinstance(each, AckableMessage) else each

    async def _ack(self, ack: Callable[[], Any]) -> None:
        delivery = RUNNING.get()
        if delivery and not delivery.settled:
            raise ConfigurationError(f"{delivery.id} was not acknowledged before its COMMIT: use --ack-type when_saved")
        await maybe_awaitable(ack())

    async def kick(self, message: BrokerMessage) -> None:
        """Store a message that an idempotent task sends; send any other one."""
        if unit := current(self):
            unit.forward(message.message, {"message_id": message.task_id}, to="taskiq")
        else:
            await self._kick(message)

    @property
    def identity(self) -> str:
        """Text that is stored with the tables: server and virtual host; no password."""
        if not hasattr(self.broker, "url"):
            return f"taskiq:{type(self.broker).__name__}"
        url = make_url(self.broker.url or "amqp://localhost")
        return f"taskiq:{url.host}:{url.port or 5672}/{url.database or ''}"

    def publish(self, outputs: Sequence[Output], timeout: float) -> Sequence[Refusal | None]:
        """Send each output in the event loop of the worker, and wait for it."""
        deadline, answers = time.monotonic() + timeout, list[Refusal | None]()
        for each in outputs:
            sent = asyncio.run_coroutine_threadsafe(self._send(each.body), self._loop)
            try:
                sent.result(max(deadline - time.monotonic(), 0.1))
                answers.append(None)
            except Exception as error:
                sent.cancel()
                if not isinstance(error, TypeError | ValueError) and type(error).__name__ not in OWN:
                    raise
                answers.append(Refusal(describe_error(error), own=True))
        return answers

    async def _send(self, body: bytes) -> None:
        if (channel := getattr(self.broker, "write_channel", None)) is not None:  # of RabbitMQ
            (await channel.get_underlay_channel()).on_return_raises = True  # what no queue takes would count as sent
        found = TaskiqMessage.model_validate_json(body)
        message = BrokerMessage(task_id=found.task_id, task_name=found.task_name, message=body, labels=found.labels)
        await self._kick(message)

    async def startup(self) -> None:
        """Refuse what loses tasks, and relay what is stored, if this is a worker."""
        self._loop = asyncio.get_running_loop()
        if not (self.broker.is_worker_process or isinstance(self.broker, InMemoryBroker)):
            return
        if not BROKERS & {each.__name__ for each in type(self.broker).__mro__}:
            raise ConfigurationError(f"{type(self.broker).__name__} is not supported: use AioPikaBroker")
        if not isinstance(self.broker.serializer, JSONSerializer):
            raise ConfigurationError("another serializer than JSON may run code from the queue: use taskiq's JSONSerializer")
        labels = {str(each.labels.get("ack_type")).lower() for each in self.broker.get_all_tasks().values()}
        if EARLY & (labels | {each.rpartition("=")[2].lower() for each in sys.argv}):
            raise ConfigurationError("a task that is acknowledged before its COMMIT may be lost: use --ack-type when_saved")
        await asyncio.to_thread(self._inbox.relay().start)

    async def shutdown(self) -> None:
        """Send what is left, and end the relay."""
        await asyncio.to_thread(self._inbox.relay().stop)


def install(broker: AsyncBroker, inbox: AsyncInbox) -> Idempotency:
    """Return the decorator of a broker's idempotent tasks; capture what they send, and let workers relay it.

    A worker whose settings may lose tasks does not start: its error says what to change.

    Args:
        broker: `AioPikaBroker` or, in tests, `InMemoryBroker`.
        inbox: On the database that the tasks change; of this broker alone.

    Raises:
        ConfigurationError: Another broker was installed on the inbox.

    Example:
        >>> from sqlalchemy.ext.asyncio import create_async_engine
        >>> broker = InMemoryBroker()
        >>> idempotent = install(broker, AsyncInbox(create_async_engine("sqlite+aiosqlite:///shop.db")))
        >>> @broker.task
        ... @idempotent("shop.pay", key="order_id")
        ... async def pay(order_id: int, cents: int) -> None:
        ...     await session().execute(...)
    """
    if inbox.broker is not None:
        raise ConfigurationError("this inbox has a broker: give each one an inbox and tables of its own (IDEMP_TABLE_PREFIX)")
    inbox.broker = made = Idempotency(broker, inbox)
    broker.kick, broker.listen = made.kick, made.listen  # type: ignore[method-assign,assignment]
    broker.add_middlewares(made)
    return made
