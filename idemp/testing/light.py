"""The test kit in one call: for a unit test beside the handler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from idemp.app import App
from idemp.policy import Idempotent
from idemp.testing.crash_points import CRASH_POINTS
from idemp.testing.detectors import DEFAULT, rehearse
from idemp.testing.findings import Finding, NotIdempotent
from idemp.testing.harness import Harness

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from uuid import UUID

    from sqlalchemy import Engine, MetaData
    from sqlalchemy.orm import Session

    from idemp.messages import Message
    from idemp.policy import Policy
    from idemp.protocol import Outcome
    from idemp.testing.execution import Step
    from idemp.testing.findings import Kind
    from idemp.wrap import Wrapped

ALL_POINTS: Final = tuple(point.name for point in CRASH_POINTS)


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
    database: str = "sqlite://",
    tables: MetaData | Callable[[Engine], object] | None = None,
) -> Redelivered:
    """Deliver a message several times, the first time to a process that dies, and say what happened.

    Args:
        app: an `App`, or what `Inbox.wrap` answered.
        message: an object of a message class, a dict with `type`, or a `Message`.
        times: how often the broker delivers it.
        crash_at: a name out of `CRASH_POINTS`; `None` lets the process live.
        type: the message's type, where its class does not say it.
        database: a URL; emptied first.
        tables: the user's tables: `Base.metadata`, or what makes them on an engine.

    Raises:
        ValueError: there is no such crash point.

    Example:
        >>> from idemp import App, Context, Idempotent
        >>> app = App("orders")
        >>> @app.handler(dict, type="orders.Place", policy=Idempotent(key="id"))
        ... def place(message: dict[str, int], ctx: Context) -> None:
        ...     ctx.send({"sku": 1}, to="stock", type="stock.Reserve")
        >>> happened = redeliver(app, {"id": 7}, type="orders.Place", crash_at="after commit")
        >>> [outcome and outcome.name for outcome in happened.outcomes]
        [None, 'REDISPATCHED', 'REDISPATCHED', 'REDISPATCHED']
        >>> happened.runs, happened.commits, list(happened.outputs.values())
        (1, 1, [3])
    """
    _check_points([crash_at] if crash_at is not None else [])
    with Harness(app, database=database, tables=tables) as harness:
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
    database: str = "sqlite://",
    tables: MetaData | Callable[[Engine], object] | None = None,
    crash_at: Iterable[str] = ALL_POINTS,
    detect: Collection[Kind] = DEFAULT,
) -> None:
    """See that a handler survives redelivery: nothing that the detectors know, and the same result whenever it dies.

    Args:
        handler: `(message)` or `(message, ctx)`.
        messages: what it gets, one after the other: objects of its message class, dicts, or `Message`s.
        message: its message class; default from the annotation.
        type: its message type, where the class does not say it.
        policy: default `Idempotent()`.
        replies: whether returned messages answer the sender.
        state: what the handler's effects are, read in a session; compared with what they are without any crash.
        database: a URL; emptied again and again.
        tables: the handler's tables: `Base.metadata`, or what makes them on an engine.
        crash_at: names out of `CRASH_POINTS`.
        detect: kinds of findings that are looked for; `DEFAULT | {"order"}` also handles `messages` the other way round.

    Raises:
        NotIdempotent: it does not; says why.
        AssertionError: a result differs after a crash, though no detector knows why.
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
    app = App("tests")
    app.handler(*([message] if message is not None else []), type=type, policy=policy or Idempotent(), replies=replies)(
        handler
    )
    points = list(crash_at)
    _check_points(points)
    with Harness(app, database=database, tables=tables) as harness:
        made = [harness.message(each, type=type) for each in messages]
        for each in made:
            findings = rehearse(harness, each, detect=detect)
            if findings:
                raise NotIdempotent(findings)
            harness.send(each)
            harness.rest()
        expected = _result(harness, state)
        if "order" in detect:
            _check_order(harness, made, state, getattr(handler, "__qualname__", repr(handler)))
        for point in points:
            harness.begin_anew()
            for each in made:
                _delivered(harness, each, 2, point)
            result = _result(harness, state)
            assert result == expected, (  # noqa: S101 - how tests hear of it
                f"When the process dies {point}, the result is another one:\n  {result}\ninstead of\n  {expected}"
            )


def _check_order(
    harness: Harness, messages: list[Message], state: Callable[[Session], Any] | None, handler: str
) -> None:
    results = []
    for ordered in (messages, messages[::-1]):
        harness.begin_anew()
        for message in ordered:
            harness.send(message)
            harness.rest()
        results.append(_result(harness, state))
    if results[0] != results[1]:
        what = "the same messages in the opposite order have another result"
        raise NotIdempotent([Finding("order", handler, what)])


def _delivered(harness: Harness, message: Message, times: int, crash_at: str | None) -> list[Step]:
    steps = []
    for number in range(times):
        harness.send(message)
        if number == 0 and crash_at is not None:
            harness.script.die(crash_at)
        steps += harness.steps()
    harness.rest()
    return steps


def _result(harness: Harness, state: Callable[[Session], Any] | None) -> Any:
    """What has to be the same whatever happened on the way."""
    outputs = {str(output.id): (output.routing_key, output.message.body) for output in harness.publisher.sent}
    return {
        "state": harness.state(state) if state is not None else None,
        "outputs": dict(sorted(outputs.items())),
        "handled": sum(execution.committed for execution in harness.executions),
        "dead": len(harness.dead()),
    }


def _check_points(points: Iterable[str]) -> None:
    unknown = [point for point in points if point not in ALL_POINTS]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is no crash point; they are {', '.join(ALL_POINTS)}.")
