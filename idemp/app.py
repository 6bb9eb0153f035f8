"""The App: one consumer's handlers, policies and wiring."""

from __future__ import annotations

import threading
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from idemp.broker.guarantees import guarantees_of
from idemp.broker.making import make_broker, missing_file
from idemp.broker.port import Binding, Topology
from idemp.clock import Clock, SystemClock
from idemp.cloudevents import unwrap, wrapper
from idemp.declaring import Declaring
from idemp.dispatch import Dispatcher
from idemp.errors import AlreadyHandled, ConfigurationError
from idemp.forking import renewed_in_child
from idemp.handlers import Registry
from idemp.identity import MAX_ID_BYTES, effective_id
from idemp.inbox.port import DEFAULT_BROKER
from idemp.initiation import Initiation, initiated
from idemp.lateness import LateGuard
from idemp.ordering import ORDERED_PREFETCH
from idemp.protocol import Protocol
from idemp.settings import Settings, load_settings
from idemp.settling import IN_FLIGHT_DELAY, UNCONFIRMED_DELAY
from idemp.startup import (
    agree_broker,
    agree_identities,
    check_broker_name,
    check_databases,
    check_effects,
    check_entities,
    check_guarantees,
    check_guard,
    check_horizon,
    check_order,
    check_replaceable,
    tell_fixed_prefetch,
    tell_unhandled_types,
    unhandled_types,
)
from idemp.telemetry import SILENT, Telemetry, together
from idemp.telemetry.wiring import traces_if
from idemp.work import Consumer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from datetime import timedelta

    from sqlalchemy import Engine
    from sqlalchemy.orm import sessionmaker

    from idemp.broker.port import Broker, Guarantees, Publisher
    from idemp.inbox.port import InboxStore
    from idemp.messages import Output
    from idemp.suspects import Turns
    from idemp.twophase import Coordinator


class App(Declaring):
    """One consumer: its handlers, their policies, and the database and broker they run on.

    Args:
        name: the consumer's name: the scope of its inbox keys, and the default name of its queue.
        database: a URL or a SQLAlchemy engine; default from the settings.
        broker: a URL or a `Broker`; default from the settings.
        broker_name: name of that broker in the database; default from the settings. Needed where apps of several brokers
            share a database.
        session_factory: makes `ctx.session`; a `sessionmaker` of the same engine.
        queue: the queue that it consumes; default its name.
        subscribe: whether the queue gets what is published under its types' names; else only what is sent to it, and what
            you bind to it yourself.
        default_type: the type of messages that come without one.
        settings: default: file, environment (see `idemp.settings`).
        store: an inbox of another kind than SQL.
        clock: source of time.
        version: the application's own version, told by its dead letters; default from the settings.
        telemetry: what looks on, beside what the settings say (`metrics_port`, `traces`).
        guard: what types with `late="guard"` ask; default the file that the settings name.
        databases: others that handlers of `TwoPhase` types write to, by name: a URL, a SQLAlchemy engine, or a
            `sessionmaker` that is bound to one; beside those of the settings.

    Raises:
        ConfigurationError: a name that can't be one, or a wrong setting.

    Example:
        >>> app = App("orders", database="sqlite://", broker="local://orders.db")
        >>> @app.handler(dict, type="orders.Ping")
        ... def ping(message: dict[str, object]) -> None: ...
        >>> app.queue, [registration.message_type for registration in app.registry.registrations()]
        ('orders', ['orders.Ping'])
    """

    def __init__(
        self,
        name: str,
        *,
        database: str | Engine | None = None,
        broker: str | Broker | None = None,
        broker_name: str | None = None,
        session_factory: sessionmaker[Any] | None = None,
        queue: str | None = None,
        subscribe: bool = True,
        default_type: str | None = None,
        settings: Settings | None = None,
        store: InboxStore | None = None,
        clock: Clock | None = None,
        version: str | None = None,
        telemetry: Telemetry = SILENT,
        guard: LateGuard | None = None,
        databases: Mapping[str, str | Engine | sessionmaker[Any]] | None = None,
    ) -> None:
        if not name or name != name.strip() or "\x00" in name or len(name.encode("utf-8")) > MAX_ID_BYTES:
            raise ConfigurationError(
                f"{name!r} can't be a consumer's name.", fix="Use 1 to 255 bytes, no outer blanks."
            )
        self.name = name
        self.queue = queue or name
        self._subscribes = subscribe
        self.clock = clock or SystemClock()
        self.version = version
        self._telemetry_given = telemetry
        self._telemetry: Telemetry | None = None
        self._guard = guard
        self._databases = dict(databases or {})
        self._coordinator: Coordinator | None = None
        self.registry = Registry(default_type=default_type)
        self._database = database
        self._broker_given = broker
        self._broker_name = broker_name
        self._session_factory = session_factory
        self._settings = settings
        self._store_given = self._store = store
        self._broker: Broker | None = None
        self._own_engine: Engine | None = None
        self._lock = renewed_in_child(threading.RLock())

    # Wiring ---------------------------------------------------------------------------------------------------------

    @property
    def settings(self) -> Settings:
        """The settings; read from file and environment at their first use."""
        with self._lock:
            if self._settings is None:
                self._settings = load_settings()
            return self._settings

    def configure(self, settings: Settings, *, database: bool = False, broker: bool = False) -> None:
        """Use other settings; only before database or broker were used, unless they are those that it has.

        Args:
            settings: these from now on.
            database: take the database from them even if the code names one.
            broker: likewise the broker.

        Raises:
            ConfigurationError: too late, or its claims stand with its entities and not in a database that could be another.
        """
        if settings == self._settings and not database and not broker:
            return
        if database:
            check_replaceable(self._store_given, "Leave out --database.")
        if self._broker is not None or (self._store is not None and self._settings is not None):
            raise ConfigurationError(f"App {self.name!r} is in use; its settings can't change any more.")
        self._settings = settings
        self._telemetry = None
        if database:
            self._database = self._store_given = self._store = self._coordinator = None
        if broker:
            self._broker_given = None

    @property
    def store(self) -> InboxStore:
        """The inbox; made at its first use."""
        with self._lock:
            if self._store is None:
                self._store = self._make_store()
            return self._store

    @property
    def given_store(self) -> InboxStore | None:
        """The store that its code names, if it does."""
        return self._store_given

    @property
    def names_database(self) -> bool:
        """Whether its code names the database, or a store; else the settings name the database."""
        return self._database is not None or self._store_given is not None

    @property
    def session_factory(self) -> sessionmaker[Any] | None:
        """What makes `ctx.session`, where the code names it."""
        return self._session_factory

    @property
    def broker_url(self) -> str | None:
        """The broker's URL, from code or settings; `None` where the code gives a `Broker`."""
        given = self._broker_given if self._broker_given is not None else self.settings.broker_url
        return given if isinstance(given, str) else None

    @property
    def broker(self) -> Broker:
        """The broker; made at its first use, connected when somebody consumes or publishes."""
        with self._lock:
            if self._broker is None:
                given = self._broker_given
                self._broker = (
                    make_broker(given or self.settings.broker_url, self.settings)
                    if given is None or isinstance(given, str)
                    else given
                )
            return self._broker

    @property
    def broker_name(self) -> str | None:
        """Name of the broker in the database, where code or settings say one."""
        if self._broker_name is not None or "broker_name" not in self.settings.model_fields_set:
            return self._broker_name
        return self.settings.broker_name

    @property
    def telemetry(self) -> Telemetry:
        """What looks on: what was given, traces if the settings want them, and the worker's metrics."""
        with self._lock:
            if self._telemetry is None:
                self._telemetry = together(self._telemetry_given, traces_if(wanted=self.settings.traces))
            return self._telemetry

    @property
    def guard(self) -> LateGuard | None:
        """What knows ids beyond the retention window: what was given, or the file that the settings name."""
        with self._lock:
            if self._guard is None and self.settings.guard is not None:
                self._guard = LateGuard(self.settings.guard)
            return self._guard

    @property
    def coordinator(self) -> Coordinator | None:
        """What commits in several databases, where there are others than the inbox's; made at its first use."""
        with self._lock:
            given = {**self.settings.databases, **self._databases}
            if self._coordinator is None and given:
                from idemp.twophase.sql import coordinator_of

                self._coordinator = coordinator_of(self.store, given)
            return self._coordinator

    def observe(self, telemetry: Telemetry) -> None:
        """Have something more look on; protocols that exist already don't know it."""
        with self._lock:
            self._telemetry = together(self.telemetry, telemetry)

    @property
    def consumer(self) -> Consumer:
        """What all deliveries share."""
        settings = self.settings
        self.registry.build(settings.messages)
        return Consumer(
            name=self.name,
            store=self.store,
            find=self.registry.find,
            types=self.registry.types,
            clock=getattr(self.store, "clock", self.clock),  # one for all who share it
            namespace=settings.namespace,
            exchange=settings.exchange,
            max_body_bytes=settings.max_body_bytes,
            unwrap=unwrap,
            wrap=wrapper(settings.wire, settings.source or f"/idemp/{self.name}", self.clock),
            relay_after=settings.relay_after,
            app_version=self.version or settings.app_version,
            telemetry=self.telemetry,
            guard=self.guard,
            encode_effect=None if self.store.per_entity else self.registry.encode_effect,
            coordinator=self.coordinator,
        )

    def protocol(self, publisher: Publisher, turns: Turns | None = None) -> Protocol:
        """The protocol for one worker thread, which owns the publisher and shares the turns with the others."""
        consumer = self.consumer
        return Protocol(consumer, Dispatcher(publisher, consumer.store, self.clock), turns=turns)

    def topology(self) -> Topology:
        """What the app needs on the broker: its queue, and a binding for each type that it handles."""
        registrations = self.registry.registrations()
        names = [name for item in registrations for name in (item.message_type, *item.aliases)]
        delays = {IN_FLIGHT_DELAY, UNCONFIRMED_DELAY}.union(*(item.policy.all_delays for item in registrations))
        return Topology(
            exchange=self.settings.exchange,
            queues=(self.queue,),
            bindings=tuple(Binding(self.queue, name) for name in names if self._subscribes),
            delays=tuple(sorted(delay.total_seconds() for delay in delays)),
            single_active=self.keeps_order,
        )

    @property
    def keeps_order(self) -> bool:
        """Whether a type of it keeps an order, for which its queue has one active consumer at a time."""
        return any(item.policy.ordered_by is not None for item in self.registry.registrations())

    @property
    def prefetch(self) -> int:
        """Unsettled deliveries that the broker sends ahead: two batches at least, one of which waits for its confirms.

        Where a type keeps an order, always the same number, and batches of other types take what fits.
        """
        if self.keeps_order:
            return ORDERED_PREFETCH
        largest = max((item.policy.batch for item in self.registry.registrations()), default=1)
        return max(self.settings.prefetch, 2 * largest if largest > 1 else 1)

    def start(self) -> None:
        """Check everything that can be checked before the first message, and declare what the broker needs.

        Raises:
            ConfigurationError: settings, policies, schema, identities or guarantees are not as they must be.
            StoreUnavailable: the database can't be reached.
            BrokerUnavailable: the broker can't be reached.
        """
        self.registry.build(self.settings.messages)
        settings, registrations = self.settings, self.registry.registrations()
        guarantees = self._guarantees()
        check_guarantees(guarantees, allow_at_most_once=settings.allow_at_most_once)
        check_order(guarantees, registrations)
        check_guard(self.guard, registrations)
        check_entities(self.store, registrations)
        check_effects(self.store, self.registry.effects)
        check_databases(self.coordinator, registrations)
        if self.keeps_order and "prefetch" in settings.model_fields_set:
            tell_fixed_prefetch(self.name, settings.prefetch)
        check_horizon(guarantees, settings.redelivery_horizon, self.retentions())
        self.store.verify()
        self.store.prepare(self.name, [item.message_type for item in registrations])
        agree_identities(self.store, self.name, self.queue, self.registry)
        tell_unhandled_types(self.name, unhandled_types(self.store, self.name, self.registry))
        self.store.refresh_horizons(self.name, self.retentions().values())
        check_broker_name(self.store, self.broker_name)
        agree_broker(self.store, self.broker)
        self.broker.declare(self.topology())
        if self.prepared is not None:
            self.prepared.verify()
        if self.coordinator is not None:
            self.coordinator.verify()

    def _guarantees(self) -> Guarantees:
        """What the broker promises; an embedded one that does not exist yet is not made for the question."""
        url = self.broker_url
        if self._broker is None and url is not None and missing_file(url) is not None:
            return guarantees_of(url)
        return self.broker.guarantees

    def retentions(self) -> dict[str, timedelta]:
        """The retention window per opted-in type."""
        return {
            item.message_type: item.policy.retention for item in self.registry.registrations() if item.policy.idempotent
        }

    def consumers(self) -> list[str]:
        """The consumer's name, and former names whose claims still count; all of them age while it consumes."""
        former = {
            earlier.consumer
            for item in self.registry.registrations()
            for earlier in item.policy.previous
            if earlier.consumer is not None and earlier.consumer != self.name
        }
        return [self.name, *sorted(former)]

    def close(self) -> None:
        """End database connections that the app itself opened; it may be configured anew, if it never used its broker."""
        with self._lock:
            if self._store is not None:
                self._store.close()
            if self._coordinator is not None:
                self._coordinator.close()
            if self._own_engine is not None:
                self._own_engine.dispose()
            self._store, self._own_engine, self._coordinator = self._store_given, None, None

    # Initiations ----------------------------------------------------------------------------------------------------

    @contextmanager
    def initiate(self, id: str | None = None) -> Iterator[Initiation]:
        """A unit of work outside any handler (an HTTP request, a cron job): one transaction, stored outputs.

        The outputs are sent by a relay, after COMMIT. With an `id` the block runs once within the consumer's window.

        Args:
            id: what makes two initiations the same; without it a time-ordered one is minted.

        Raises:
            InvalidId: the id is empty, no text, or longer than 255 bytes.
            AlreadyHandled: at `with`, the id was handled before; the error has the stored outputs.
            IdInFlight: at `with`, another initiation with this id is still running.
            StoreError: the database could not do its part; `committed` says which way it went.

        Example:
            >>> from idemp.inbox.memory import InMemoryStore
            >>> app = App("shop", store=InMemoryStore(), broker="local://shop.db")
            >>> with app.initiate(id="request-1") as unit:
            ...     _ = unit.send({"sku": "A-1"}, to="stock", type="stock.Reserve")
            >>> with app.initiate(id="request-1") as unit:
            ...     pass
            Traceback (most recent call last):
            ...
            idemp.errors.AlreadyHandled: Initiation 'request-1' was handled before. The database was committed.
        """
        with initiated(self.consumer, id) as unit:
            yield unit

    def run_once(self, id: str, function: Callable[[Initiation], object]) -> tuple[Output, ...]:
        """Run a function in an initiation unless its id was handled before; the stored outputs either way.

        Raises:
            InvalidId: the id is empty, no text, or longer than 255 bytes.
            IdInFlight: another initiation with this id is still running.
            Exception: what the function raised; nothing was stored.
        """
        effective_id("initiation", id)  # without one, `initiate` mints another each time
        with ExitStack() as stack:
            try:
                unit = stack.enter_context(self.initiate(id=id))
            except AlreadyHandled as handled:  # this one; what the function meets inside is its own affair
                return handled.outputs
            function(unit)
        return unit.outputs

    # Inside ---------------------------------------------------------------------------------------------------------

    def _make_store(self) -> InboxStore:
        from idemp.inbox.sql import create_engine_safely

        database = self._database if self._database is not None else self.settings.database_url
        if isinstance(database, str):
            database = self._own_engine = create_engine_safely(database)
        return self.store_on(database)

    def store_on(self, engine: Engine) -> InboxStore:
        """An inbox on another engine, with the tables that the settings name; its end is its caller's."""
        from idemp.inbox.sql import SqlStore, shared_tables

        settings = self.settings
        return SqlStore(
            engine,
            tables=shared_tables(settings.schema_name, settings.table_prefix),
            session_factory=self._session_factory,
            clock=self.clock,
            broker=self.broker_name or DEFAULT_BROKER,
        )
