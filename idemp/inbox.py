"""The inbox around an existing consumer: no app, no worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from idemp.context import FINGERPRINT, Context
from idemp.errors import ConfigurationError, Conflict, DispatchIncomplete, InFlight, Late, UnknownType
from idemp.handlers import Handler
from idemp.messages import Delivery, encode, type_name
from idemp.policy import Idempotent, Policy
from idemp.ports import Handled, Identity, Publisher, Verdict
from idemp.protocol import Protocol
from idemp.settings import Settings

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.orm import Session

    from idemp.sql.scheduler import SqlScheduler
    from idemp.sql.store import SqlStore

__all__ = ["ClaimedUnit", "Inbox", "Outcome"]


@dataclass(frozen=True)
class Outcome:
    """The result of a wrapped handler. If it was returned, the caller may acknowledge the message.

    Attributes:
        verdict: `CLAIMED` if the handler ran, `DUPLICATE` if it had run before.
        outputs: Number of outputs that were sent.

    Example:
        >>> Outcome(Verdict.DUPLICATE, 0).verdict.value
        'duplicate'
    """

    verdict: Verdict
    outputs: int


class ClaimedUnit(Context):
    """A claim in a transaction of the caller's.

    Attributes:
        duplicate: Whether the message was handled before: skip the business logic, then commit or roll back.

    Example:
        >>> ClaimedUnit("billing", {}, None, None).duplicate
        False
    """

    duplicate = False


class Inbox:
    """Claims around handlers and transactions that exist already.

    Args:
        engine: SQLAlchemy engine of the database that the handlers change.
        settings: By default read from the environment.

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

    def __init__(self, engine: Engine, *, settings: Settings | None = None) -> None:
        self._engine, self._settings = engine, settings or Settings()
        self._parts: tuple[SqlStore, SqlScheduler] | None = None
        self._registered: set[tuple[str, str, Identity | None]] = set()

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
        """Return a function that handles one message: `handle(message, properties=None)`.

        A message is JSON as bytes, a mapping, a model, or a kombu message. A model is compared with nothing, because its JSON text
        is not the producer's.

        Args:
            function: Takes a message, and a context if it needs one.
            message: pydantic model of the messages.
            consumer: Scope of the inbox keys.
            policy: By default `Idempotent()`.
            publisher: Sends the outputs; without one, a relay does.
            type: Type name; by default `__message_type__`, else package and class.

        Raises:
            ConfigurationError: The policy does not fit the model.
            IdempError: The returned function raises if the message must not be acknowledged:
                `InFlight`, `Conflict`, `Unreadable`, `DispatchIncomplete`, and what the handler raises.
        """
        handler = self._configured(Handler(consumer, message, function, policy or Idempotent(), type=type))

        def handle(message: Any, properties: Mapping[str, Any] | None = None) -> Outcome:
            store, scheduler = self._open(handler)
            protocol = Protocol(
                dict.fromkeys(handler.types, handler), store, scheduler, publisher, None, self._settings.publish_timeout
            )
            work = protocol.accept(_delivery(consumer, handler.type, message, properties))
            if work.error is None:
                protocol.execute([work])
            refused = protocol.dispatch([work])
            if work.error is not None:
                raise work.error
            assert work.verdict is not None
            unsent = [output for output in work.outputs if not output.sendable or output.id in refused]
            if unsent and not scheduler.relay_alive():
                raise DispatchIncomplete(
                    f"the message was handled and committed; {len(unsent)} of its outputs wait for a relay, and none is alive: "
                    "start one (idemp worker), and deliver the message again"
                )
            return Outcome(work.verdict, len(work.outputs) - len(unsent))

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
    ) -> Iterator[ClaimedUnit]:
        """Claim a message in a transaction of your own. Commit the session after the block; a relay sends the outputs.

        If the block raises, the session is rolled back.

        Args:
            session: Its transaction takes the claim and the outputs.
            message: JSON as bytes, a mapping, a model, or a kombu message.
            consumer: Scope of the inbox keys.
            type: Type name; by default the message's or the model's.
            policy: By default `Idempotent()`.
            properties: AMQP properties, such as `message_id`, where the message has none of its own.

        Raises:
            InFlight: Another transaction holds the id.
            Conflict: Another message was handled under the id.
            Unreadable: The message has no usable id.
            DispatchIncomplete: Outputs were emitted and no relay is alive: roll back.

        Example:
            >>> def pay(inbox: Inbox, session: "Session", body: bytes) -> None:
            ...     with inbox.claim(session, body, consumer="billing", type="billing.Pay", policy=Idempotent(key="id")) as unit:
            ...         if not unit.duplicate:
            ...             unit.send({"paid": True}, to="shop", type="billing.Paid")
            ...     session.commit()
        """
        name = type or (type_name(message.__class__) if isinstance(message, BaseModel) else None)
        delivery = _delivery(consumer, name, message, properties)
        name = delivery.properties.get("type")
        if not name:
            raise UnknownType("the message does not say its type: pass type='package.Name'")
        handler = self._configured(Handler(consumer, _Anything, lambda _: None, policy or Idempotent(), type=name))
        store, scheduler = self._open(handler)
        _, claim = handler.accept(delivery)
        assert claim is not None
        connection = session.connection()
        answer = store.claim_on(connection, claim)
        if answer.verdict is Verdict.IN_FLIGHT:
            raise InFlight(f"another transaction holds the id {claim.original!r}")
        if answer.verdict is Verdict.CONFLICT:
            raise Conflict(f"another message was handled under the id {claim.original!r}")
        if answer.late and handler.parks_late:
            store.withdraw_on(connection, claim)
            raise Late("claims of its age have been deleted, so it may have been handled")
        unit = ClaimedUnit(consumer, delivery.properties, _Caller(session), claim)
        unit.duplicate = answer.verdict is Verdict.DUPLICATE
        try:
            yield unit
        except BaseException:
            session.rollback()  # a claim without its effects and outputs must not be committed
            raise
        outputs = unit.outputs()
        if outputs and not unit.duplicate:
            store.store_on(connection, [Handled(consumer, claim, outputs)], 0.0)
            if not scheduler.relay_alive():
                raise DispatchIncomplete(
                    f"{len(outputs)} outputs would wait for a relay, and none is alive: roll back, then start one (idemp worker)"
                )

    def _configured(self, handler: Handler) -> Handler:
        options = self._settings.messages.get(handler.type)
        return handler.with_options(options) if options else handler

    def _open(self, handler: Handler) -> tuple[SqlStore, SqlScheduler]:
        """Open the adapters at first use, and register a handler once."""
        if self._parts is None:
            from idemp.sql.checks import check_database
            from idemp.sql.engine import Database, worker_name
            from idemp.sql.scheduler import SqlScheduler
            from idemp.sql.store import SqlStore

            database, worker = Database(self._engine, self._settings.table_prefix, fast=self._settings.fast_path), worker_name()
            if red := [str(finding) for finding in check_database(database) if finding.level == "red"]:
                raise ConfigurationError("; ".join(red))
            self._parts = SqlStore(database, worker), SqlScheduler(database, worker, self._settings.lease)
        known = (handler.consumer, handler.type, handler.identity)
        if known not in self._registered:
            self._parts[0].register(handler.consumer, handler.types, [handler.identity] if handler.identity else [])
            self._registered.add(known)
        return self._parts


class _Anything(BaseModel, extra="allow"):
    """A message whose fields only its key names."""


@dataclass(frozen=True)
class _Caller:
    session: Session

    @property
    def connection(self) -> Any:
        return self.session.connection()


def _delivery(consumer: str, type: str | None, message: Any, properties: Mapping[str, Any] | None) -> Delivery:
    """Return what was passed to a wrapped handler as a delivery."""
    redelivered = False
    found: dict[str, Any] = {"type": type} if type else {}
    if isinstance(message, BaseModel):
        body = encode(message)
        found["headers"] = {FINGERPRINT: "none"}
    elif isinstance(message, Mapping):
        body = encode(message)
    elif hasattr(message, "delivery_info"):  # kombu's
        body, redelivered = message.body, bool((message.delivery_info or {}).get("redelivered"))
        headers = {name: value for name, value in (message.headers or {}).items() if name != "compression"}  # undone by kombu
        said = {**(message.properties or {}), "headers": headers}
        said |= {"content_type": message.content_type, "content_encoding": message.content_encoding}
        found |= {name: value for name, value in said.items() if value is not None}
    else:
        body = message
    if isinstance(body, str):
        body = body.encode()
    if not isinstance(body, bytes | bytearray | memoryview):
        raise TypeError(f"a message is bytes, a mapping, a model or a kombu message, not {message.__class__.__name__}")
    return Delivery(consumer, {**found, **(properties or {})}, bytes(body), redelivered)
