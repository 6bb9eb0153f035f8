"""The test kit in one call: for a unit test beside the handler."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from idemp.app import App
from idemp.deadletter import without_story
from idemp.errors import ConfigurationError, PayloadConflict
from idemp.messages import DEAD_PREFIX
from idemp.testing.carried import flat, is_said
from idemp.testing.chance import Chance
from idemp.testing.database_time import are_times, differing_places
from idemp.testing.deadline import SECONDS
from idemp.testing.detectors import DEFAULT, rehearse
from idemp.testing.execution import Tally
from idemp.testing.findings import Finding, NotIdempotent
from idemp.testing.handled import Failure, NeverHandled, advised, fates_of
from idemp.testing.harness import Harness
from idemp.testing.options import ALL_POINTS, crash_points, kinds
from idemp.testing.promises import Promises
from idemp.testing.report import NotSeen, Report
from idemp.testing.stopped_clock import StoppedClock
from idemp.testing.story import named
from idemp.testing.subject import declaration_of, effects_of, policy_in_words

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
    from uuid import UUID

    from sqlalchemy import Engine, MetaData
    from sqlalchemy.orm import Session

    from idemp.context import Context
    from idemp.messages import Message
    from idemp.outcome import Outcome
    from idemp.policy import Policy
    from idemp.testing.chance import First
    from idemp.testing.execution import Step
    from idemp.testing.findings import Kind
    from idemp.wrap import Wrapped


__tracebackhide__ = True  # pytest shows the line that called a function of this module
_LATER: Final = timedelta(days=2, hours=3, minutes=4, seconds=5)
_A_SECOND: Final = 1.1
_MOST_PLACES: Final = 5


@dataclass(frozen=True, slots=True)
class Redelivered:
    """What became of a message that was delivered several times.

    Attributes:
        outcomes: how each delivery ended; `None` where the process died.
        runs: how often the handler ran.
        commits: how often it was committed: 1, or 0 for a message that is parked.
        outputs: by their ids, how often each was sent.
        dead: parked messages.
    """

    outcomes: list[Outcome | None]
    runs: int
    commits: int
    outputs: dict[UUID, int]
    dead: list[Message]


def redeliver(
    app: App | Wrapped,
    message: Any,
    *,
    times: int = 3,
    crash_at: str | None = None,
    type: str | None = None,
    setup: Callable[[Session], object] | None = None,
    database: str = "sqlite://",
    tables: MetaData | Callable[[Engine], object] | None = None,
    deadline: float = SECONDS,
) -> Redelivered:
    """Deliver a message several times, the first time to a process that dies, and say what happened.

    Args:
        app: an `App`, or what `Inbox.wrap` answered.
        message: an object of a message class, a dict with `type`, or a `Message`.
        times: how often the broker delivers it, the delivery in which the process dies included; after that one there is
            always another.
        crash_at: a name out of `CRASH_POINTS`; `None` lets the process live.
        type: the message's type, where its class does not say it.
        setup: writes what is there before the message; it is committed.
        database: a URL; emptied first.
        tables: the user's tables: `Base.metadata`, or what makes them on an engine.
        deadline: the seconds that one run of the handler may take.

    Raises:
        HandlerHangs: the handler took longer.
        ValueError: there is no such crash point, or `times` is less than 1.

    Example:
        >>> from idemp import App, Context, Idempotent
        >>> app = App("orders")
        >>> @app.handler(dict, type="orders.Place", policy=Idempotent(key="id"))
        ... def place(message: dict[str, int], ctx: Context) -> None:
        ...     ctx.send({"sku": 1}, to="stock", type="stock.Reserve")
        >>> happened = redeliver(app, {"id": 7}, type="orders.Place", crash_at="after commit")
        >>> [outcome and outcome.name for outcome in happened.outcomes]
        [None, 'REDISPATCHED', 'REDISPATCHED']
        >>> happened.runs, happened.commits, list(happened.outputs.values())
        (1, 1, [2])
    """
    crash_points([crash_at] if crash_at is not None else [])
    if times < 1:
        raise ValueError(f"times={times}: a message is delivered at least once.")
    with Harness(app, database=database, tables=tables, deadline=deadline) as harness:
        Promises(harness, setup=setup).begin_anew()
        made = harness.message(message, type=type)
        steps = _delivered(harness, made, times, crash_at)
        outputs: dict[UUID, int] = {}
        for output in harness.publisher.sent:
            outputs[output.id] = outputs.get(output.id, 0) + 1
        return Redelivered(
            outcomes=[step.outcome for step in steps],
            runs=len(harness.executions),
            commits=sum(execution.committed for execution in harness.executions),
            outputs=outputs,
            dead=harness.dead(),
        )


def assert_idempotent(
    handler: Callable[..., Any],
    *messages: Any,
    message: type | None = None,
    type: str | None = None,
    policy: Policy | None = None,
    replies: bool = False,
    state: Callable[[Session], Any] | None = None,
    setup: Callable[[Session], object] | None = None,
    database: str = "sqlite://",
    tables: MetaData | Callable[[Engine], object] | None = None,
    crash_at: str | Iterable[str] = ALL_POINTS,
    detect: Collection[Kind] = DEFAULT,
    deadline: float = SECONDS,
) -> Report:
    """See that a handler survives redelivery: nothing that the detectors know, and the same result whenever it dies.

    The result: the state, the outputs, which messages were committed (once each, where they are opted in), and which were
    parked for which reason. A message that is parked on purpose (`Refuse`, `refuse_on`) is as good as one that is handled.

    Args:
        handler: `(message)` or `(message, ctx)`.
        messages: what it gets, one after the other: objects of its message class, dicts, or `Message`s.
        message: its message class; default from the annotation.
        type: its message type, where the class does not say it.
        policy: default the one that its app, or `Inbox.wrap`, declared for it, changed by the app's settings for its type.
        replies: whether returned messages answer the sender.
        state: what the handler's effects are, read in a session; compared with what they are without any crash. ORM objects
            count by their columns; leave out what differs from run to run, such as the database's own time. Default: how
            many rows each table has.
        setup: writes what is there before the first message; it is committed.
        database: a URL; emptied again and again.
        tables: the handler's tables: `Base.metadata`, or what makes them on an engine.
        crash_at: names out of `CRASH_POINTS`, or one of them.
        detect: kinds of findings that are looked for; `DEFAULT | {"order"}` also handles `messages` the other way round.
        deadline: the seconds that one run of the handler may take; then it is interrupted, and the failure shows where it
            stood.

    Returns:
        What was tested, and what could not be seen. Where the handler did something that could not be seen, a warning of
        the category `NotSeen` says so, too.

    Raises:
        NotIdempotent: it does not; says why. A note on it is the report.
        HandlerHangs: it did not return within the deadline.
        AssertionError: a result differs after a crash, though no detector knows why; or a message is not handled at all, and
            not on purpose.
        ConfigurationError: there is no message, no such kind of finding, or no policy: nothing declares one for the handler,
            or several apps declare different ones.
        ValueError: there is no such crash point.

    Example:
        >>> from idemp import App, Context, Idempotent
        >>> app, seen = App("orders"), []
        >>> @app.handler(dict, type="orders.Place", policy=Idempotent(key="id"))
        ... def place(message: dict[str, int], ctx: Context) -> None:
        ...     seen.append(message["id"])
        >>> try:
        ...     assert_idempotent(place, {"id": 7})
        ... except NotIdempotent as found:
        ...     print(found)
        ...     print(found.__notes__[0])
        1 reason why redelivery changes the result:
        - place: it changed what outlives the message: ...seen [memory]
          It is not rolled back with the handling, ...
        Tested: orders.Place under Idempotent(key='field:id'), as app 'orders' declares it.
          1 message, 0 deliveries. The process never died.
          Looked for: after commit, ...
    """
    points, wanted = crash_points(crash_at), kinds(detect)
    if not messages:
        raise ConfigurationError(
            "assert_idempotent was given no message.", fix="Write assert_idempotent(handler, message)."
        )
    app, tested = _app_of(handler, message, type, policy, replies=replies)
    tally = Tally()
    try:
        with Harness(app, database=database, tables=tables, deadline=deadline) as harness:
            tally = harness.tally
            promises = Promises(harness, state=state, setup=setup)
            promises.begin_anew()
            made = [harness.message(each, type=type) for each in messages]
            comparison = _Comparison(promises, made, getattr(handler, "__qualname__", repr(handler)))
            expected = comparison.first(wanted)
            comparison.check_causes(expected, wanted)
            if "order" in wanted:
                comparison.check_order()
            for point in points:
                comparison.check_death(point, expected)
    except AssertionError as error:
        error.add_note(str(_report(tested, messages, tally, points, wanted)))
        raise
    report = _report(tested, messages, tally, points, wanted)
    for sentence in tally.unseen:
        warnings.warn(f"{tested}: {sentence}", NotSeen, stacklevel=2)
    return report


def _report(
    tested: str, messages: Sequence[Any], tally: Tally, points: Sequence[str], wanted: frozenset[Kind]
) -> Report:
    not_seen = [*tally.unseen, *tally.not_seen]
    if "conflict" in wanted and len(messages) == 1:
        not_seen.append("Whether the key tells messages apart: one message was given.")
    return Report(
        tested=tested,
        messages=len(messages),
        deliveries=tally.deliveries,
        deaths=tuple(point for point in points if tally.deaths[point]),
        not_reached=tuple(point for point in points if not tally.deaths[point]) if tally.deaths else (),
        looked_for=tuple(sorted(wanted)),
        not_looked_for=tuple(sorted(DEFAULT - wanted)),
        not_seen=tuple(not_seen),
    )


class _Comparison:
    """Runs the messages again and again, and compares each result with that of the first run.

    Each attempt at a message draws the same random values at the same time, so that a death is blamed for nothing else.
    """

    def __init__(self, promises: Promises, messages: list[Message], handler: str) -> None:
        self._promises = promises
        self._harness = promises.harness
        self._messages = messages
        self._handler = handler
        self._moment = datetime.now(UTC)
        self._clock = StoppedClock()
        self._times: set[str] = set()  # where the state holds what a clock gives that can't be stopped
        self._steady()

    def _steady(self, chance: tuple[str, First | None] = ("as always", None), later: timedelta = timedelta(0)) -> None:
        seed, first = chance

        @contextmanager
        def steady(function: Callable[..., Any], body: Any, ctx: Context) -> Iterator[None]:
            del function, body
            with (
                self._clock.at(self._moment + later),
                Chance(f"{seed} {ctx.message.type} {ctx.message_id}", first).chosen(),
            ):
                yield

        self._harness.watching = steady

    def first(self, wanted: frozenset[Kind]) -> dict[str, Any]:
        """Look for findings and handle each message once: the result that all others must have."""
        for message in self._messages:
            counters = self._harness.ground.counters()
            findings = rehearse(self._harness, message, detect=wanted)
            if findings:
                raise NotIdempotent(findings)
            self._harness.ground.set_back(counters)
            self._handle(message)
            _check_handled(self._promises, message)
            if "conflict" in wanted:
                self._check_conflict(message)
        expected = _result(self._promises)
        shown = set(flat(expected["state"]))
        written = [each for text, each in self._harness.written.items() if each.kind in wanted and is_said(text, shown)]
        if written:
            raise NotIdempotent(written[:1])
        if not self._harness.ground.time.stops:
            places = differing_places(self._again()["state"], expected["state"])
            self._times = {place for place, values in places.items() if are_times(*values)}
        return expected

    def _handle(self, message: Message) -> None:
        self._harness.send(message)
        self._harness.rest()

    def _again(self, messages: list[Message] | None = None) -> dict[str, Any]:
        """The result without any death."""
        self._promises.begin_anew()
        for message in messages or self._messages:
            self._handle(message)
        return _result(self._promises)

    def _check_conflict(self, message: Message) -> None:
        key, idempotent = self._promises.key_of(message)
        earlier = self._messages[: self._messages.index(message)]
        other = next((each for each in earlier if self._promises.key_of(each)[0] == key), None)
        if not idempotent or other is None or other.body == message.body:
            return
        conflicts = [
            named(without_story(each))
            for each in self._harness.dead()
            if each.headers.get(f"{DEAD_PREFIX}reason") == PayloadConflict.__name__
        ]
        what = f"{named(message)} has the key of {named(other)}, {key}, and another body"
        if named(message) in conflicts:
            raise NotIdempotent([Finding("conflict", self._handler, f"{what}: it is parked as a conflict")])
        if self._harness.registry.find(message).policy.on_conflict == "redispatch":
            raise NotIdempotent([Finding("conflict", self._handler, f"{what}: it counts as a duplicate")])

    def check_causes(self, expected: dict[str, Any], wanted: frozenset[Kind]) -> None:
        """See that other random values and a later time alone have the same result, before a death is blamed for them."""
        for first in ("low", "high", None) if "random" in wanted else ():
            self._steady((f"other {first}", first))
            told = self._differing(self._again(), expected)
            if told:
                what = f"with other random values, and without any death, the result is another one:{told}"
                raise NotIdempotent([Finding("random", self._handler, what)])
        if "clock" in wanted:
            self._steady(later=_LATER)
            told = self._differing(self._again(), expected)
            if told:
                what = f"two days later, and without any death, the result is another one:{told}"
                raise NotIdempotent([Finding("clock", self._handler, what)])
        self._steady()

    def check_order(self) -> None:
        """See that the messages in the opposite order have the same result."""
        if self._differing(self._again(self._messages[::-1]), self._again()):
            what = "the same messages in the opposite order have another result"
            raise NotIdempotent([Finding("order", self._handler, what)])

    def check_death(self, point: str, expected: dict[str, Any]) -> None:
        """See that the result is the same when the process dies at this point."""
        self._promises.begin_anew()
        for message in self._messages:
            _delivered(self._harness, message, 3, point)
        told = self._differing(_result(self._promises), expected)
        if told:
            time.sleep(_A_SECOND)  # a database's own clock may count in seconds
            alone = self._differing(self._again(), expected)
            if alone:
                raise AssertionError(
                    "Handled again at the same time, with the same random values and without any death, the messages have "
                    f"another result:{alone}\nWhat state= reads may hold the database's own time or numbers, or follow from "
                    "what the handler remembers. Leave out what differs from run to run: "
                    "state=lambda session: session.execute(select(Order.id, Order.status)).all()."
                )
            raise AssertionError(
                f"When the process dies {point}, the result is another one than without that:{told}\n"
                "Without a death it is the same each time."
            )

    def _differing(self, result: dict[str, Any], expected: dict[str, Any]) -> str:
        """What differs between two results, in words; empty if nothing does. Times are compared as times."""
        places = differing_places(result["state"], expected["state"])
        but = [place for place, values in places.items() if not (place in self._times and are_times(*values))]
        names = [name for name in expected if (bool(but) if name == "state" else result[name] != expected[name])]
        told = "".join(
            f"\n  {name}: {result[name]}\n  {' ' * len(name)}  instead of {expected[name]}" for name in names
        )
        where = ", ".join(place for place in but[:_MOST_PLACES] if place)
        return f"{told}\n  The state differs in {where}." if where else told


def _app_of(
    handler: Callable[..., Any], message: type | None, name: str | None, policy: Policy | None, *, replies: bool
) -> tuple[App, str]:
    """An app of this handler alone, under the policy that its messages have in production, and that policy in words."""
    declared, by, settings = declaration_of(handler, message, name, policy)
    app = App("tests", settings=settings)
    app.registry.add(replace(declared, replies=declared.replies or replies))
    app.registry.effects.update(effects_of(handler))
    app.registry.build(app.settings.messages)
    tested = policy_in_words(app.registry.registrations()[0].policy)
    return app, f"{declared.message_type} under {tested}, {by}"


def _check_handled(promises: Promises, message: Message) -> None:
    fate = fates_of(promises).get(promises.key_of(message)[0])
    if isinstance(fate, Failure):
        where = "its handler fails" if fate.error is not None else "no handler gets to see it"
        raise NeverHandled(f"{named(message)} is not handled; {where}:\n  {advised(fate)}") from fate.error


def _delivered(harness: Harness, message: Message, times: int, crash_at: str | None) -> list[Step]:
    """What a death interrupts comes again by itself; what ends is published again, until there were so many deliveries."""
    steps: list[Step] = []
    for _ in range(times):
        if len(steps) >= times:
            break
        harness.send(message)
        if not steps and crash_at is not None:
            steps += _dying(harness, crash_at)
        steps += harness.steps()
    harness.rest()
    return steps


def _dying(harness: Harness, point: str) -> list[Step]:
    """One delivery; the ids that a database counted for what was not committed are given out again: gaps are no fault."""
    counters, before = harness.ground.counters(), len(harness.executions)
    harness.script.die(point)
    step = harness.step()
    if not any(execution.committed for execution in harness.executions[before:]):
        harness.ground.set_back(counters)
    return [step] if step is not None else []


def _result(promises: Promises) -> dict[str, Any]:
    """What has to be the same whatever happened on the way."""
    harness = promises.harness
    outputs = {str(output.id): (output.routing_key, output.message.body) for output in harness.publisher.sent}
    committed = [execution.message for execution in harness.executions if execution.committed]
    parked = {(named(without_story(each)), each.headers.get(f"{DEAD_PREFIX}reason")) for each in harness.dead()}
    return {
        "state": promises.state(),
        "outputs": dict(sorted(outputs.items())),
        "committed": dict(Counter(named(message) for message in committed if promises.key_of(message)[1])),
        "parked": dict(sorted(parked)),
    }
