"""The inbox in transactions of Django: `once` begins one, `joined` takes part in one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from functools import cache, partial, wraps
from inspect import iscoroutinefunction, signature
from typing import Any, Final, ParamSpec, TypeVar
from uuid import UUID

from django.db import connections, transaction
from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.orm import Session

from idemp.context import Context
from idemp.errors import ConfigurationError, HandlerError, Unreadable, UnusableOutput
from idemp.inbox import Inbox, Outcome
from idemp.integrations._capture import capturing, current
from idemp.integrations.django.bridge import Bridge, DjangoStore, DjangoUnit, own_engine
from idemp.policy import Idempotent
from idemp.ports import Outlet
from idemp.settings import Settings
from idemp.sql.engine import Database
from idemp.worker.relay_thread import RelayThread

__all__ = ["BridgedInbox", "DjangoInbox", "Keyed", "encode"]

POLICY: Final = Idempotent(key="key")
P = ParamSpec("P")
R = TypeVar("R")


class Keyed(AbstractContextManager[Context]):
    """One key of `DjangoInbox.once` or `joined`: a context manager for one block, or a decorator of functions.

    Example:
        >>> Keyed.__name__
        'Keyed'
    """

    def __init__(self, block: Callable[[Any], AbstractContextManager[Context]], key: Any) -> None:
        self._block, self._key = block, key
        self._entered: Any = ExitStack()

    def __enter__(self) -> Context:
        unit: Context = self._entered.enter_context(self._block(self._key))
        return unit

    def __exit__(self, *error: object) -> bool | None:
        return bool(self._entered.__exit__(*error))

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return a function that runs once for a key, and returns what the first run has returned, as JSON gives it back.

        Raises:
            ConfigurationError: The function is `async def`, or has no parameter of the name of the key.
        """
        parameters, key = signature(function), self._key
        if iscoroutinefunction(function):
            raise ConfigurationError(f"{function.__qualname__} is async def: decorate a def, and call it by sync_to_async()")
        if not callable(key) and key not in parameters.parameters:
            raise ConfigurationError(f"{function.__qualname__} has no parameter {key!r}: name one, or pass a function of them")

        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            bound = parameters.bind(*args, **kwargs)
            bound.apply_defaults()
            given = key(*args, **kwargs) if callable(key) else bound.arguments[key]
            with self._block(given) as unit:
                if not unit.duplicate:
                    unit.result = encode(function(*args, **kwargs))
            found: R = json.loads(unit.result or b"null")
            return found

        return run


class BridgedInbox(Inbox):
    """The inbox of a database of Django's, whose wrapped handlers run in Django's transactions.

    Example:
        >>> issubclass(BridgedInbox, Inbox)
        True
    """

    def __init__(self, own: Engine, bridge: Bridge, settings: Settings) -> None:
        super().__init__(own, settings=settings)
        self._bridge = bridge

    def _store(self, database: Database, worker: str) -> DjangoStore:
        return DjangoStore(database, worker, self._bridge, renews=False)  # the connection is the caller's


class DjangoInbox:
    """The inbox of idemp in transactions of Django. The database is read from the settings at first use, not before.

    Args:
        consumer: Scope of the keys, such as the name of the Django app.
        using: Alias of the database.
        prefix: Of the tables; by default that of idemp's settings (`IDEMP_TABLE_PREFIX`).

    Attributes:
        broker: Takes what the relay thread sends; None for the one of idemp's settings (`IDEMP_BROKER_URL`).

    Example:
        >>> inbox = DjangoInbox("shop")
        >>> @inbox.once("shop.take_payment", key="payment_id")
        ... def take_payment(payment_id: int, cents: int) -> dict[str, int]:
        ...     # … Payment.objects.create(id=payment_id, cents=cents) …
        ...     inbox.unit.send({"payment_id": payment_id}, to="ledger", type="shop.PaymentTaken")
        ...     return {"payment_id": payment_id}
        >>> def pay(payment_id: int) -> bytes | None:
        ...     with inbox.once("shop.pay", key=payment_id) as unit:
        ...         if not unit.duplicate:
        ...             unit.result = b'{"paid": true}'
        ...     return unit.result
    """

    def __init__(self, consumer: str, *, using: str = "default", prefix: str | None = None) -> None:
        self.consumer, self.using, self._prefix = consumer, using, prefix
        self.broker: Outlet | None = None
        self._unit: ContextVar[Context | None] = ContextVar("idemp_django_unit", default=None)
        self._opened: dict[str, tuple[BridgedInbox, Bridge, set[str]]] = {}  # by name: the test runner renames the database

    @property
    def unit(self) -> Context:
        """The unit of the block that runs: `send`, `publish`, `forward` and `result`.

        Raises:
            HandlerError: None runs.
        """
        if (unit := self._unit.get()) is not None:
            return unit
        handled, tx = current(), getattr(current(), "_tx", None)  # of a wrapped handler, or one of a worker
        if isinstance(handled, Context) and isinstance(tx, DjangoUnit) and tx.using == self.using:
            return handled
        raise HandlerError("no once() or joined() of this inbox runs here, so a message would never be stored")

    def once(self, type: str, key: Any, *, wait: float = 2.0) -> Keyed:
        """Claim a key in a durable `atomic()` of its own: `with inbox.once(…) as unit:`, or `@inbox.once(…)`.

        In a `with`, skip the business logic if `unit.duplicate`. What `unit.result` is given, as JSON, duplicates find there.

        Args:
            type: Name of the operation. Each name is stored for good, so a name has no ids in it.
            key: Text, an integer or a boolean; of a decorated function the name of a parameter, or a function of its arguments.
            wait: Seconds to wait for another transaction with this key.

        Raises:
            InFlight: Another transaction has held the key for longer; nothing was committed.
            AtomicRolledBack: A database error was caught in the block; nothing was committed.
            UnusableOutput: The result is no JSON; nothing was committed.
            Unreadable: The key is no usable id; nothing was claimed.
            BlockEnded: The block ended the transaction by a raw cursor or a statement that commits.
            ConfigurationError: A transaction is open: use `joined`.
        """
        return Keyed(partial(self._block, type, wait, True), key)

    def joined(self, type: str, key: Any, *, wait: float = 2.0) -> Keyed:
        """Claim a key in the transaction that is open: of ATOMIC_REQUESTS, or of an outer `atomic()`.

        It has a savepoint of its own, to which an error of the block rolls back, the claim included.

        Args:
            type: Name of the operation; see `once`.
            key: See `once`.
            wait: Seconds to wait for another transaction with this key.

        Raises:
            ConfigurationError: No transaction is open; or, on SQLite, it has read or written before, and `prepare` was not called.
            Unreadable: The key is no usable id; nothing was claimed.
            BlockEnded: The block ended the transaction by a raw cursor or a statement that commits.
            InFlight: Another transaction has held the key for longer; the savepoint was rolled back.
            AtomicRolledBack: A database error was caught in the block; the savepoint was rolled back.
            UnusableOutput: The result is no JSON; the savepoint was rolled back.
        """
        return Keyed(partial(self._block, type, wait, False), key)

    def wrap(self, function: Callable[..., Any], **options: Any) -> Callable[..., Outcome]:
        """Return a function that handles one message in a transaction of Django's; see `Inbox.wrap`.

        Args:
            function: Takes a message, and a context if it needs one.
            options: Those of `Inbox.wrap`.

        Raises:
            ConfigurationError: The returned function raises if the options do not fit.
        """
        wrapped = cache(lambda inbox: inbox.wrap(function, **options))

        def handle(*args: Any, **kwargs: Any) -> Outcome:
            outcome: Outcome = wrapped(self._open()[0])(*args, **kwargs)
            return outcome

        return handle

    def relay(self, broker: Outlet | None = None) -> RelayThread:
        """Return the relay thread of this process; see `Inbox.relay`."""
        self.broker = broker or self.broker
        return self._open()[0].relay(self.broker)

    def prepare(self, type: str) -> None:
        """Check the tables and register the name of an operation, in transactions of idemp's own. `once` does so at its first use.

        On SQLite, which has one writer, call it before the transaction that `joined` takes part in.

        Raises:
            ConfigurationError: The tables are missing: `manage.py migrate`.
        """
        inbox, _, prepared = self._open()
        if type in prepared:
            return
        try:
            inbox.prepare(consumer=self.consumer, type=type, policy=POLICY)
        except ConfigurationError as error:
            raise ConfigurationError(f"{error}; in Django: manage.py migrate") from error
        except OperationalError as error:
            if connections[self.using].vendor == "sqlite" and connections[self.using].in_atomic_block:
                text = f"SQLite has one writer, and a transaction is open: call prepare({type!r}) before it; nothing was claimed"
                raise ConfigurationError(text) from error
            raise
        prepared.add(type)

    def _open(self) -> tuple[BridgedInbox, Bridge, set[str]]:
        name = str(connections[self.using].settings_dict["NAME"])
        if name not in self._opened:
            own = own_engine(self.using)
            django, fresh = connections[self.using], connections[self.using].connection is None
            django.ensure_connection()  # which Django refuses in an event loop
            if fresh:  # a worker that opens its relay forks later, and the children would share the connection
                django.close()
            settings = Settings(table_prefix=self._prefix) if self._prefix else Settings()
            bridge = Bridge(self.using, own)
            self._opened.setdefault(name, (BridgedInbox(own, bridge, settings), bridge, set()))
        return self._opened[name]

    def _wake(self, unit: Context) -> None:
        """Let the relay thread send what a block has stored, so that no request waits for the broker."""
        if unit.stored:
            self.relay().wake()

    @contextmanager
    def _entered(self, unit: Context) -> Iterator[None]:
        token = self._unit.set(unit)
        try:
            yield
        finally:
            self._unit.reset(token)

    @contextmanager
    def _block(self, type: str, wait: float, durable: bool, key: Any) -> Iterator[Context]:
        inbox, bridge, _ = self._open()
        django = bridge.django
        django.ensure_connection()
        if not durable and not django.in_atomic_block:
            raise ConfigurationError("joined() found no open transaction: use once(), or transaction.atomic() around it")
        if durable and django.atomic_blocks and not django.atomic_blocks[-1]._from_testcase:  # noqa: SLF001 - as atomic() decides
            raise ConfigurationError(
                "once() begins a transaction of its own, and one is open: use joined() in it; nothing was claimed"
            )
        key = str(key) if isinstance(key, UUID) else key
        if not isinstance(key, str | int):
            raise Unreadable(f"the key of {type} is {key!r}: text, an integer, a boolean or a UUID is one; nothing was claimed")
        self.prepare(type)
        claim = partial(inbox.claim, consumer=self.consumer, type=type, policy=POLICY, wait=wait, grace=0.0)
        with (
            _as_django(self.using),
            transaction.atomic(using=self.using, durable=durable),
            bridge.engine.connect() as connection,
            Session(bind=connection) as session,
            claim(session, {"key": key}) as unit,
            capturing(unit, self.broker),
            self._entered(unit),
        ):
            # Before the hooks of the block, one of which may raise.
            transaction.on_commit(partial(self._wake, unit), using=self.using, robust=True)
            yield unit
            session.flush()
            bridge.check(connection)
            _json(lambda: json.loads(unit.result or b"null"))


@contextmanager
def _as_django(using: str) -> Iterator[None]:
    """Raise errors of idemp's statements as Django raises those of the ORM's."""
    try:
        yield
    except DBAPIError as error:
        with connections[using].wrap_database_errors:
            raise (error.orig or error) from error


def encode(value: Any) -> bytes:
    """Return a result as JSON.

    Raises:
        UnusableOutput: It is no JSON.

    Example:
        >>> encode((1, None))
        b'[1, null]'
    """
    return _json(lambda: json.dumps(value, allow_nan=False).encode())


def _json(function: Callable[[], R]) -> R:
    try:
        return function()
    except (TypeError, ValueError, RecursionError) as error:
        raise UnusableOutput(f"the result is no JSON, so no duplicate could have it ({error}); nothing was committed") from None
