"""Property-based redelivery tests of your own handlers, by Hypothesis.

`redelivery_machine` publishes messages of your strategies to your handlers and lets happen what happens in production:
duplicates, reordering, deaths at every named point, commits whose answer is lost, refused and unconfirmed outputs, lost
acks, a database that is away, a second worker in between, relays, cleaners, the passing of time, replayed dead letters.
Then it lets everything come to rest and compares with an execution of each message once, in the same order, without
faults.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Final

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from hypothesis.strategies import SearchStrategy

from idemp.errors import ConfigurationError
from idemp.messages import Message
from idemp.testing.crash_points import CRASH_POINTS
from idemp.testing.deadline import SECONDS
from idemp.testing.options import kinds
from idemp.testing.running import ANSWERS, ANYWHERE, COMPETING_POINTS, MOST_OF_A_TIE, Run
from idemp.testing.story import published
from idemp.testing.subject import told
from idemp.testing.world import World

if TYPE_CHECKING:
    from sqlalchemy import Engine, MetaData

    from idemp.app import App
    from idemp.testing.findings import Kind
    from idemp.testing.premises import MakesStore
    from idemp.testing.report import Report
    from idemp.testing.story import Action
    from idemp.wrap import Wrapped

Messages = Mapping[Any, SearchStrategy[Any]] | SearchStrategy[Any]
"""Strategies by message class or type name; or one strategy of message objects (or `idemp.Message`)."""

Stateful = type[RuleBasedStateMachine]

STEPS: Final = 10
"""Steps of one example, unless the settings say otherwise."""

_FAULTS: Final = ["lost, committed", "lost, not committed", "transient", "away"]
_SECONDS: Final = [1, 60, 3_600, 86_400, 864_000]
_PHASES: Final = (Phase.explicit, Phase.reuse, Phase.generate)  # `raise_shortest` shortens failures, in whole steps


def redelivery_machine(
    app: App | Wrapped,
    *,
    messages: Messages,
    state: Callable[[Any], Any] | None = None,
    invariants: Sequence[Callable[[Any], object]] = (),
    setup: Callable[[Any], object] | None = None,
    database: str = "sqlite://",
    tables: MetaData | Callable[[Engine], object] | None = None,
    rehearse: bool = True,
    detect: Collection[Kind] | None = None,
    store: MakesStore | None = None,
    deadline: float = SECONDS,
) -> Stateful:
    """A state machine that attacks the handlers of an app; its `TestCase` is what pytest and unittest run.

    A message whose handler always fails ends in the dead-letter queue, which is no finding. But if that is so for all
    messages of a type, and not on purpose (`Refuse`, `refuse_on`), nothing was shown: that is a failure, told after 20 such
    messages or at the end of the class, with the first of their errors. On SQLite one transaction
    writes at a time, so that there a second worker comes in only before and after the first one's transaction; on other
    databases it also finds the claim held.

    Args:
        app: an `App`, or what `Inbox.wrap` answered; its own database and broker are not touched.
        messages: what is published: strategies by message class or type name, or one strategy of message objects.
        state: what must be the same as when each message is handled once; ORM objects count by their columns. Leave out what
            differs from run to run, such as ids that the database counts up or its own time. Default: how many rows each
            table has.
        invariants: called with a session after every step; one that raises or answers `False` fails.
        setup: writes what is there before the first message; it is committed.
        database: a URL; all rows there are deleted. In memory by default.
        tables: the user's tables: `Base.metadata`, or what makes them on an engine.
        rehearse: also run the detectors of `idemp.testing.detectors` on the first messages of each type.
        detect: kinds of findings that the detectors look for, as in `assert_idempotent`; default `DEFAULT` of
            `idemp.testing.detectors`. `DEFAULT - {"file"}` leaves one out.
        store: makes an empty inbox on a clock, for handlers on streams or documents. `state`, `invariants` and `setup` are
            then called with it instead of a session, the default of `state` is nothing, and the detectors are left out: they
            look at what a handler does to a database. A step of time has an hour at most in which the consumer consumes.
        deadline: the seconds that one run of a handler may take; then it is interrupted, and `HandlerHangs` shows where it
            stood.

    Returns:
        A subclass of Hypothesis' `RuleBasedStateMachine`. Its settings are the profile's, with shorter examples (10 steps);
        set `TestOrders.settings` for others. A failure shows the shortened story and its schedule, which `replay` takes,
        and a report of what was tested, which `report()` of the machine returns.

    Raises:
        ConfigurationError: `app` is no app, `messages` are no strategies, or `detect` names what nothing looks for.

    Example:
        >>> from hypothesis import strategies as st
        >>> from idemp import App, Context, Idempotent
        >>> app = App("orders")
        >>> handled = []
        >>> @app.handler(dict, type="orders.Place", policy=Idempotent(key="id"))
        ... def place(message: dict[str, int], ctx: Context) -> None:
        ...     handled.append(message["id"])
        ...     ctx.send({"number": len(handled)}, to="stock", type="stock.Reserve")
        >>> Orders = redelivery_machine(
        ...     app, messages={"orders.Place": st.fixed_dictionaries({"id": st.integers(0, 2)})}, rehearse=False
        ... )
        >>> TestOrders = Orders.TestCase
        >>> schedule = [("publish", "orders.Place", '{"id":0}'), ("deliver",)]
        >>> try:
        ...     replay(app, schedule)
        ... except AssertionError as broken:
        ...     print(broken)
        The output ... is not the one that is sent with each message handled once...
    """
    _, _, registry = told(app)
    wanted = None if detect is None else kinds(detect, but=["order"])
    world = World(
        app,
        state,
        tuple(invariants),
        setup,
        database,
        tables,
        rehearse=rehearse,
        detect=wanted,
        store=store,
        deadline=deadline,
    )
    handlers = registry.registrations()
    names = {
        "world": world,
        "messages": _drawn(messages),
        "competing_points": ANYWHERE if store is not None else COMPETING_POINTS[database.startswith("sqlite")],
        "purges": all(item.policy.late == "park" for item in handlers if item.policy.idempotent),
        "holds_claims": store is None and not database.startswith("sqlite"),
        "__doc__": f"Attacks the handlers of {app!r}.",
    }
    machine: Stateful = type("RedeliveryMachine", (_Machine,), names)
    weakref.finalize(machine, world.close)
    machine.TestCase.settings = settings(
        deadline=None,
        stateful_step_count=STEPS,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
        phases=_PHASES,
    )
    machine.TestCase.runTest = _run_test(machine)  # type: ignore[method-assign, assignment]
    machine.TestCase.tearDownClass = classmethod(lambda _: _ended(world))  # type: ignore[assignment]
    return machine


def replay(
    app: App | Wrapped,
    schedule: Sequence[Action],
    *,
    state: Callable[[Any], Any] | None = None,
    invariants: Sequence[Callable[[Any], object]] = (),
    setup: Callable[[Any], object] | None = None,
    database: str = "sqlite://",
    tables: MetaData | Callable[[Engine], object] | None = None,
    rehearse: bool = False,
    detect: Collection[Kind] | None = None,
    store: MakesStore | None = None,
    deadline: float = SECONDS,
) -> list[str]:
    """Run exactly these steps again, without Hypothesis: the regression test for what a machine found.

    Args:
        app: as for `redelivery_machine`, like all arguments but the next.
        schedule: what a failure printed.
        state: see there.
        invariants: see there.
        setup: see there.
        database: see there.
        tables: see there.
        rehearse: run the detectors, too; default not.
        detect: kinds of findings that they look for; see there.
        store: see there.
        deadline: see there.

    Returns:
        The story: a sentence for each step.

    Raises:
        Exception: a promise or an invariant does not hold (an `AssertionError` of ours); the error tells the story.
        ConfigurationError: there is no such step, or nothing it could do is called so.

    Example:
        >>> from idemp import App, Idempotent
        >>> app = App("orders")
        >>> @app.handler(dict, type="orders.Place", policy=Idempotent(key="id"))
        ... def place(message: dict[str, int]) -> None: ...
        >>> replay(app, [("publish", "orders.Place", '{"id":0}'), ("crash", "before commit")])[-1]
        "The worker died before commit of orders.Place 'message-1'."
    """
    wanted = None if detect is None else kinds(detect, but=["order"])
    made = World(
        app,
        state,
        tuple(invariants),
        setup,
        database,
        tables,
        rehearse=rehearse,
        detect=wanted,
        store=store,
        deadline=deadline,
    )
    with closing(made) as world:
        return world.play(schedule).story.sentences


def _run_test(machine: Any) -> Callable[[Any], None]:
    """Make the test method: it runs the machine, and a failure shows the kit's story alone.

    Hypothesis adds its own notes: the steps before they were shortened, and a `@reproduce_failure` that no method takes.
    """

    def run_test(test: Any) -> None:
        wanted = settings(
            test.settings,
            phases=[phase for phase in test.settings.phases if phase in _PHASES],
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=False,
            report_multiple_bugs=False,
        )
        try:
            run_state_machine_as_test(machine, settings=wanted)
        except Exception as error:
            machine.world.restore_notes(error)
            raise

    run_test.is_hypothesis_test = True  # type: ignore[attr-defined]
    run_test._hypothesis_state_machine_class = machine  # type: ignore[attr-defined]  # noqa: SLF001 - as Hypothesis' own
    return run_test


def _ended(world: World) -> None:
    """All examples have run: were there messages of every type that were handled?"""
    try:
        world.check_handled()
        world.warn_of_unseen()
    finally:
        world.close()


def _something_waits(machine: Any) -> bool:
    return bool(machine.run.waiting)


class _Machine(RuleBasedStateMachine):
    """The rules; a subclass knows whose handlers are attacked."""

    world: ClassVar[World]
    messages: ClassVar[SearchStrategy[tuple[str | None, Any]]]
    competing_points: ClassVar[tuple[str, ...]]
    purges: ClassVar[bool]
    holds_claims: ClassVar[bool]

    @classmethod
    def report(cls) -> Report:
        """What was tested in all examples so far, and what could not be seen."""
        return cls.world.report()

    def __init__(self) -> None:
        super().__init__()
        self.run = self.world.run()
        self._failed = False

    def _do(self, *action: Any) -> None:
        with self._shortened():
            self.run.do(action)

    @contextmanager
    def _shortened(self, *, resting: bool = False) -> Iterator[None]:
        schedule = self.run.story.schedule
        try:
            yield
        except Exception as error:  # noqa: BLE001 - a shorter way to it is raised
            self._failed = True
            self.world.raise_shortest(schedule, error, resting=resting)
        except BaseException:
            self._failed = True
            raise
        try:
            self.world.raise_unlike(schedule, resting=resting)
        except Exception:
            self._failed = True
            raise

    @initialize(data=st.data())
    def first_message(self, data: st.DataObject) -> None:
        """There is something to deliver."""
        self.publish(data)

    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        """A producer publishes a message."""
        name, value = data.draw(self.messages)
        self._do(*published(_encoded(self.run, name, value)))

    @precondition(_something_waits)
    @rule()
    def deliver(self) -> None:
        """The worker handles the next message."""
        self._do("deliver")

    @rule(times=st.integers(2, 4))
    def deliver_several(self, times: int) -> None:
        """The worker handles the next messages."""
        for _ in range(times):
            self._do("deliver")

    @rule(index=st.integers(0, 3))
    def duplicate(self, index: int) -> None:
        """The producer publishes a message once more."""
        self._do("duplicate", index)

    @precondition(_something_waits)
    @rule()
    def reorder(self) -> None:
        """The next message comes last."""
        self._do("reorder")

    @precondition(_something_waits)
    @rule(point=st.sampled_from([point.name for point in CRASH_POINTS]), times=st.integers(1, 2))
    def crash(self, point: str, times: int) -> None:
        """The worker dies while it handles the next message; the second death in a row counts as an attempt."""
        for _ in range(times):
            self._do("crash", point)

    @precondition(_something_waits)
    @rule(fault=st.sampled_from(_FAULTS))
    def fail_commit(self, fault: str) -> None:
        """COMMIT fails, or only seems to."""
        self._do("fail commit", fault)

    @precondition(_something_waits)
    @rule(answer=st.sampled_from(ANSWERS), confirmed=st.integers(0, 1))
    def refuse_output(self, answer: str, confirmed: int) -> None:
        """The broker refuses an output, or its confirm is lost."""
        self._do("refuse output", answer, confirmed)

    @precondition(_something_waits)
    @rule()
    def lose_ack(self) -> None:
        """The message comes again though it was handled."""
        self._do("lose ack")

    @precondition(_something_waits)
    @rule(times=st.sampled_from([1, MOST_OF_A_TIE]), away=st.booleans())
    def lose_database(self, times: int, away: bool) -> None:
        """The database is away, or busy with others."""
        self._do("database away" if away else "database busy", times)

    @precondition(lambda self: self.holds_claims and _something_waits(self))
    @rule()
    def hold_claim(self) -> None:
        """Another process holds the claim."""
        self._do("hold claim")

    @precondition(_something_waits)
    @rule(data=st.data())
    def compete(self, data: st.DataObject) -> None:
        """A second worker gets the same message meanwhile."""
        self._do("compete", data.draw(st.sampled_from(self.competing_points)))

    @rule()
    def restart(self) -> None:
        """A deploy."""
        self._do("restart")

    @rule()
    def relay(self) -> None:
        """The relay ships what is pending."""
        self._do("relay")

    @rule(sent=st.integers(0, 1))
    def crash_relay(self, sent: int) -> None:
        """The relay dies between outputs."""
        self._do("crash relay", sent)

    @precondition(lambda self: self.purges)
    @rule()
    def purge(self) -> None:
        """The cleaner deletes old claims."""
        self._do("purge")

    @rule(seconds=st.sampled_from(_SECONDS))
    def advance(self, seconds: int) -> None:
        """Time goes by."""
        self._do("advance", seconds)

    @precondition(lambda self: bool(self.run.harness.dead()))
    @rule()
    def replay(self) -> None:
        """Somebody replays the dead letters."""
        self._do("replay")

    def teardown(self) -> None:
        """Let everything come to rest, and compare."""
        if not self._failed:
            with self._shortened(resting=True):
                self.run.finish()
            self.world.check_handled(ended=False)


def _drawn(messages: Any) -> SearchStrategy[tuple[str | None, Any]]:
    given = {None: messages} if isinstance(messages, SearchStrategy) else messages
    if (
        not isinstance(given, Mapping)
        or not given
        or not all(isinstance(each, SearchStrategy) for each in given.values())
    ):
        raise ConfigurationError(
            "messages= needs Hypothesis strategies.",
            fix="Say messages={PlaceOrder: st.builds(PlaceOrder)} or messages=st.one_of(...).",
        )
    return st.one_of([_named(key, strategy) for key, strategy in given.items()])


def _named(key: Any, strategy: SearchStrategy[Any]) -> SearchStrategy[tuple[str | None, Any]]:
    name = key if isinstance(key, str) else None
    return strategy.map(lambda value: (name, value))


def _encoded(run: Run, name: str | None, value: Any) -> Message:
    if isinstance(value, Message):
        return value
    type_name, body = run.harness.registry.types.encode(value, name)
    return Message(body=body, type=type_name)
