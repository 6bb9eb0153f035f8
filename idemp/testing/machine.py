"""Redeliveries in any order: a state machine of Hypothesis over an app, its crashes, and outages of its database and its broker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final
from uuid import UUID

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from pydantic import BaseModel
from sqlalchemy import MetaData, func, select
from sqlalchemy.exc import TimeoutError as NoConnection
from sqlalchemy.orm import Session

from idemp.app import App
from idemp.errors import ConfigurationError, Unavailable
from idemp.messages import check_list
from idemp.ports import Broker
from idemp.testing.app import AppTest, step
from idemp.testing.crash_points import Crash, CrashPoints, outage
from idemp.testing.idempotence import rows_of
from idemp.worker import Worker

__all__ = ["PromiseBroken", "Redeliveries", "redelivery_machine", "replay"]

Message = BaseModel | Mapping[str, Any]
Step = tuple[Any, ...]
"""`("send", message)`, `("work", process)`, `("die", process, calls)`, `("fail", process, calls)`, `("lose", process)`,
`("wait", seconds)`."""

PROCESSES: Final = 2
CALLS: Final = 25  # of ports, in a turn of a worker and its relay
MOST: Final = 60  # stories that are tried to find a shorter one
HOURS: Final = 8  # within which retries come to their end


class PromiseBroken(AssertionError):
    """A handler, or an adapter, breaks a promise. The text tells the story, step by step.

    Attributes:
        schedule: For `replay`.

    Example:
        >>> print(PromiseBroken("message 0 is lost", ["message 0 is sent"], [("send", 0)]))
        message 0 is lost
        1. message 0 is sent
        Run it again: replay(machine, [('send', 0)])
    """

    def __init__(self, what: str, story: Sequence[str], schedule: Sequence[Step]) -> None:
        self.schedule = list(schedule)
        lines = [f"{number}. {line}" for number, line in enumerate(story, start=1)]
        super().__init__("\n".join([what, *lines, f"Run it again: replay(machine, {self.schedule})"]))


class Redeliveries(RuleBasedStateMachine):
    """Base class of the machines that `redelivery_machine` makes.

    Attributes:
        scenario: Runs schedules.

    Example:
        >>> issubclass(Redeliveries, RuleBasedStateMachine)
        True
    """

    scenario: ClassVar[_Scenario]

    def __init__(self) -> None:
        super().__init__()
        self._execution = _Execution(self.scenario)
        self._broken = False

    def perform(self, step: Step) -> None:
        """Perform a step; if it breaks a promise, find a shorter story and raise it."""
        self._try(lambda: self._execution.perform(step))

    def teardown(self) -> None:
        """Let all come to rest, and compare."""
        try:
            if not self._broken:
                self._try(self._execution.rest)
        finally:
            self._execution.close()

    def _try(self, function: Callable[[], None]) -> None:
        try:
            function()
        except Exception as error:  # noqa: BLE001 - it breaks a promise, whatever it is
            self._broken = True
            self._execution.close()
            raise self.scenario.shortened(self._execution.schedule, error) from _cause(error)


def redelivery_machine(
    app: App,
    *,
    messages: Sequence[Message],
    tables: MetaData | None = None,
    setup: Callable[[Session], object] | None = None,
    state: Callable[[Session], Any] | None = None,
    broker: Callable[[], Broker] | None = None,
) -> type[Redeliveries]:
    """Return a state machine that delivers messages in any order and number, while processes die and servers are away.

    Two processes of the app work; each may die, or lose its database or broker, before and after each call of a port. At rest, the
    app has to have done what it does when each message comes once: the same state, the same outputs, the same dead letters. No
    output has two bodies at any time.

    `TestOrders = redelivery_machine(…).TestCase` is a test for pytest and unittest; it has settings of Hypothesis.

    Args:
        app: Its handlers have to be idempotent or opted in.
        messages: Different messages. The same one may be sent several times.
        tables: Tables of the handlers, which are created.
        setup: Fills them at the beginning.
        state: Returns what has to be the same at rest; by default all rows of `tables`. Orders of messages differ.
        broker: Makes an empty broker for each story; by default one in memory. For tests of an adapter.

    Raises:
        ConfigurationError: There is no message, or nothing to compare.
        AssertionError: A message is not handled even if nothing happens.

    Example:
        >>> from idemp import Context, Idempotent
        >>> app = App("orders")
        >>> class PlaceOrder(BaseModel):
        ...     __message_type__ = "shop.PlaceOrder"
        ...     order_id: int
        >>> @app.handler(PlaceOrder, policy=Idempotent(key="order_id"))
        ... def place_order(command: PlaceOrder, ctx: Context) -> None:
        ...     ctx.send({"order_id": command.order_id}, to="stock", type="shop.ReserveStock")
        >>> machine = redelivery_machine(app, messages=[PlaceOrder(order_id=7)], state=lambda session: None)
        >>> replay(machine, [("send", 0), ("die", 0, 9), ("send", 0), ("work", 1)])
    """
    check_list(messages, "messages")
    if not messages:
        raise ConfigurationError("messages=[] has no message: nothing would be tested")
    if tables is None and state is None:
        raise ConfigurationError("pass tables= or state=: else effects would not be compared")
    state = state or (lambda session: rows_of(session, tables))
    scenario = _Scenario(app, list(messages), tables, setup, state, broker)
    scenario.calm(tuple(range(len(messages))))
    processes, calls = st.integers(0, PROCESSES - 1), st.integers(0, CALLS)
    steps = [
        st.tuples(st.just("send"), st.integers(0, len(messages) - 1)),
        st.tuples(st.just("work"), processes),
        st.tuples(st.just("die"), processes, calls),
        st.tuples(st.just("fail"), processes, calls),
        st.tuples(st.just("lose"), processes),
        st.tuples(st.just("wait"), st.sampled_from([1, 16, 31, 700])),
    ]

    class RedeliveryMachine(Redeliveries):
        @rule(step=st.one_of(steps))
        def perform(self, step: Step) -> None:
            super().perform(step)

    RedeliveryMachine.scenario = scenario
    phases = (Phase.explicit, Phase.reuse, Phase.generate)  # stories are shortened by whole steps
    checks = list(HealthCheck)
    RedeliveryMachine.TestCase.settings = settings(
        max_examples=50, stateful_step_count=15, deadline=None, phases=phases, suppress_health_check=checks
    )
    return RedeliveryMachine


def replay(machine: type[Redeliveries], schedule: Sequence[Step]) -> None:
    """Run a schedule again, as a failure prints it.

    Raises:
        PromiseBroken: The promise is still broken.

    Example:
        >>> replay.__name__
        'replay'
    """
    machine.scenario.replay(schedule)


@dataclass
class _Scenario:
    """Arguments of a machine, and results that its executions share."""

    app: App
    messages: Sequence[Message]
    tables: MetaData | None
    setup: Callable[[Session], object] | None
    state: Callable[[Session], Any]
    broker: Callable[[], Broker] | None
    _calm: dict[tuple[int, ...], Any] = field(default_factory=dict)
    _shortened: dict[str, PromiseBroken] = field(default_factory=dict)

    def calm(self, sent: tuple[int, ...]) -> Any:
        """Return how it ends if each message comes once and nothing happens."""
        if sent not in self._calm:
            execution = _Execution(self)
            try:
                for number in sent:
                    execution.perform(("send", number))
                self._calm[sent] = execution.end()
                assert execution.test.runs or not sent, "no message is handled, even if nothing happens"
            finally:
                execution.close()
        return self._calm[sent]

    def replay(self, schedule: Sequence[Step]) -> None:
        execution = _Execution(self)
        try:
            for each in schedule:
                execution.perform(each)
            execution.rest()
        except Exception as error:  # noqa: BLE001 - it breaks a promise, whatever it is
            raise PromiseBroken(f"{error}", execution.story, execution.schedule) from _cause(error)
        finally:
            execution.close()

    def shortened(self, schedule: Sequence[Step], error: Exception) -> PromiseBroken:
        """Leave out each step without which it still fails."""
        key = repr(schedule)
        if key not in self._shortened:
            found, kept = PromiseBroken(f"{error}", [repr(each) for each in schedule], schedule), list(schedule)
            for at in range(min(len(kept), MOST) - 1, -1, -1):
                try:
                    self.replay(kept[:at] + kept[at + 1 :])
                except PromiseBroken as shorter:
                    found, kept = shorter, kept[:at] + kept[at + 1 :]
            self._shortened[key] = found
        return self._shortened[key]


class _Execution:
    """One run of a schedule, on a database and a broker of its own."""

    def __init__(self, scenario: _Scenario) -> None:
        self._scenario = scenario
        self.test = AppTest(scenario.app, tables=scenario.tables, database=None, broker=scenario.broker).__enter__()
        self._processes: list[tuple[Worker, CrashPoints] | None] = [None] * PROCESSES
        self._sent: dict[int, None] = {}
        self._bodies: dict[str, bytes] = {}
        self.schedule: list[Step] = []
        self.story: list[str] = []
        self._open = True
        if scenario.setup is not None:
            with self.test.session() as session:
                scenario.setup(session)

    def perform(self, step: Step) -> None:
        kind, *rest = step
        self.schedule.append(step)
        getattr(self, f"_{kind}")(*rest)
        self._check()

    def _send(self, number: int) -> None:
        self.story.append(f"message {number} is sent{' again' if number in self._sent else ''}")
        self._sent[number] = None
        self.test.send(self._scenario.messages[number], message_id=_id(number))

    def _work(self, number: int) -> None:
        self.story.append(f"process {number} works")
        step(self._process(number)[0])

    def _die(self, number: int, calls: int) -> None:
        worker, points = self._process(number)
        points.arm(calls)
        try:
            step(worker)
        except Crash as crash:
            self.story.append(f"process {number} dies: {crash}")
            self._processes[number] = None
            self._disconnect(worker)
        else:
            self.story.append(f"process {number} works")
            points.disarm()

    def _fail(self, number: int, calls: int) -> None:
        worker, points = self._process(number)
        reached: list[str] = []

        def fail(name: str) -> None:
            reached.append(name)
            outage(name)

        points.arm(calls, fail)
        with suppress(NoConnection, Unavailable):  # of the relay, whose thread waits and tries again
            step(worker)
        points.disarm()
        self.story.append(f"process {number} works{f', and its server is away: {reached[0]}' if reached else ''}")

    def _lose(self, number: int) -> None:
        self.story.append(f"process {number} loses its connection to the broker")
        self._disconnect(self._process(number)[0])
        if not hasattr(self.test.broker, "lose"):  # its receiver is closed
            self._processes[number] = None

    def _wait(self, duration: int) -> None:
        self.story.append(f"{duration} s pass")
        self.test.pass_time(float(duration))

    def _process(self, number: int) -> tuple[Worker, CrashPoints]:
        found = self._processes[number]
        if found is None:
            points = CrashPoints()
            worker = self.test.worker(points)
            worker.pause = lambda: None  # type: ignore[method-assign]
            found = self._processes[number] = worker, points
        return found

    def _disconnect(self, worker: Worker) -> None:
        wrapped: Any = worker.intake.receiver
        receiver = wrapped.port
        if hasattr(self.test.broker, "lose"):
            self.test.broker.lose(receiver)
        else:
            receiver.close()

    def _check(self) -> None:
        for output in self.test.taken:
            known = self._bodies.setdefault(output.id, output.body)
            assert known == output.body, f"the output {output.id} was sent with two bodies: {known!r} and {output.body!r}"
        stored = self.test.database.tables.output
        if all(handler.opted_in for handler in self._scenario.app.handlers.values()):
            with self.test.engine.connect() as connection:
                committed = set(connection.scalars(select(stored.c.output_id)))
            assert self._bodies.keys() <= committed, "an output was sent whose handling is not committed"

    def rest(self) -> None:
        """Let all processes die and others do the rest, and compare with the calm."""
        found, expected = self.end(), self._scenario.calm(tuple(sorted(self._sent)))
        self._check()
        difference = _difference("", found, expected)
        assert difference is None, f"at rest, {difference}"

    def end(self) -> dict[str, Any]:
        """Return how it ends."""
        test = self.test
        for each in self._processes:
            if each is not None:
                self._disconnect(each[0])
        self._processes = [None] * PROCESSES
        for _ in range(HOURS):
            test.pass_time(3600.0)
            test.run_until_idle(raises=False)
            if not test.due(within=HOURS * 3600.0):
                break
        pending, inbox = test.database.tables.pending, test.database.tables.inbox
        with test.session() as session:
            return {
                "handled messages": session.scalar(select(func.count()).select_from(inbox)),
                "dead letters": sorted(str(each.message_id) for each in test.dead_letters()),
                "state": self._scenario.state(session),
                "outputs by place": _counted(test),
                "pending outputs": session.scalar(select(func.count()).select_from(pending)),
            }

    def close(self) -> None:
        if self._open:
            self._open = False
            self.test.__exit__()


def _counted(test: AppTest) -> dict[str, int]:
    """Return how many outputs went to each place: of types that are not opted in, each run has others."""
    plain = not all(handler.opted_in for handler in test.app.handlers.values())
    found: dict[str, int] = {}
    for output in test.outputs:
        found[output.routing_key] = 1 if plain else found.get(output.routing_key, 0) + 1
    return found


def _difference(name: str, found: Any, expected: Any) -> str | None:
    if isinstance(found, dict) and isinstance(expected, dict) and found.keys() == expected.keys():
        return next(filter(None, (_difference(f"{name}.{key}", found[key], expected[key]) for key in found)), None)
    if found == expected:
        return None
    return f"{name.removeprefix('.')} is {found!r:.200}, but if nothing happens {expected!r:.200}"


def _cause(error: Exception) -> Exception | None:
    """Return an error whose trace says more than the story."""
    return None if isinstance(error, AssertionError) else error


def _id(number: int) -> str:
    return str(UUID(int=number + 1))
