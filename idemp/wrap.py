"""`Inbox.wrap`: idempotence around any existing function and any kombu consumer, without an App."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeGuard

from idemp.broker.port import Ack, Refusal, Release, Retry
from idemp.clock import Clock, SystemClock
from idemp.cloudevents import unwrap
from idemp.deliverylog import about, tell
from idemp.dispatch import Dispatcher
from idemp.errors import (
    BrokerError,
    ConfigurationError,
    DispatchIncomplete,
    IdInFlight,
    LostBeforeCommit,
    StoreError,
    StoreUnavailable,
    UndecodableMessage,
)
from idemp.forking import ForkAware, check_process
from idemp.handlers import Registry, declare, remember_declarer
from idemp.inbox.port import DEFAULT_BROKER
from idemp.messages import Message
from idemp.outcome import Outcome
from idemp.protocol import Protocol
from idemp.settling import UNCONFIRMED_DELAY, settlement_of_failure
from idemp.showing import logger, text_of
from idemp.startup import (
    agree_identities,
    check_broker_name,
    check_databases,
    check_entities,
    check_not_per_entity,
)
from idemp.suspects import Turns
from idemp.telemetry import SILENT, Telemetry, together
from idemp.telemetry.wiring import tell_pending, traces_if
from idemp.work import Consumer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from sqlalchemy import Engine
    from sqlalchemy.orm import sessionmaker

    from idemp.broker.port import Delivery, Publisher, Settlement
    from idemp.inbox.port import InboxStore
    from idemp.messages import Output
    from idemp.policy import Policy
    from idemp.twophase import Coordinator

log = logger("idemp.wrap")

_UPKEEP_SECONDS: Final = 5.0
_GIVE_BACK_SECONDS: Final = 1.0  # not a hot loop while no copy can be made

# Of all wrapped functions of this process; how many threads will call them is not known.
_TURNS: Final = Turns()


class Inbox:
    """An inbox beside the tables of an engine that a service already has.

    Args:
        engine: any synchronous SQLAlchemy engine on PostgreSQL (psycopg), MariaDB, MySQL or SQLite; or a store.
        session_factory: makes `ctx.session`; a `sessionmaker` of the same engine.
        schema: database schema of idemp's tables.
        prefix: prefix of idemp's tables.
        clock: source of time.
        telemetry: what looks on, such as `idemp.telemetry.prometheus.Metrics(registry)`.
        traces: whether to trace by OpenTelemetry, where it is installed and a tracer provider is configured.
        broker_name: name of the publishers' broker in the database; needed where several brokers share a database.
        databases: others that functions of `TwoPhase` types write to, as of `App`. What is left in doubt is ended by
            redeliveries, and by your own `Recovery(inbox.coordinator).run_once()` (see `idemp.twophase`).

    Raises:
        ConfigurationError: an unknown database, or a session factory of another engine.

    Example:
        >>> from idemp import Context, Idempotent
        >>> from idemp.inbox.memory import InMemoryStore
        >>> inbox = Inbox(InMemoryStore())
        >>> def take_payment(message: dict[str, int], ctx: Context) -> None:
        ...     ctx.session["paid"] = message["amount"]
        >>> handle = inbox.wrap(
        ...     take_payment, message=dict, type="billing.TakePayment", consumer="billing", policy=Idempotent(key="id")
        ... )
        >>> handle({"id": 7, "amount": 10}), handle({"id": 7, "amount": 10})
        (<Outcome.HANDLED: 'handled'>, <Outcome.SKIPPED: 'skipped'>)
    """

    def __init__(
        self,
        engine: Engine | InboxStore,
        *,
        session_factory: sessionmaker[Any] | None = None,
        schema: str | None = None,
        prefix: str = "idemp_",
        clock: Clock | None = None,
        telemetry: Telemetry = SILENT,
        traces: bool = True,
        broker_name: str | None = None,
        databases: Mapping[str, str | Engine | sessionmaker[Any]] | None = None,
    ) -> None:
        self._telemetry = together(telemetry, traces_if(wanted=traces))
        self.clock = clock or SystemClock()
        self.store: InboxStore = (
            engine
            if _is_store(engine)
            else _sql_store(
                engine,
                schema=schema,
                prefix=prefix,
                session_factory=session_factory,
                clock=self.clock,
                broker=broker_name or DEFAULT_BROKER,
            )
        )
        check_broker_name(self.store, broker_name)
        self.coordinator: Coordinator | None = _coordinator(self.store, databases) if databases else None

    def wrap(
        self,
        function: Callable[..., Any],
        message: type[Any] | None = None,
        *,
        consumer: str,
        policy: Policy | None = None,
        publisher: Publisher | None = None,
        type: str | None = None,
        aliases: Iterable[str] = (),
        replies: bool = False,
        queue: str | None = None,
        exchange: str = "idemp",
        namespace: str = "idemp",
        max_body_bytes: int = 8 * 1024 * 1024,
    ) -> Wrapped:
        """A function around `function` that handles each message once.

        Args:
            function: `(message)` or `(message, ctx)`; it stays as it is.
            message: its message class; default from the annotation.
            consumer: the scope of the inbox key.
            policy: `Idempotent(…)`; without it every delivery runs.
            publisher: sends the outputs; on a connection of its own, never the consuming one.
            type: type name; messages without a type count as this one.
            aliases: other names of the type.
            replies: whether returned messages answer the sender.
            queue: where kombu's consumer takes them from, for delay tiers and dead letters; default the consumer's name.
            exchange: where published outputs go.
            namespace: keeps output ids of unrelated systems apart.
            max_body_bytes: larger bodies are parked, larger outputs refused.

        Raises:
            ConfigurationError: the function can't be a handler, or the policy does not fit the message class or the store.
            SchemaError: the inbox tables are missing or altered.
            IdentityChanged: its key changed since the last deploy, and no `previous=` covers that.
        """
        declared = declare(function, message, type=type, policy=policy, aliases=aliases, replies=replies)
        registry = Registry(default_type=declared.message_type)
        registry.add(declared)
        registry.build()
        if registry.registrations()[0].policy.ordered_by is not None:
            raise ConfigurationError(
                "ordered_by needs a worker: a wrapped function can't hold back messages behind one that failed.",
                fix="Make the function a handler of an App and run `idemp worker`, or leave out ordered_by.",
            )
        check_entities(self.store, registry.registrations())
        check_databases(self.coordinator, registry.registrations())
        if publisher is None:
            check_not_per_entity(
                self.store, "A function without a publisher", "Say publisher=…: no relay sends what it emits."
            )
        self.store.verify()
        if registry.registrations()[0].policy.databases and self.coordinator is not None:
            self.coordinator.verify()
        self.store.prepare(consumer, [declared.message_type])
        agree_identities(self.store, consumer, queue or consumer, registry)
        shared = Consumer(
            name=consumer,
            store=self.store,
            find=registry.find,
            types=registry.types,
            clock=getattr(self.store, "clock", self.clock),  # one for all who share it
            namespace=namespace,
            exchange=exchange,
            max_body_bytes=max_body_bytes,
            unwrap=unwrap,
            telemetry=self._telemetry,
            coordinator=self.coordinator,
        )
        wrapped = Wrapped(shared, registry, publisher, queue or consumer)
        remember_declarer(wrapped)
        wrapped.keep_up()
        return wrapped


class Wrapped(ForkAware):
    """What `Inbox.wrap` answers: call it with a message, or give `on_message` to a `kombu.Consumer`.

    Example:
        >>> from idemp import Idempotent
        >>> from idemp.inbox.memory import InMemoryStore
        >>> def ship(message: dict[str, int]) -> None: ...
        >>> handle = Inbox(InMemoryStore()).wrap(ship, type="shop.Ship", consumer="shop", policy=Idempotent(key="id"))
        >>> handle({"id": 1}).name, handle({"id": 1}).name
        ('HANDLED', 'SKIPPED')
    """

    def __init__(self, consumer: Consumer, registry: Registry, publisher: Publisher | None, queue: str) -> None:
        self._consumer = consumer
        self._registry = registry
        self._publisher = publisher
        self._queue = queue
        self._local = threading.local()
        self._next_upkeep = 0.0
        self._next_agreement = 0.0
        self._agreed = not hasattr(publisher, "identity")
        self._settler: Any = None
        self._pause: Callable[[float], object] = time.sleep
        self.track()

    def after_fork_in_child(self) -> None:
        """Begin anew: marks that are not recorded yet, and the heartbeat, are the parent's."""
        self._local = threading.local()
        self._settler = None
        self._next_upkeep = 0.0

    @property
    def consumer(self) -> str:
        """The scope of its inbox keys."""
        return self._consumer.name

    @property
    def queue(self) -> str:
        """Where kombu's consumer takes its messages from."""
        return self._queue

    @property
    def registry(self) -> Registry:
        """The function as a handler."""
        return self._registry

    @property
    def given_store(self) -> InboxStore:
        """The inbox that it was wrapped with."""
        return self._consumer.store

    @property
    def session_factory(self) -> sessionmaker[Any] | None:
        """What makes `ctx.session`, where the inbox is in SQL."""
        factory: sessionmaker[Any] | None = getattr(self._consumer.store, "session_factory", None)
        return factory

    def __call__(self, message: Any, *, attempt: int = 1) -> Outcome:
        """Handle one message; if the call returns, the message may be acked.

        Args:
            message: a `Message`, a kombu message, or an object of the message class.
            attempt: which attempt on this message it is, from 1.

        Returns:
            HANDLED, REDISPATCHED or SKIPPED; PENDING if outputs without a confirm are left to a relay that is alive.

        Raises:
            IdInFlight: another run has the message's id now. Nothing was committed here: deliver the message again later.
            DispatchIncomplete: committed, but outputs have no confirm and no relay is alive. Deliver the message again,
                which sends them, or start a relay.
            MessageError: it can't be handled, ever.
            StoreError: the database could not do its part; `committed` says which way it went.
            Exception: whatever the function raised; its work was rolled back.
        """
        outcome = self.outcome(message, attempt=attempt)
        if isinstance(self._protocol().settlement(outcome), Ack):
            return outcome
        if outcome is Outcome.PENDING:
            raise DispatchIncomplete(
                "Outputs of the message have no confirm yet, and no relay is alive.",
                committed="yes",
                reasons=(),
                fix="Don't ack it: deliver it again, which sends them; or run `idemp relay` on the same database.",
            )
        raise IdInFlight(
            "Another run handles this message's id right now.", fix="Don't ack it: deliver it again in a few seconds."
        )

    def outcome(self, message: Any, *, attempt: int = 1) -> Outcome:
        """Handle one message as a call does, and return every outcome, also those after which it must not be acked.

        Args:
            message: as for a call.
            attempt: as for a call.

        Returns:
            HANDLED, REDISPATCHED, SKIPPED, PENDING (committed, outputs without a confirm) or IN_FLIGHT (nothing was done:
            another run has the id).

        Raises:
            Exception: as a call does, except `IdInFlight` and `DispatchIncomplete` of stored outputs.

        Example:
            >>> from idemp import Context, Idempotent
            >>> from idemp.inbox.memory import InMemoryStore
            >>> def ship(message: dict[str, int], ctx: Context) -> None:
            ...     ctx.send({}, to="stock", type="stock.Reserve")
            >>> inbox = Inbox(InMemoryStore())
            >>> handle = inbox.wrap(ship, type="shop.Ship", consumer="shop", policy=Idempotent(key="id"))
            >>> handle.outcome({"id": 1}).name  # without a publisher
            'PENDING'
        """
        outcome = self._protocol().process(self._as_message(message), attempt=attempt)
        self.flush()
        self.keep_up()
        return outcome

    def on_message(self, kombu_message: Any) -> Outcome | None:
        """Handle and settle one kombu message: ack, delayed retry or dead letter.

        For `kombu.Consumer(..., on_message=handle.on_message)`, without `no_ack`. Never raises for what a message or the
        database did; how each delivery ended is logged.

        Returns:
            The outcome; `None` where the message comes again, since the database or the broker is away.

        Raises:
            ConfigurationError: there is no publisher, which retries and dead letters need.
        """
        return self._settled(kombu_message, self._handled)

    def on_decode_error(self, kombu_message: Any, error: Exception) -> Outcome | None:
        """Park a message whose body kombu can't read, such as one with an unknown `compression` header.

        For `kombu.Consumer(..., on_message=handle.on_message, on_decode_error=handle.on_decode_error)`: without it such a
        message ends the consumer, returns to the queue and ends the next one.

        Returns:
            PARKED; `None` if the broker is away and the message comes again.

        Raises:
            ConfigurationError: there is no publisher, which dead letters need.
        """
        compression = (kombu_message.headers or {}).get("compression")
        said = f" (its header says compression={compression!r})" if compression is not None else ""
        failure = UndecodableMessage(f"kombu can't read the body{said}: {text_of(error)}.", fix="Correct the producer.")
        return self._settled(
            kombu_message,
            lambda delivery: (Outcome.PARKED, settlement_of_failure(self._consumer, delivery, failure)),
        )

    def _settled(
        self, kombu_message: Any, handle: Callable[[Delivery], tuple[Outcome | None, Settlement]]
    ) -> Outcome | None:
        settler = self._kombu_settler()
        delivery: Delivery = settler.delivery(kombu_message)
        began = time.monotonic()
        outcome, settlement = handle(delivery)
        try:
            settler.settle(delivery, settlement)
        except BrokerError as error:
            # No copy could be made, and the consuming connection may be fine: left unacked it would use up the prefetch.
            log.warning(
                "given back to the queue: %s",
                error,
                extra={"event": "given_back", **about(self._consumer.name, delivery)},
            )
            self._pause(_GIVE_BACK_SECONDS)
            with suppress(BrokerError):
                settler.settle(delivery, Release())
            return None
        if outcome is not None:
            tell(self._consumer.name, delivery, outcome, settlement, seconds=time.monotonic() - began)
        self._protocol().dispatcher.flush_if_due()
        self.keep_up()
        return outcome

    def flush(self) -> None:
        """Record what was confirmed but not recorded yet."""
        self._protocol().dispatcher.flush()

    def keep_up(self) -> None:
        """Show life and look how far the window reaches, every few seconds; called by `on_message`."""
        now = self._consumer.clock.monotonic()
        if now < self._next_upkeep:
            return
        self._next_upkeep = now + _UPKEEP_SECONDS
        store: Any = self._consumer.store
        retentions = [item.policy.retention for item in self._registry.registrations()]
        try:
            store.upkeep.beat(store.worker, relay=False, consumers=[self._consumer.name])
            store.refresh_horizons(self._consumer.name, retentions)
            tell_pending(self._consumer.telemetry, [store.upkeep])
        except StoreError:
            return

    def _handled(self, delivery: Delivery) -> tuple[Outcome | None, Settlement]:
        try:
            return self._protocol().handle(delivery)
        except LostBeforeCommit:
            return None, Release()
        except StoreUnavailable as error:
            log.warning(
                "the database takes no handlings: %s",
                error,
                extra={"event": "outage", "consumer": self._consumer.name, "error": type(error).__name__},
            )
            # By a delay tier: given back to the queue it would come at once, and each time count as a failed delivery.
            return None, Retry(UNCONFIRMED_DELAY, counted=False)

    def _agree_broker(self) -> None:
        """See that the outputs belong to the publisher's broker, once it can be reached; tried every few seconds."""
        now = self._consumer.clock.monotonic()
        if now < self._next_agreement:
            return
        self._next_agreement = now + _UPKEEP_SECONDS
        with suppress(BrokerError, StoreUnavailable):
            self._consumer.store.upkeep.agree_broker(self._publisher.identity())  # type: ignore[union-attr]
            self._agreed = True

    def _protocol(self) -> Protocol:
        check_process()
        if not self._agreed:
            self._agree_broker()
        found: Protocol | None = getattr(self._local, "protocol", None)
        if found is None:
            publisher = self._publisher or _NoPublisher()
            dispatcher = Dispatcher(publisher, self._consumer.store, self._consumer.clock)
            found = self._local.protocol = Protocol(self._consumer, dispatcher, turns=_TURNS)
        return found

    def _as_message(self, given: Any) -> Message:
        if isinstance(given, Message):
            return given
        if hasattr(given, "delivery_info") and hasattr(given, "properties"):
            delivery: Delivery = self._kombu_settler().delivery(given)
            return delivery.message
        registration = self._registry.registrations()[0]
        return Message(body=registration.codec.encode(given), type=registration.message_type)

    def _kombu_settler(self) -> Any:
        if self._settler is None:
            if self._publisher is None:
                raise ConfigurationError(
                    "on_message needs a publisher: retries and dead letters are confirmed copies.",
                    fix='Give wrap() publisher=ConfirmingPublisher("pyamqp://…").',
                )
            from idemp.broker.kombu import KombuSettler

            publisher: Any = self._publisher
            self._settler = KombuSettler(publisher, self._queue)
        return self._settler


def _is_store(given: Engine | InboxStore) -> TypeGuard[InboxStore]:
    return hasattr(given, "note_start")


def _coordinator(store: InboxStore, databases: Mapping[str, Any]) -> Coordinator:
    from idemp.twophase.sql import coordinator_of

    return coordinator_of(store, databases)


def _sql_store(engine: Any, *, schema: str | None, prefix: str, **options: Any) -> InboxStore:
    from idemp.inbox.sql import SqlStore, shared_tables

    return SqlStore(engine, tables=shared_tables(schema, prefix), **options)


class _NoPublisher:
    """Confirms nothing: outputs stay pending for a relay."""

    def publish(self, outputs: Sequence[Output], timeout: float) -> list[Refusal | None]:
        del timeout
        return [Refusal("closed", "there is no publisher") for _ in outputs]

    def keep_alive(self) -> None:
        """Nothing to service."""

    def close(self) -> None:
        """Nothing to close."""
