"""A user's own handlers under test: on a database of the test's own, a broker in memory, and processes that can die."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Self
from uuid import UUID
from weakref import WeakKeyDictionary

from idemp.app import App
from idemp.broker.memory import InMemoryBroker
from idemp.broker.port import Binding, Topology
from idemp.deadletter import replayed_headers
from idemp.dispatch import Dispatcher
from idemp.errors import ConfigurationError, LostBeforeCommit, StoreUnavailable, UnknownMessageType
from idemp.messages import Message, Output, OutputKind
from idemp.protocol import Protocol
from idemp.relay import Relay, Round
from idemp.testing.clock import FakeClock
from idemp.testing.crash_points import Crash
from idemp.testing.databases import coordinator_on, stand_ins
from idemp.testing.deadline import SECONDS, Deadline, HandlerHangs, Hung
from idemp.testing.execution import Execution, Step, Tally, endless, told_output, told_returned
from idemp.testing.faulty import (
    DeclaringPublisher,
    FaultyPublisher,
    FaultyReceiver,
    FaultyStore,
    FaultyUnit,
    Script,
)
from idemp.testing.premises import SqlPremises, StorePremises
from idemp.testing.subject import settings_of, told
from idemp.twophase import Recovery

if TYPE_CHECKING:
    from types import TracebackType

    from sqlalchemy import Engine, MetaData

    from idemp.context import Context
    from idemp.testing.findings import Finding
    from idemp.testing.ground import Ground
    from idemp.testing.premises import MakesStore
    from idemp.twophase import Coordinator
    from idemp.work import Consumer, Registration
    from idemp.wrap import Wrapped

OUTPUTS_QUEUE: Final = "idemp.testing.outputs"
_PREFETCH: Final = 10
_LEASE: Final = timedelta(minutes=10)
_MOST_STEPS: Final = 500


class Harness:
    """Runs an app's handlers through the real protocol, one step at a time.

    The database is emptied (idemp's tables and the user's) by `begin_anew`, so never name one whose rows are needed.

    Args:
        app: an `App`, or what `Inbox.wrap` answered; its own database and broker are not touched.
        database: a URL.
        tables: the user's tables: `Base.metadata`, or what makes them on an engine.
        keep: begin with the tables and rows that are there.
        store: makes an empty inbox on a clock, instead of a database.
        deadline: the seconds that one run of a handler may take.

    Attributes:
        queue: where the app's messages come from.
        effects: what a worker would have done outside the database, in order; nothing is really done.
        compared: handlers that have been run in other processes.
        written: findings about values that were written, by the value: they hold if the state shows it.
        premises: where handlers keep what they do.
        databases: other databases of `TwoPhase` types, by name: stand-ins in memory, with the same tables.
        most_steps: after so many `rest` takes it that there is no end.
        tally: what was done in it since it was made, and what could not be seen.

    Raises:
        ConfigurationError: the database can't be used, or has rows in it that nobody said may be deleted, or `app` is
            neither.

    Example:
        >>> from idemp import App, Context, Idempotent
        >>> app = App("orders")
        >>> @app.handler(dict, type="orders.Place", policy=Idempotent(key="id"))
        ... def place(message: dict[str, int], ctx: Context) -> None:
        ...     ctx.send({"sku": 1}, to="stock", type="stock.Reserve")
        >>> with Harness(app) as harness:
        ...     _ = harness.send({"id": 7}, type="orders.Place")
        ...     harness.script.die("after commit")
        ...     print(harness.step().died, len(harness.publisher.sent))
        ...     print(harness.step().outcome.name, len(harness.publisher.sent))
        after commit 0
        REDISPATCHED 1
    """

    def __init__(
        self,
        app: App | Wrapped,
        *,
        database: str = "sqlite://",
        tables: MetaData | Callable[[Engine], object] | None = None,
        keep: bool = False,
        store: MakesStore | None = None,
        deadline: float = SECONDS,
    ) -> None:
        self._deadline = Deadline(deadline)
        self._given = app
        self._name, self.queue, self.registry = told(app)
        self.compared: set[str] = set()
        self.written: dict[str, Finding] = {}
        self.clock = FakeClock()
        self.premises = (
            SqlPremises(app, self.clock, database, tables, keep=keep)
            if store is None
            else StorePremises(store, self.clock)
        )
        self.premises.check(self.registry.registrations())
        self.databases = stand_ins(self.registry.registrations(), tables)
        self._coordinator: Coordinator | None = None
        if self.databases:
            self._coordinator = coordinator_on(self._database.store, self.databases)
        self.watching: Callable[[Callable[..., Any], Any, Context], AbstractContextManager[None]] = unwatched
        self.most_steps = _MOST_STEPS
        self.tally = Tally()
        self.claim_wait: timedelta | None = None  # instead of that of the policies, in tests that would only wait
        if keep:
            self._begin()
        else:
            self.begin_anew()

    @property
    def engine(self) -> Engine:
        """That of its database."""
        return self._database.engine

    @property
    def ground(self) -> Ground:
        """Its database, as something to be emptied."""
        return self._database.ground

    @property
    def _database(self) -> SqlPremises:
        if not isinstance(self.premises, SqlPremises):
            raise ConfigurationError("This needs a database.", fix="Leave out store=, or what asks for a database.")
        return self.premises

    # The world ------------------------------------------------------------------------------------------------------

    def not_seen(self, what: str) -> None:
        """Note a sentence for the report: what the kit could not look at."""
        self.tally.not_seen.setdefault(what)

    def begin_anew(self) -> None:
        """Everything as at the beginning: no rows, no messages, a new process."""
        self.clock.reset()
        self.premises.begin_anew()
        for each in self.databases.values():
            each.empty()
        self._begin()

    def _begin(self) -> None:
        self.clock.reset()
        self.script = Script()
        self.script.on_commit = self._committed
        self.executions: list[Execution] = []
        self.effects: list[Output] = []
        self._executions_of: WeakKeyDictionary[FaultyUnit, Execution] = WeakKeyDictionary()
        self.broker = InMemoryBroker(self.clock)
        self.store = FaultyStore(self.premises.store, self.script)
        self._app = App(
            self._name,
            queue=self.queue,
            store=self.store,
            broker=self.broker,
            settings=settings_of(self._given).model_copy(update={"databases": {}}),
            clock=self.clock,
        )
        self._app.registry = self.registry
        # Each run has to begin with the same: what a store remembers of windows is of the run before.
        self.premises.store.refresh_horizons(self._name, self._app.retentions().values())
        self.publisher = FaultyPublisher(DeclaringPublisher(self.broker), self.script)
        exchange = self._app.settings.exchange
        self.broker.declare(self._app.topology())
        self.broker.declare(
            Topology(exchange=exchange, queues=(OUTPUTS_QUEUE,), bindings=(Binding(OUTPUTS_QUEUE, "#"),))
        )
        self._receiver = FaultyReceiver(self.broker.receiver([self.queue], prefetch=_PREFETCH), self.script)
        self._protocol: Protocol | None = None
        self._redelivered = False
        self._sent = 0

    def close(self) -> None:
        """End what was opened."""
        for each in self.databases.values():
            each.close()
        self.premises.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Messages -------------------------------------------------------------------------------------------------------

    def message(
        self, value: Any, *, type: str | None = None, message_id: str | None = None, **properties: Any
    ) -> Message:
        """A message as a producer would make it, from an object of a message class; ids count up."""
        if isinstance(value, Message):
            return value
        name, body = self.registry.types.encode(value, type or (self._only_type() if isinstance(value, dict) else None))
        self._sent += 1
        return Message(body=body, type=name, message_id=message_id or f"message-{self._sent}", **properties)

    def send(self, value: Any, **properties: Any) -> Message:
        """Put a message, or what `message` makes of it, into the app's queue.

        Raises:
            ConfigurationError: no handler takes it.
        """
        message = self.message(value, **properties)
        try:
            self.registry.find(message)
        except UnknownMessageType as error:
            raise ConfigurationError(error.message, fix="Send what a handler of this app takes.") from error
        output = Output(
            id=UUID(int=0), ordinal=0, kind=OutputKind.SEND, exchange="", routing_key=self.queue, message=message
        )
        self.broker.publisher().publish([output], 1)
        self.tally.messages += 1
        return message

    def dead(self) -> list[Message]:
        """What is parked."""
        return self.broker.browse(f"{self.queue}.dead", 10_000)

    def replay(self, limit: int = 1) -> list[Message]:
        """Put parked messages back into the queue."""
        with self.broker.take(f"{self.queue}.dead", None, limit) as taken:
            for index, message in enumerate(taken.messages):
                self.send(replace(message, headers=replayed_headers(message.headers, self.clock.now())))
                taken.accept(index)
            return list(taken.messages)

    # Processes ------------------------------------------------------------------------------------------------------

    def process(self) -> Protocol:
        """The worker process that lives now: it knows what the database and the broker know, nothing else."""
        if self._protocol is None:
            self._protocol = self.another_process()
        return self._protocol

    def another_process(self) -> Protocol:
        """A worker process beside the one that lives now, on the same database and broker."""
        consumer = replace(self.consumer, find=self._find)
        dispatcher = Dispatcher(self.publisher, self.store, self.clock)
        return Protocol(consumer, dispatcher, pause=lambda _: None)

    @property
    def consumer(self) -> Consumer:
        """What all deliveries share."""
        return replace(self._app.consumer, coordinator=self._coordinator)

    def step(self, *, acks: bool = True, redelivered: bool | None = None) -> Step | None:
        """One delivery, if there is one. When the process dies, the next step finds a new one.

        Args:
            acks: `False` loses the settlement: the delivery comes again.
            redelivered: what the broker says of it, whatever it knows.

        Raises:
            HandlerHangs: the handler did not return within the deadline.
        """
        delivery = self._receiver.receive(0)
        if delivery is None:
            return None
        if redelivered is not None:
            delivery = replace(delivery, redelivered=redelivered)
        self._redelivered = delivery.redelivered
        self.tally.deliveries += 1
        try:
            outcome, settlement = self.process().handle(delivery)
            if not acks:
                self._reopen()
                return Step(delivery, outcome)
            self._receiver.settle(delivery, settlement)
            return Step(delivery, outcome, settlement)
        except (StoreUnavailable, LostBeforeCommit):
            self._reopen()
            return Step(delivery)
        except Hung as hung:
            self.restart(cleanly=False)
            raise HandlerHangs(str(hung)) from None
        except Crash as crash:
            self.restart(cleanly=False)
            self.tally.deaths[str(crash)] += 1
            return Step(delivery, died=str(crash))
        finally:
            self.script.clear()

    def steps(self) -> list[Step]:
        """Steps until nothing is ready in the queue."""
        taken: list[Step] = []
        while (step := self.step()) is not None and len(taken) < self.most_steps:
            taken.append(step)
        return taken

    def restart(self, *, cleanly: bool = True) -> None:
        """A new process; the old one records its marks before it ends, or dies with them."""
        if cleanly:
            self.process().dispatcher.flush()
        self._protocol = None
        if self._coordinator is not None:  # a worker's start
            Recovery(self._coordinator).run_once()
        self._reopen()

    def relay(self, **options: Any) -> Round:
        """One round of a relay, late enough for everything that is pending; then effects, unless it died."""
        self.clock.advance(_LEASE)
        try:
            done = Relay(self.premises.store.upkeep, self.publisher, **options).run_once()
            self.run_effects()
        except Crash:
            return Round()
        finally:
            self.script.clear()
        return done

    def run_effects(self) -> None:
        """Do the app's effects, as far as the store can tell: their functions would send mails."""
        upkeep = self.premises.store.upkeep
        while taken := [item.output for item in upkeep.take_effects(self._name, 100, _LEASE)]:
            self.effects += taken
            upkeep.settle_pending([output.id for output in taken], {}, timedelta(0))

    def purge(self) -> int:
        """Delete claims that are older than their windows, as the cleaner does; how many."""
        retentions = self._app.retentions()
        self.premises.store.refresh_horizons(self._name, list(retentions.values()))
        return self.premises.store.upkeep.purge(self._name, retentions, 100)

    def advance(self, by: timedelta) -> None:
        """Let time pass while the consumer consumes."""
        self.premises.consume(self._name, by)

    def rest(self) -> None:
        """Let everything come to an end: deliver what is in the queue, after its delays, and relay what is pending.

        Raises:
            AssertionError: it does not come to an end.
        """
        self.script.clear()
        longest = timedelta(seconds=max(self._app.topology().delays))
        quiet = False
        last: Step | None = None
        for _ in range(self.most_steps):
            step = self.step()
            if step is not None:
                quiet, last = False, step
            elif self.premises.relays and self._pending():
                self.relay()
            elif quiet:
                return
            else:  # what waits in a delay tier comes after the longest of them
                self.clock.advance(longest)
                quiet = True
        raise AssertionError(f"After {self.most_steps} steps there is still something to do.{endless(last)}")

    # What is seen ---------------------------------------------------------------------------------------------------

    def state(self, read: Callable[[Any], Any]) -> Any:
        """What the user's own function reads in a session, or of the store."""
        return self.premises.state(read)

    def _find(self, message: Message) -> Registration:
        registration = self.registry.find(message)
        policy = registration.policy
        if self.claim_wait is not None:
            policy = policy.model_copy(update={"claim_wait": self.claim_wait})
        return replace(registration, policy=policy, handler=lambda body, ctx: self._run(registration, body, ctx))

    def _run(self, registration: Registration, body: Any, ctx: Context) -> Any:
        execution = Execution(ctx.message, ctx.attempt, self._redelivered)
        self.executions.append(execution)
        self._executions_of[ctx._unit] = execution  # noqa: SLF001 - where it is committed, if it is

        name = getattr(registration.handler, "__qualname__", registration.message_type)

        def run() -> Any:
            with self._deadline.watching(name), self.watching(registration.handler, body, ctx):
                try:
                    result = registration.handler(body, ctx)
                    returned = list(result) if isinstance(result, Iterator) else result
                    execution.outputs = [told_output(output) for output in ctx.outputs]
                    execution.outputs += told_returned(returned, self.registry.types)
                    ctx._unit.flush()  # noqa: SLF001 - it comes next anyway, and what it sends is the handler's
                except BaseException as error:
                    execution.error = error
                    raise
                return returned

        return self.script.call("handler", run)

    def _committed(self, unit: FaultyUnit) -> None:
        execution = self._executions_of.get(unit)
        if execution is not None:
            execution.committed = True

    def _reopen(self) -> None:
        self._receiver.close()
        self._receiver = FaultyReceiver(self.broker.receiver([self.queue], prefetch=_PREFETCH), self.script)

    def _only_type(self) -> str | None:
        """Where one handler takes dicts, they need no type."""
        of_dicts = [handler.message_type for handler in self.registry.declared.values() if handler.cls is dict]
        return of_dicts[0] if len(of_dicts) == 1 else None

    def _pending(self) -> int:
        self.process().dispatcher.flush()
        return self.premises.store.upkeep.pending_count()


@contextmanager
def unwatched(function: Callable[..., Any], body: Any, ctx: Context) -> Iterator[None]:
    """Look at nothing."""
    del function, body, ctx
    yield
