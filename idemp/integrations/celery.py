"""Celery: the changes of a task, its result and everything that it sends are committed together, once for each task id."""

from __future__ import annotations

import inspect
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from hashlib import sha256
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.orm import Session

from idemp.context import FINGERPRINT, FOREIGN, Context
from idemp.errors import ConfigurationError, DispatchIncomplete, UnusableOutput, describe_error, needs
from idemp.events import log
from idemp.handlers import AnyMessage
from idemp.inbox import Inbox, Outcome
from idemp.integrations._capture import capturing, current
from idemp.integrations._settling import FIRST_PAUSE, LONGEST_PAUSE, Fate, fate
from idemp.messages import Output, Refusal
from idemp.policy import Duration, Idempotent

if TYPE_CHECKING:
    from idemp.integrations.django import DjangoInbox

with needs("celery"):
    from celery import Celery, Task, bootsteps, current_task, signature
    from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded
    from amqp.exceptions import AccessRefused, ChannelError  # isort: skip - behind celery, which brings it
    from kombu import compression
    from kombu.utils import json

__all__ = ["CeleryBroker", "IdempotentTask", "install", "session"]

UNSENDABLE: Final = (ChannelError, struct.error, TypeError, ValueError)  # errors of one output, once a connection is open
PAUSE: Final = 1.0  # seconds before a task is given back to its queue
OPEN: Final = (DispatchIncomplete, InterfaceError, OperationalError, SoftTimeLimitExceeded)
"""Errors after the body that leave open what was committed, or whether what it has sent goes out: another delivery finds out."""
VISIBILITY: Final = {"redis": 3600.0, "sqs": 1800.0}  # seconds, by kombu's default; then a task under way is delivered again


def session() -> Session:
    """Return the SQLAlchemy session of the running task's claim. It flushes, and refuses to commit, roll back or close.

    A task that an idempotent one calls directly, as a function, has the session of that one.

    Raises:
        ConfigurationError: No idempotent task runs in this thread.

    Example:
        >>> session()
        Traceback (most recent call last):
        idemp.errors.ConfigurationError: no idempotent task is running here: use .delay(…), or .apply(…) to run one in this process
    """
    if not isinstance(unit := current(), Context):
        raise ConfigurationError("no idempotent task is running here: use .delay(…), or .apply(…) to run one in this process")
    return unit.session


class _Run:
    """One delivery of a task: how far it has come, in this process."""

    def __init__(self, task: IdempotentTask, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.task, self.args, self.kwargs, self.request = task, args, kwargs, task.request
        self.error: Exception | None = None
        self.returned = False

    def __call__(self, ctx: Context) -> None:
        """Run the body in the transaction of its claim; what it sends is stored there, and so is its result."""
        request, self.returned, ignored = self.request, False, False
        request.children.clear()  # of a run that was rolled back
        try:
            with capturing(ctx, self.task.broker):
                try:
                    self.value = self.task.run(*self.args, **self.kwargs)
                    if not request.is_eager:
                        self._go_on()
                except Ignore:  # so does `replace` end the task, whose place another one takes
                    self.value, ignored = None, True
            unwanted = self.task.ignore_result if request.ignore_result is None else request.ignore_result
            ctx.result = json.dumps([request.id, ignored, None if unwanted and not request.chord else self.value]).encode()
        except Exception as error:
            self.error = error
            raise
        self.returned = True

    def _go_on(self) -> None:
        """Send callbacks and the rest of the chain. Celery would do so after COMMIT, and lose them with its process."""
        request, app = self.request, self.task.app
        priority = (request.delivery_info or {}).get("priority") if app.conf.task_inherit_parent_priority else None
        options = {"parent_id": request.id, "root_id": request.root_id or request.id, "priority": priority}
        *rest, following = request.chain or [None]
        for each in request.callbacks or ():
            signature(each, app=app).apply_async((self.value,), **options)
        if following:
            signature(following, app=app).apply_async((self.value,), chain=rest, **options)

    def message(self) -> dict[str, Any]:
        """Return what is claimed: the key, and a digest of all arguments by name, as the body gets them."""
        bound = inspect.signature(self.task.run).bind(*self.args, **self.kwargs)
        bound.apply_defaults()
        key = bound.arguments.get(self.task.idempotency_key or "", self.request.id)
        key = str(key) if isinstance(key, UUID) else key
        arguments = sha256(json.dumps(bound.arguments, sort_keys=True).encode("utf-8", "surrogatepass")).hexdigest()
        if nesting := getattr(self.request, "replaced_task_nesting", None):  # a replacement has the task id of the replaced one
            key = f"{key}#{nesting}"
        return {"id": key, "arguments": arguments}


class IdempotentTask(Task):
    """Base class of tasks whose changes happen once for each task id, or for each value of an argument; `install` makes yours.

    The transaction of `session()` is committed if the body returns, and rolled back if it raises, also by `retry`.

    Attributes:
        idempotency_key: Name of the argument that identifies the work; by default the task id does.
        retention: How long duplicates are recognized.
        broker: Takes what the tasks send.

    Example:
        >>> IdempotentTask.acks_late, IdempotentTask.reject_on_worker_lost
        (True, True)
    """

    acks_late = True
    reject_on_worker_lost = True
    idempotency_key: str | None = None
    retention: Duration = "7d"
    broker: CeleryBroker
    _wrap: Callable[..., Callable[..., Outcome]]
    _handle: Callable[..., Outcome]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the task; one that was handled before returns the result of then."""
        request, unit = self.request, current()
        if request.id is None or request.called_directly or hasattr(request, "idemp_run"):  # by its own body
            return super().__call__(*args, **kwargs)
        if request.is_eager and isinstance(unit, Context):  # sent by a task whose transaction is open
            with _savepoint(unit):
                return self.run(*args, **kwargs)
        run = request.idemp_run = _Run(self, args, kwargs)
        outcome = self._settle(run)
        first, ignored, value = json.loads(outcome.result) if outcome.result else (request.id, False, None)
        if first == request.id and not request.is_eager:
            request.callbacks = request.chain = None  # they are among the stored outputs
        if ignored:
            raise Ignore
        return run.value if run.returned else value

    def retry(self, *args: Any, **kwargs: Any) -> Any:
        """Send the task again, at once, because its transaction is rolled back. If that fails, it stays in its queue."""
        with capturing(None):
            try:
                return super().retry(*args, **kwargs)
            except Reject as error:
                raise Reject(error.reason, requeue=True) from error

    @classmethod
    def on_bound(cls, _app: Celery) -> None:
        """Wrap the task as a handler.

        Raises:
            ConfigurationError: The retention is no duration, or the class is not the one that `install` has returned.
        """
        if not hasattr(cls, "_wrap"):
            raise ConfigurationError(
                f"{cls.name} has a base class that is not installed: use the one that install(app, inbox) returns"
            )
        policy = Idempotent(key="id", retention=cls.retention)
        cls._handle = staticmethod(cls._wrap(lambda _, ctx: current_task.request.idemp_run(ctx), type=cls.name, policy=policy))

    def _settle(self, run: _Run) -> Outcome:
        """Handle a delivery, and keep it for a while if it is not to blame: each return to a queue counts as a delivery there.

        What is open after an error is settled by another delivery.
        """
        request, message, pause, again = run.request, run.message(), 0.0, (run.request.delivery_info or {}).get("redelivered")
        limits = filter(None, [*(request.timelimit or ()), self.time_limit, self.app.conf.task_time_limit, 120.0])  # seconds
        until = time.monotonic() + min(limits) / 2  # when a worker no longer keeps a task that has to wait
        properties = {"headers": {FINGERPRINT: "none"}} if request.retries else None  # which may have other arguments
        while True:
            try:
                time.sleep(pause)
                return self._handle(message, properties, redelivered=bool(again))
            except Exception as error:
                what = fate(error)
                settled = what is Fate.DEAD or (run.returned and what is Fate.REQUEUE and not isinstance(error, OPEN))
                settled = settled or isinstance(error, UnusableOutput)  # also of arguments that cannot be claimed
                if error is run.error or request.is_eager or settled:
                    raise
                pause, again = min(2 * pause or FIRST_PAUSE, LONGEST_PAUSE), True
                held = what is Fate.HOLD and time.monotonic() + pause < until
                log("wrapped.paused" if held else "wrapped.failed", id=request.id, pause=PAUSE, error=error)
                if not held:
                    with suppress(SoftTimeLimitExceeded):
                        time.sleep(0.0 if isinstance(error, SoftTimeLimitExceeded) else PAUSE)
                    raise Reject(error, requeue=True) from error


@contextmanager
def _savepoint(unit: Context) -> Iterator[None]:
    """Begin a savepoint; if the block raises, what it has sent is forgotten, too."""
    emitted = len(unit._emitted)  # noqa: SLF001
    try:
        with unit.session.begin_nested():
            yield
    except BaseException:
        del unit._emitted[emitted:]  # noqa: SLF001
        raise


def _record(unit: Any, body: Any, exchange: Any = "", routing_key: str = "", headers: Any = None, **options: Any) -> None:
    """Store what Celery would publish, as Celery has routed it."""
    if options["serializer"] != "json":
        raise UnusableOutput("an idempotent task sends JSON: use serializer='json'")
    if options.get("expiration") is not None:
        options["expiration"] = str(int(1000 * options["expiration"]))  # milliseconds, as AMQP has it
    data, headers = json.dumps(body).encode(), json.loads(json.dumps(headers))
    headers |= {name: (headers.get(name) or "")[:250] for name in ("argsrepr", "kwargsrepr")}  # for logs; there is little room
    if options.get("compression"):
        data, headers["compression"] = compression.compress(data, options["compression"])
    properties = {"content_type": "application/json", "content_encoding": "utf-8", "headers": headers}
    exchange = getattr(exchange, "name", exchange) or ""
    properties |= {name: options[name] for name in FOREIGN & options.keys()}
    unit.forward(data, properties, to=routing_key, exchange=exchange, mandatory=not exchange)


class CeleryBroker:
    """The broker of a Celery app, as `Inbox.relay` takes it: any transport of kombu's, with a connection for each thread that sends.

    Args:
        app: With its `broker_url`.

    Example:
        >>> CeleryBroker(Celery(broker="redis://:secret@localhost/2")).identity
        'redis:localhost:6379/2'
    """

    def __init__(self, app: Celery) -> None:
        self._app, self._producers = app, dict[int, Any]()

    @property
    def identity(self) -> str:
        """Text that is stored with the tables: the virtual host of RabbitMQ, or server and database number; no password."""
        made = self._app.connection_for_write()
        kind, name = str(made.transport.driver_type).lower(), made.virtual_host or "/"
        server = made.transport_options.get("master_name") or f"{made.hostname}:{made.port or made.transport.default_port}"
        return f"rabbitmq:{name}" if kind == "amqp" else f"{kind}:{server}/{name.strip('/') or 0}"

    def publisher(self) -> CeleryBroker:
        """Return this object: it sends in any thread."""
        return self

    def send(self, outputs: Sequence[Output]) -> None:
        """Leave all to `publish`."""

    def publish(self, outputs: Sequence[Output], timeout: float) -> Sequence[Refusal | None]:
        """Send each output, and wait for its confirm. Any error costs the connection: a late confirm would be another's."""
        deadline, answers = time.monotonic() + timeout, list[Refusal | None]()
        try:
            for each in outputs:
                producer = self._producer(timeout)
                try:
                    self._publish(producer, each, max(deadline - time.monotonic(), 0.1))
                    answers.append(None)
                except AccessRefused:  # as for all outputs, if a right was taken away
                    raise
                except UNSENDABLE as error:
                    self.close()
                    answers.append(Refusal(describe_error(error), own=True))
        except BaseException:
            self.close()
            raise
        return answers

    def _producer(self, timeout: float) -> Any:
        """Return the producer of this thread, whose connection waits for a silent broker only so long."""
        thread = threading.get_native_id()
        if thread not in self._producers:  # also in a forked process: its parent's connection is not touched
            limits = dict.fromkeys(("read_timeout", "write_timeout", "socket_timeout", "socket_connect_timeout"), timeout)
            connection = self._app.connection_for_write(heartbeat=0, transport_options=limits)
            self._producers[thread] = connection.ensure_connection(max_retries=1).Producer()
        return self._producers[thread]

    def _publish(self, producer: Any, output: Output, left: float) -> None:
        queues, name, exchange = self._app.amqp.queues, output.routing_key, output.exchange
        options = {"timeout": left, "confirm_timeout": left, "mandatory": output.mandatory, **output.properties}
        if "expiration" in options:
            options["expiration"] = int(options["expiration"]) / 1000
        known = [it for it in queues.values() if it.exchange.name == exchange] if exchange else [queues[name]]
        producer.publish(output.body, name, exchange=exchange, declare=known, delivery_mode=2, **options)

    def close(self) -> None:
        """Close the connection of this thread."""
        if producer := self._producers.pop(threading.get_native_id(), None):
            producer.connection.collect()


def install(app: Celery, inbox: Inbox | DjangoInbox) -> type[IdempotentTask]:
    """Return the base class of an app's idempotent tasks; capture what they send, and let workers relay it.

    A worker whose settings may lose tasks does not start: a `ConfigurationError` names what to change.

    Args:
        app: Its configuration may follow.
        inbox: On the database that the tasks change; of this app alone. With one of Django's, tasks run in Django's transactions.

    Raises:
        ConfigurationError: Another app was installed on the inbox.

    Example:
        >>> from sqlalchemy import create_engine
        >>> app = Celery("shop", broker="redis://localhost")
        >>> idempotent = install(app, Inbox(create_engine("sqlite:///shop.db")))
        >>> @app.task(base=idempotent, idempotency_key="payment_id")
        ... def take_payment(payment_id: int, cents: int) -> None:
        ...     session().execute(...)
    """
    if inbox.broker is not None:
        raise ConfigurationError("this inbox has a broker: give each app an inbox and tables of its own (IDEMP_TABLE_PREFIX)")
    broker = inbox.broker = CeleryBroker(app)
    sender = cache(app.amqp._create_task_sender)  # noqa: SLF001 - made at its first use, because it reads the configuration

    def send(producer: Any, name: str, message: Any, **options: Any) -> Any:
        unit = current(broker)
        return sender()(SimpleNamespace(publish=partial(_record, unit)) if unit else producer, name, message, **options)

    def create(_step: Any, _worker: Any) -> Any:
        if found := [*_faults(app, broker.identity.partition(":")[0])]:
            raise ConfigurationError("; ".join(found))
        return inbox.relay()

    app.amqp.send_task_message = send
    step = {"create": create, "requires": ("celery.worker.components:Pool",), "__module__": __name__}
    app.steps["worker"].add(type("Relay", (bootsteps.StartStopStep,), step))
    wrap = staticmethod(partial(inbox.wrap, message=AnyMessage, consumer=app.main or "celery", publisher=broker))
    return type("Installed", (IdempotentTask,), {"_wrap": wrap, "broker": broker})


def _faults(app: Celery, kind: str) -> Iterator[str]:
    """Yield what may lose tasks or run them twice, with what to change."""
    conf, options = app.conf, app.conf.broker_transport_options
    if kind not in ("rabbitmq", "memory", *VISIBILITY):
        yield f"the transport {kind} is not supported: use RabbitMQ or Redis"
    if conf.task_protocol != 2:
        yield f"task_protocol is {conf.task_protocol}: set it to 2"
    if conf.worker_deduplicate_successful_tasks:
        yield "worker_deduplicate_successful_tasks sends callbacks twice: leave it off, duplicates are recognized without it"
    if kind == "rabbitmq" and not options.get("confirm_publish"):
        yield "without publisher confirms, a lost message counts as sent: set broker_transport_options={'confirm_publish': True}"
    visibility = kind in VISIBILITY and (options.get("visibility_timeout") or VISIBILITY[kind])
    for task in [each for each in app.tasks.values() if isinstance(each, IdempotentTask)]:
        if not (task.acks_late and task.reject_on_worker_lost):
            yield f"{task.name} would be lost with its process: leave out acks_late and reject_on_worker_lost, or set both to True"
        if (serializer := task.serializer or conf.task_serializer) != "json":
            yield f"{task.name} has the serializer {serializer}: set it to json"
        if visibility and not 0 < (task.time_limit or conf.task_time_limit or 0) < visibility:
            yield f"{task.name} may be delivered again while it runs: set time_limit below visibility_timeout, {visibility:g} s"
        if task.idempotency_key is not None and task.idempotency_key not in inspect.signature(task.run).parameters:
            yield f"{task.name} has no argument {task.idempotency_key!r}, which is its idempotency_key"
