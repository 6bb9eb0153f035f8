"""dramatiq: the changes of an actor, its result and everything that it sends are committed together, once for each message id."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import deepcopy
from functools import partial, wraps
from hashlib import sha256
from inspect import iscoroutinefunction, signature, unwrap
from typing import Any, Final

from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.orm import Session

from idemp.context import Context
from idemp.errors import ConfigurationError, DispatchIncomplete, describe_error, needs
from idemp.events import log
from idemp.handlers import AnyMessage
from idemp.inbox import Inbox
from idemp.integrations._capture import capturing, current
from idemp.integrations._settling import FIRST_PAUSE, LONGEST_PAUSE, Fate, fate
from idemp.messages import Output, Refusal
from idemp.policy import Duration, Idempotent

with needs("dramatiq"):
    from dramatiq import Broker, JSONEncoder, Message, errors, get_encoder, middleware
    from dramatiq.common import current_millis, dq_name, q_name
    from dramatiq.middleware.threading import is_gevent_active

__all__ = ["IdempotentActors", "install", "session"]

RUNNING: Final[ContextVar[Any]] = ContextVar("idemp_dramatiq_message", default=None)
"""The message in the hands of this thread, as dramatiq took it from its queue."""
FOLLOWERS: Final = (middleware.Callbacks, middleware.Pipelines)  # send what follows on success
OPEN: Final = (DispatchIncomplete, InterfaceError, OperationalError)
"""Errors after the body that leave open what was committed, or whether what it has sent goes out: another run finds out."""
OWN: Final = (errors.QueueNotFound, middleware.MiddlewareError, struct.error, TypeError, ValueError)  # errors of one output


def session() -> Session:
    """Return the SQLAlchemy session of the running actor's claim. It flushes, and refuses to commit, roll back or close.

    An actor that an idempotent one calls directly, as a function, has the session of that one.

    Raises:
        ConfigurationError: No idempotent actor runs in this thread.

    Example:
        >>> session()
        Traceback (most recent call last):
        idemp.errors.ConfigurationError: no idempotent actor is running here: use .send(…), and a worker runs it
    """
    if not isinstance(unit := current(), Context):
        raise ConfigurationError("no idempotent actor is running here: use .send(…), and a worker runs it")
    return unit.session


def _marked(actor: Any) -> Any:
    """Return the idempotent function of an actor, below other decorators; if it has none, its innermost function."""
    fn = getattr(actor.fn, "perform", actor.fn)  # the method of a class
    # Other decorators copy the attributes. What an event loop calls runs in another thread, and does not find its message.
    return unwrap(getattr(fn, "__func__", fn), stop=lambda it: iscoroutinefunction(it) or getattr(it, "idemp", None) is it)


def _is_outage(error: Exception) -> bool:
    """Return whether an error is one of the connection, so that the same message may be sent later."""
    return isinstance(error, errors.BrokerConnectionError | OSError) or type(error).__module__.startswith(("pika.", "redis."))


class _Refused(ConfigurationError, middleware.MiddlewareError):
    """An error that ends a worker at its start, where dramatiq only logs others."""


class _Call:
    """One delivery of a message: how far it has come in this process.

    Attributes:
        claimed: The key, and a digest of the arguments that are not their defaults, by name: a deploy may add one that has a default.
        handled: Whether what follows on success is stored under the claim, because this very message was the first one.
    """

    def __init__(self, message: Any, actor: Any, id: Any) -> None:
        wanted = signature(getattr(actor.fn, "perform", actor.fn))
        bound = wanted.bind_partial(*message.args, **message.kwargs).arguments
        given = {name: value for name, value in bound.items() if value != wanted.parameters[name].default}
        digest = sha256(json.dumps(given, sort_keys=True).encode("utf-8", "surrogatepass"))
        self.claimed = {"id": id, "arguments": digest.hexdigest()}
        self.id, self.handled, self._returned = message.message_id, False, False
        self._error: Exception | None = None

    @contextmanager
    def body(self, context: Context, broker: IdempotentActors) -> Iterator[None]:
        """Capture what the body sends, and remember how it ends."""
        self._error, self._returned = None, False
        try:
            with capturing(context, broker):
                yield
        except Exception as error:
            self._error = error
            raise
        self._returned = True

    def read(self, result: bytes | None) -> Any:
        """Return the value that the first call has returned; None if it was erased."""
        first, value = json.loads(result) if result else (self.id, None)
        self.handled = first == self.id
        return value

    def waits(self, error: Exception) -> bool:
        """Return whether the message has to run again, and is not to blame: it must not use up a retry."""
        return error is not self._error and (fate(error) is Fate.HOLD or (self._returned and isinstance(error, OPEN)))

    def is_dead(self, error: Exception) -> bool:
        """Return whether no retry can succeed."""
        return error is not self._error and fate(error) is Fate.DEAD


class IdempotentActors(middleware.Middleware):
    """A middleware that captures what idempotent actors send, and decorates them. `install` makes it.

    It is the broker of the inbox, too: dramatiq's own `enqueue` sends what is stored, with a connection for each thread.

    Example:
        >>> from dramatiq.brokers.rabbitmq import RabbitmqBroker
        >>> from sqlalchemy import create_engine
        >>> broker = RabbitmqBroker(url="amqp://user:secret@localhost/shop", confirm_delivery=True)
        >>> IdempotentActors(broker, Inbox(create_engine("sqlite:///shop.db"))).identity
        'rabbitmq:shop'
    """

    def __init__(self, broker: Broker, inbox: Inbox) -> None:
        self._broker, self._inbox, self._enqueue = broker, inbox, broker.enqueue
        self._runs = dict[str, Any]()

    def __call__(self, name: str, *, key: str | None = None, retention: Duration = "7d") -> Callable[[Any], Any]:
        """Mark a function as idempotent, below `@dramatiq.actor`.

        Args:
            name: Name of its claims, which is stored: it outlives a renamed function.
            key: Argument that identifies the work; by default the message id does.
            retention: How long duplicates are recognized.

        Raises:
            ConfigurationError: The function is an actor or `async def`, or has no such argument; or the name is
                taken; or the retention is no duration.
        """
        options: dict[str, Any] = {"policy": Idempotent(key="id", retention=retention), "consumer": "dramatiq", "publisher": self}
        handle = self._inbox.wrap(lambda _, ctx: RUNNING.get().idemp_work(ctx), message=AnyMessage, type=name, **options)

        def mark(function: Callable[..., Any]) -> Callable[..., Any]:
            self._check(name, function, key)

            @wraps(function)
            def run(*args: Any, **kwargs: Any) -> Any:
                message = RUNNING.get()
                actor = message and self._broker.get_actor(message.actor_name)
                if actor is None or current(self) or _marked(actor) is not run:
                    return function(*args, **kwargs)  # called as a function
                bound = signature(function).bind(*args, **kwargs)
                bound.apply_defaults()
                call = message.idemp = _Call(message, actor, bound.arguments.get(key or "", message.message_id))

                def fresh(value: Any) -> Any:  # what the body changes is not sent with a retry, nor given to the next run
                    return deepcopy(value) if any(value is it for it in (*message.args, *message.kwargs.values())) else value

                def work(ctx: Context) -> None:
                    with call.body(ctx, self):
                        with self._limited(message):
                            value = function(*map(fresh, args), **{each: fresh(value) for each, value in kwargs.items()})
                        for each in self._middleware(*FOLLOWERS):  # dramatiq would send later, and lose it with its process
                            each.__class__.after_process_message(each, self._broker, message, result=value)
                        ctx.result = json.dumps([call.id, value]).encode()

                message.idemp_work = work
                self._unlimit(message)
                return self._settle(message, call, handle)

            self._runs[name] = run.idemp = run  # type: ignore[attr-defined]
            return run

        return mark

    def _check(self, name: str, function: Any, key: str | None) -> None:
        """Refuse a function that cannot be marked."""
        if hasattr(function, "actor_name"):
            raise ConfigurationError(f"{function.actor_name} is an actor already: put this decorator below @dramatiq.actor")
        if iscoroutinefunction(function):
            raise ConfigurationError(f"{function.__name__} is async def: an idempotent actor has to be a plain function")
        if key is not None and key not in signature(function).parameters:
            raise ConfigurationError(f"{function.__name__} has no argument {key!r}, which is its key")
        if taken := self._runs.get(name):
            raise ConfigurationError(f"{taken.__qualname__} has the name {name!r}: give {function.__qualname__} another one")

    def _settle(self, message: Any, call: _Call, handle: Callable[..., Any]) -> Any:
        """Handle a delivery; keep it while it is not to blame, so that no retry is used up."""
        pause, again = FIRST_PAUSE, getattr(message, "redelivered", False)
        while True:
            try:
                return call.read(handle(call.claimed, redelivered=again).result)
            except Exception as error:
                if call.is_dead(error):
                    message.options["max_retries"] = 0
                    message.fail()  # also if the actor has `retry_when`
                if not call.waits(error):
                    raise
                pause, again = self._wait(message, pause, error), True

    def _wait(self, message: Any, pause: float, error: Exception) -> float:
        log("wrapped.paused", id=message.message_id, error=error)
        time.sleep(pause)
        return min(2 * pause, LONGEST_PAUSE)

    @contextmanager
    def _limited(self, message: Any) -> Iterator[None]:
        """Begin the time limit with the body, and end it with that, so that nothing interrupts a COMMIT."""
        for each in self._middleware(middleware.TimeLimit):
            each.before_process_message(self._broker, message)
        try:
            yield
        finally:
            self._unlimit(message)

    def _unlimit(self, message: Any) -> None:
        for each in self._middleware(middleware.TimeLimit):
            each.after_process_message(self._broker, message)

    def _middleware(self, *kinds: type) -> list[Any]:
        return [each for each in self._broker.middleware if isinstance(each, kinds)]

    def _follow(self, follower: Any, broker: Broker, message: Any, **end: Any) -> None:
        """Let dramatiq send what follows, unless it was stored."""
        if not getattr(getattr(message, "idemp", None), "handled", False):
            follower.__class__.after_process_message(follower, broker, message, **end)

    def enqueue(self, message: Any, *, delay: int | None = None) -> Any:
        """Store a message that an idempotent actor sends; send any other one, and a retry: its actor has ended by then."""
        running, pause = RUNNING.get(), FIRST_PAUSE
        if unit := current(self):
            if delay is not None:
                message = message.copy(queue_name=dq_name(message.queue_name), options={"eta": current_millis() + delay})
            unit.forward(message.encode(), {"priority": message.options.get("broker_priority")}, to=message.queue_name)
            return message
        if message is not running or not hasattr(message, "idemp"):
            return self._send(message, delay)
        while not message.failed:
            try:
                return self._send(message, delay)
            except Exception as error:  # dramatiq would acknowledge the message, and lose it
                if not _is_outage(error):
                    message.fail()
                    raise
                pause = self._wait(message, pause, error)
        return message

    def _send(self, message: Any, delay: int | None) -> Any:
        """Send a message at once. Any error costs the connection of this thread: a late confirm would be another message's."""
        try:
            return self._enqueue(message, delay=delay)
        except BaseException:
            if hasattr(type(self._broker), "connection"):
                del self._broker.connection  # type: ignore[attr-defined]
            raise

    @property
    def identity(self) -> str:
        """Text that is stored with the tables: the virtual host of RabbitMQ, or server, database and namespace; no password."""
        made: Any = self._broker
        if hasattr(made, "parameters"):
            return f"rabbitmq:{(made.parameters[0] if isinstance(made.parameters, list) else made.parameters).virtual_host}"
        if hasattr(made, "client"):
            found = made.client.connection_pool.connection_kwargs
            server = found.get("path") or f"{found.get('host')}:{found.get('port')}"
            return f"redis:{server}/{found.get('db') or 0}/{made.namespace}"
        return f"dramatiq:{type(made).__name__}"

    def publisher(self) -> IdempotentActors:
        """Return this object: it sends in any thread."""
        return self

    def send(self, outputs: Sequence[Output]) -> None:
        """Leave all to `publish`."""

    def close(self) -> None:
        """Leave the connections to dramatiq."""

    def publish(self, outputs: Sequence[Output], timeout: float) -> Sequence[Refusal | None]:  # noqa: ARG002
        """Send each output, and wait for its confirm as long as the broker's parameters allow."""
        answers = list[Refusal | None]()
        for each in outputs:
            try:
                message = Message.decode(each.body)
                eta = message.options.pop("eta", None)
                delay = None if eta is None else max(eta - current_millis(), 0)
                self._send(message.copy(queue_name=q_name(message.queue_name)), delay)
                answers.append(None)
            except OWN as error:
                answers.append(Refusal(describe_error(error), own=True))
        return answers

    def before_worker_boot(self, broker: Broker, worker: Any) -> None:  # noqa: ARG002
        """Refuse what loses messages; relay what is stored."""
        if found := "; ".join(self._faults()):
            raise _Refused(found)
        for each in self._middleware(*FOLLOWERS):
            each.after_process_message = partial(self._follow, each)
        try:
            self._inbox.relay().start()
        except Exception as error:
            raise _Refused(f"the relay of this worker cannot start: {describe_error(error)}") from error

    def _faults(self) -> Iterator[str]:
        if not self._middleware(middleware.Retries):
            yield "without the middleware Retries, messages that fail count as done: add it"
        if not isinstance(get_encoder(), JSONEncoder):
            yield "another encoder than JSON may run code from the queue: call dramatiq.set_encoder(dramatiq.JSONEncoder())"
        if not getattr(self._broker, "confirm_delivery", True):
            yield "without publisher confirms, a lost message counts as sent: pass confirm_delivery=True to RabbitmqBroker"
        if idle := sorted(name for name, run in self._runs.items() if run not in map(_marked, self._broker.actors.values())):
            yield f"no actor runs {', '.join(idle)}: mark it right below @dramatiq.actor; decorators between need functools.wraps"
        if is_gevent_active():  # type: ignore[no-untyped-call]
            yield "gevent is not supported: run `dramatiq`, not `dramatiq-gevent`"

    def after_worker_shutdown(self, *_: Any) -> None:
        """Send what is left, and end the relay."""
        self._inbox.relay().stop()

    def before_process_message(self, _broker: Broker, message: Any) -> None:
        """Remember the message of this thread."""
        RUNNING.set(message)


def install(broker: Broker, inbox: Inbox) -> IdempotentActors:
    """Return the decorator of a broker's idempotent actors; capture what they send, and let workers relay it.

    A worker whose settings may lose messages does not start: its error says what to change.

    Args:
        broker: With its middleware, for RabbitMQ or Redis, or a `StubBroker`.
        inbox: On the database that the actors change; of this broker alone.

    Raises:
        ConfigurationError: Another broker was installed on the inbox.

    Example:
        >>> import dramatiq
        >>> from dramatiq.brokers.stub import StubBroker
        >>> from sqlalchemy import create_engine
        >>> broker = StubBroker()
        >>> idempotent = install(broker, Inbox(create_engine("sqlite:///shop.db")))
        >>> @dramatiq.actor(broker=broker)
        ... @idempotent("shop.pay", key="order_id")
        ... def pay(order_id: int, cents: int) -> None:
        ...     session().execute(...)
    """
    if inbox.broker is not None:
        raise ConfigurationError("this inbox has a broker: give each one an inbox and tables of its own (IDEMP_TABLE_PREFIX)")
    inbox.broker = made = IdempotentActors(broker, inbox)
    broker.enqueue = made.enqueue  # type: ignore[method-assign]
    broker.add_middleware(made)
    return made
