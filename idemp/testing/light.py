"""The test kit in one call: for a unit test beside the handler."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from idemp.app import App
from idemp.deadletter import without_story
from idemp.errors import ConfigurationError
from idemp.messages import DEAD_PREFIX
from idemp.policy import Idempotent
from idemp.testing.detectors import DEFAULT, rehearse
from idemp.testing.findings import Finding, NotIdempotent
from idemp.testing.handled import Failure, NeverHandled, advised, fates_of
from idemp.testing.harness import Harness
from idemp.testing.options import ALL_POINTS, crash_points, kinds
from idemp.testing.promises import Promises
from idemp.testing.story import named
from idemp.testing.subject import declared_by_its_app

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from uuid import UUID

    from sqlalchemy import Engine, MetaData
    from sqlalchemy.orm import Session

    from idemp.messages import Message
    from idemp.outcome import Outcome
    from idemp.policy import Policy
    from idemp.testing.execution import Step
    from idemp.testing.findings import Kind
    from idemp.wrap import Wrapped


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

    Raises:
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
    with Harness(app, database=database, tables=tables) as harness:
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
) -> None:
    """See that a handler survives redelivery: nothing that the detectors know, and the same result whenever it dies.

    The result: the state, the outputs, which messages were committed (once each, where they are opted in), and which were
    parked for which reason. A message that is parked on purpose (`Refuse`, `refuse_on`) is as good as one that is handled.

    Args:
        handler: `(message)` or `(message, ctx)`.
        messages: what it gets, one after the other: objects of its message class, dicts, or `Message`s.
        message: its message class; default from the annotation.
        type: its message type, where the class does not say it.
        policy: default as its app registered it (the one app of a loaded module that did), else `Idempotent()`.
        replies: whether returned messages answer the sender.
        state: what the handler's effects are, read in a session; compared with what they are without any crash. ORM objects
            count by their columns; leave out what differs from run to run, such as the database's own time. Default: how
            many rows each table has.
        setup: writes what is there before the first message; it is committed.
        database: a URL; emptied again and again.
        tables: the handler's tables: `Base.metadata`, or what makes them on an engine.
        crash_at: names out of `CRASH_POINTS`, or one of them.
        detect: kinds of findings that are looked for; `DEFAULT | {"order"}` also handles `messages` the other way round.

    Raises:
        NotIdempotent: it does not; says why.
        AssertionError: a result differs after a crash, though no detector knows why; or a message is not handled at all, and
            not on purpose.
        ConfigurationError: there is no message, or no such kind of finding.
        ValueError: there is no such crash point.

    Example:
        >>> from idemp import Context
        >>> seen = []
        >>> def place(message: dict[str, int], ctx: Context) -> None:
        ...     seen.append(message["id"])
        >>> assert_idempotent(place, {"id": 7}, type="orders.Place")
        Traceback (most recent call last):
        ...
        idemp.testing.findings.NotIdempotent: 1 reason why redelivery changes the result:
        - place: it changed what outlives the message: ...seen [memory]
          It is not rolled back with the handling, ...
    """
    __tracebackhide__ = True  # pytest shows the line that called this
    app = _app_of(handler, message, type, policy, replies=replies)
    points, wanted = crash_points(crash_at), kinds(detect)
    if not messages:
        raise ConfigurationError(
            "assert_idempotent was given no message.", fix="Write assert_idempotent(handler, message)."
        )
    with Harness(app, database=database, tables=tables) as harness:
        promises = Promises(harness, state=state, setup=setup)
        promises.begin_anew()
        made = [harness.message(each, type=type) for each in messages]
        for each in made:
            counters = harness.ground.counters()
            findings = rehearse(harness, each, detect=wanted)
            if findings:
                raise NotIdempotent(findings)
            harness.ground.set_back(counters)
            harness.send(each)
            harness.rest()
            _check_handled(promises, each)
        expected = _result(promises)
        if "order" in wanted:
            _check_order(promises, made, getattr(handler, "__qualname__", repr(handler)))
        for point in points:
            promises.begin_anew()
            for each in made:
                _delivered(harness, each, 3, point)
            _compare(point, _result(promises), expected)


def _app_of(
    handler: Callable[..., Any], message: type | None, name: str | None, policy: Policy | None, *, replies: bool
) -> App:
    """An app of this handler alone: as its own app registered it, unless something else is said."""
    app = App("tests")
    declared = declared_by_its_app(handler) if (message, name, policy) == (None, None, None) else None
    if declared is not None:
        app.registry.add(replace(declared, replies=declared.replies or replies))
        return app
    classes = [] if message is None else [message]
    app.handler(*classes, type=name, policy=policy or Idempotent(), replies=replies)(handler)
    return app


def _check_handled(promises: Promises, message: Message) -> None:
    fate = fates_of(promises).get(promises.key_of(message)[0])
    if isinstance(fate, Failure):
        where = "its handler fails" if fate.error is not None else "no handler gets to see it"
        raise NeverHandled(f"{named(message)} is not handled; {where}:\n  {advised(fate)}") from fate.error


def _check_order(promises: Promises, messages: list[Message], handler: str) -> None:
    results = []
    for ordered in (messages, messages[::-1]):
        promises.begin_anew()
        for message in ordered:
            promises.harness.send(message)
            promises.harness.rest()
        results.append(_result(promises))
    if results[0] != results[1]:
        what = "the same messages in the opposite order have another result"
        raise NotIdempotent([Finding("order", handler, what)])


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


def _compare(point: str, result: dict[str, Any], expected: dict[str, Any]) -> None:
    differing = [name for name in expected if result[name] != expected[name]]
    told = "".join(
        f"\n  {name}: {result[name]}\n  {' ' * len(name)}  instead of {expected[name]}" for name in differing
    )
    assert not differing, (  # noqa: S101 - how tests hear of it
        f"When the process dies {point}, the result is another one than without that:{told}"
    )
