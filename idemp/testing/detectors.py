"""Runs a handler several times on one message, each run rolled back, and says what differs and what stays.

| detector | what is run | what is looked at |
|---|---|---|
| clock | at one frozen moment, two days later, and on both sides of each of `idemp.testing.moments` | outputs |
| random | twice with the same random values, and with others: the lowest and highest of each draw, too | outputs |
| counter | twice, and once more | outputs |
| set order, environment, unstable key | in other processes, if it uses sets, `hash`, a function as key | outputs; the key |
| second connection, network, process, file | once | statements elsewhere, audit events, files that were open before |
| environment, memory | in a new process, if what outlives a message is sent or written | outputs, writes |
| memory | twice | what the function can remember, before and after |
| mutation | once | its message |
| after commit | once | listeners of its session |
| redelivered | as a redelivery, second attempt, redispatched | outputs and statements |
| swallowed error | with an error raised in each of its statements and outputs | whether it returns |
| check then insert | the message and one that is counted by another id, one after the other and racing | writes |
| transaction ended | once | how its delivery is settled |
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from idemp.broker.port import Delivery, Park
from idemp.errors import StoreError, TransactionEnded
from idemp.exact import read_number
from idemp.messages import REDISPATCHED_HEADER
from idemp.testing import elsewhere
from idemp.testing.carried import of_what_is_carried
from idemp.testing.chance import Chance
from idemp.testing.connections import OpenConnections, can_be_seen, unseen
from idemp.testing.crash_points import Crash
from idemp.testing.database_time import are_times
from idemp.testing.deadline import told_hangs
from idemp.testing.findings import DEFAULT_KINDS, Finding
from idemp.testing.harness import unwatched
from idemp.testing.memory import remembered
from idemp.testing.moments import moments
from idemp.testing.observing import Watch
from idemp.testing.open_files import OpenFiles
from idemp.testing.options import kinds
from idemp.testing.races import unguarded
from idemp.testing.stopped_clock import StoppedClock
from idemp.testing.variations import variations
from idemp.work import decode

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from idemp.broker.port import Settlement
    from idemp.messages import Message
    from idemp.testing.execution import Execution, ToldOutput
    from idemp.testing.findings import Kind
    from idemp.testing.harness import Harness
    from idemp.testing.observing import Seen

_LATER: Final = timedelta(days=2, hours=3, minutes=4, seconds=5)
_MOST_FAILURES: Final = 12
_CLOCK_SECONDS: Final = 20.0
_MOMENT: Final = "%a %Y-%m-%d %H:%M"
_NUMBER: Final = "the number of outputs"
_PLACE: Final = "the destination or type of an output"
_SHAPES: Final = {_NUMBER, _PLACE}

DEFAULT: Final = DEFAULT_KINDS
"""What is looked for if nothing else is said."""


@dataclass
class RehearsalRun:
    """One rehearsal: the run itself, what was seen of it, and how its delivery would have been settled."""

    execution: Execution | None
    seen: Seen
    settlement: Settlement | None

    @property
    def outputs(self) -> list[ToldOutput]:
        """What it sent."""
        return self.execution.outputs if self.execution is not None else []

    @property
    def error(self) -> BaseException | None:
        """What its handler raised."""
        return self.execution.error if self.execution is not None else None


def rehearse(harness: Harness, message: Message, *, detect: Collection[Kind] = DEFAULT) -> list[Finding]:
    """Run a message's handler several times from the present state of the database, roll each run back, and compare.

    A message that is a duplicate already has nothing to show. A handler that fails on the message (`Refuse`, say) is
    looked at, too, as far as it gets.

    Args:
        harness: where the handler runs; everything is as it was afterwards, unless the handler writes elsewhere.
        message: what it gets.
        detect: kinds of findings that are wanted; one that does not exist is a `ConfigurationError`.

    Returns:
        At most one finding of each kind.

    Example:
        >>> from uuid import uuid4
        >>> from idemp import App, Context, Idempotent
        >>> from idemp.testing.harness import Harness
        >>> app = App("orders")
        >>> @app.handler(dict, type="orders.Place", policy=Idempotent())
        ... def place(message: dict[str, int], ctx: Context) -> None:
        ...     ctx.send({"reservation": str(uuid4())}, to="stock", type="stock.Reserve")
        >>> with Harness(app) as harness:
        ...     for finding in rehearse(harness, harness.message({"sku": 1}, type="orders.Place")):
        ...         print(finding.kind, "|", finding.what)
        random | two runs at the same moment sent other values in $.reservation of output 1 to stock
    """
    wanted = kinds(detect)
    try:
        name = _handler_name(harness, message)
        with told_hangs():
            found = list(_findings(Rehearsal(harness, message), name, wanted))
    finally:
        harness.script.clear()
    unique = {finding.kind: finding for finding in reversed(found) if finding.kind in wanted}
    return sorted(unique.values(), key=found.index)


class _Rehearsed(Exception):
    """What rolls a rehearsal back."""


class Rehearsal:
    """Runs of one handler on one message."""

    def __init__(self, harness: Harness, message: Message) -> None:
        self.harness = harness
        self.message = message
        self.moment = datetime.now(UTC)
        self._clock = StoppedClock()
        self._counters = harness.ground.counters()

    def run(
        self,
        *,
        at: datetime | None = None,
        chance: Chance | None = None,
        message: Message | None = None,
        watched: bool = True,
        fail_at: int = 0,
        attempt: int = 1,
        redelivered: bool = False,
    ) -> RehearsalRun:
        """One run, rolled back right before its COMMIT.

        Args:
            at: the time at which the clock stands; default that of all other runs.
            chance: the random values that it draws; default those of all other runs.
            message: another message than that of all other runs.
            watched: whether more than its outputs and its error is looked at.
            fail_at: as for `Watch`.
            attempt: as its handler is told.
            redelivered: as its handler is told.
        """
        harness = self.harness
        watch = Watch(fail_at=fail_at)
        message = message or self.message
        message = message.with_headers(**{REDISPATCHED_HEADER: 1}) if redelivered else message
        delivery = Delivery(message=message, queue=harness.queue, attempt=attempt, redelivered=redelivered)
        before, watching = len(harness.executions), harness.watching
        harness.ground.set_back(self._counters)  # no rollback takes back what a database counted
        harness.script.clear()
        harness.script.die("before commit")
        death = harness.script.death
        if watched:  # a death says nothing of how the delivery is settled, but costs a fifth
            harness.script.death = _roll_back
        harness.watching = watch.watching if watched else unwatched
        settlement, moment = None, at or self.moment
        try:
            with (
                harness.ground.time.at(moment),
                self._clock.at(moment),
                (chance or Chance("rehearsal")).chosen(),
                suppress(StoreError, Crash),
            ):
                _, settlement = harness.process().handle(delivery)
        finally:
            harness.watching, harness.script.death = watching, death
            harness.script.clear()
        executions = harness.executions[before:]
        del harness.executions[before:]
        return RehearsalRun(executions[0] if executions else None, watch.seen, settlement)


def _roll_back(point: str) -> Any:
    raise _Rehearsed(point)


def _findings(rehearsal: Rehearsal, name: str, wanted: frozenset[Kind]) -> Iterator[Finding]:
    before = OpenConnections() if "second connection" in wanted else None
    files = OpenFiles()
    first = rehearsal.run()
    if first.execution is None:  # a duplicate, or nothing that a handler takes
        return
    written, files = files.changed(), OpenFiles()
    yield from _outside(first, name)
    yield from _through_old_connections(rehearsal.harness, before, first, name)
    again = rehearsal.run()
    yield from _in_old_files(rehearsal.harness, written, files.changed(), name)
    rehearsal.harness.tally.unseen.update(dict.fromkeys(first.seen.handed))
    memory = list(_remembered(rehearsal, first, again, name))
    yield from memory
    if wanted & {"random", "counter", "clock"}:
        later = rehearsal.run(at=rehearsal.moment + _LATER)
        # Both draw the same random values: what is left in memory explains why they differ.
        blamed = {"random"} if memory and "memory" in wanted else set[str]()
        yield from (each for each in _different_outputs(first, again, later, name) if each.kind not in blamed)
    if "random" in wanted and first.outputs == again.outputs:
        yield from _other_chances(rehearsal, first, name)
    if "clock" in wanted and first.outputs == again.outputs == later.outputs:
        yield from _other_moments(rehearsal, name)
    yield from _other_processes(rehearsal, first, again, name, wanted)
    if "redelivered" in wanted:
        yield from _redelivered(first, again, rehearsal.run(attempt=2, redelivered=True), name)
    if first.error is None:
        if "swallowed error" in wanted:
            yield from _swallowed(rehearsal, first, name)
        if "check then insert" in wanted:
            yield from _races(rehearsal, name)


# Detectors ----------------------------------------------------------------------------------------------------------


def _outside(run: RehearsalRun, name: str) -> Iterator[Finding]:
    seen = run.seen
    if seen.elsewhere:
        mode = " in autocommit mode" if any(text.startswith("autocommit, ") for text in seen.elsewhere) else ""
        told = seen.elsewhere[0].removeprefix("autocommit, ")
        yield Finding("second connection", name, f"it wrote through a second connection{mode}: {told}")
    elif any(kind == "database" for kind, _ in seen.outside):
        detail = next(detail for kind, detail in seen.outside if kind == "database")
        yield Finding("second connection", name, f"it wrote to a database through a connection of its own: {detail}")
    if isinstance(run.settlement, Park) and run.settlement.reason == TransactionEnded.__name__:
        yield Finding(
            "transaction ended",
            name,
            "it ended the claim's own transaction (COMMIT, ROLLBACK or autocommit behind idemp's back)",
        )
    for kind, what in (
        ("network", "it called over the network"),
        ("process", "it started a process"),
        ("file", "it changed a file"),
    ):
        for seen_kind, detail in seen.outside:
            if seen_kind == kind:
                if detail.startswith("socket.sendto"):
                    what = "it sent a datagram"  # noqa: PLW2901 - of metrics, mostly
                yield Finding(kind, name, f"{what} before its transaction was committed: {detail}")  # type: ignore[arg-type]
                break
    if seen.left_for_later:
        yield Finding(
            "after commit", name, "it does something after COMMIT that is no output (a listener on its session)"
        )
    if seen.mutated:
        yield Finding("mutation", name, "it changed its message in place")


def _through_old_connections(
    harness: Harness, before: OpenConnections | None, first: RehearsalRun, name: str
) -> Iterator[Finding]:
    if before is None:
        return
    changed = before.changed()
    if changed:
        what = f"it wrote through a connection that was open before: {', '.join(changed)}"
        yield Finding("second connection", name, what)
    for sentence in unseen(before.talked(statements_seen=first.seen.foreign > 0), before.silent()):
        harness.tally.unseen.setdefault(sentence)
    if not can_be_seen():
        harness.not_seen("Connections that were open before: this system does not list them (no /proc).")


def _in_old_files(harness: Harness, first: list[str], again: list[str], name: str) -> Iterator[Finding]:
    if first and again:
        yield Finding("file", name, f"it wrote to a file that was open before: {', '.join(again)}")
        return
    for file in first or again:
        harness.tally.unseen.setdefault(
            f"The file {file}, which was open before, changed while the handler ran. Who wrote to it could not be seen."
        )


def _remembered(rehearsal: Rehearsal, first: RehearsalRun, again: RehearsalRun, name: str) -> Iterator[Finding]:
    """A run that differs from the first one because of what that one left behind is told, whatever it left."""
    same = first.outputs == again.outputs and _texts(first) == _texts(again)
    changed = remembered(first.seen.memory, again.seen.memory, forgiving=same)
    if same and changed:
        once = [place for place in changed if not again.seen.changes(place)]
        told = _of_the_message(rehearsal, first, once) if once else set[str]()
        changed = [place for place in changed if place not in once or place in told]
    if changed:
        yield Finding("memory", name, f"it changed what outlives the message: {', '.join(changed[:3])}")


def _of_the_message(rehearsal: Rehearsal, first: RehearsalRun, places: list[str]) -> set[str]:
    """Those places, changed at the first run only, that another message changes again: the others hold settings."""
    found = set[str]()
    for value, message in variations(rehearsal.message):
        run = rehearsal.run(message=message)
        if run.execution is None or bool(run.error) != bool(first.error):  # nothing is shown by a message that fails
            found |= {place for place in places if str(value) in repr(first.seen.memory[1].get(place))}
        else:
            found |= {place for place in places if run.seen.changes(place)}
    return found


def _texts(run: RehearsalRun) -> list[str]:
    return [text for text, _ in run.seen.writes]


def _different_outputs(first: RehearsalRun, again: RehearsalRun, later: RehearsalRun, name: str) -> Iterator[Finding]:
    """The third run is the one that took place later: what counts runs has counted on by as much again."""
    differing = _differences(first.outputs, again.outputs)
    later_values = {place: value for place, _, value in _differences(first.outputs, later.outputs)}
    for place, one, other in differing:
        if place in _SHAPES:
            yield Finding("random", name, f"two runs at the same moment had {_either(place, one, other)}")
        elif _counts_on(one, other, later_values.get(place)):
            yield Finding("counter", name, f"two runs at the same moment counted on: {one} and {other} in {place}")
        elif are_times(one, other):
            told = f"two runs sent other times in {place}, of a clock that could not be stopped: {one} and {other}"
            yield Finding("clock", name, told)
        else:
            yield Finding("random", name, f"two runs at the same moment sent other values in {place}")
    if bool(later.error) != bool(first.error) == bool(again.error):
        yield Finding("clock", name, f"a run two days later ended with {later.error or 'no error'!r:.80}")
    told_already = {place for place, _, _ in differing}
    for place, one, other in _differences(first.outputs, later.outputs):
        if place in told_already:
            continue
        if place in _SHAPES:
            yield Finding("clock", name, f"a run two days later had {_either(place, other, one)}")
        else:
            told = f"a run two days later sent another time in {place}: {one!r:.40} and {other!r:.40}"
            yield Finding("clock", name, told)


def _other_chances(rehearsal: Rehearsal, first: RehearsalRun, name: str) -> Iterator[Finding]:
    for chance in (Chance("low", "low"), Chance("high", "high"), Chance("another")):
        other = rehearsal.run(chance=chance, watched=False)
        if bool(other.error) != bool(first.error):
            ended = other.error or first.error
            yield Finding("random", name, f"a run that drew other random values ended with {ended!r:.80}")
        for place, one, value in _differences(first.outputs, other.outputs):
            if place in _SHAPES:
                yield Finding("random", name, f"two runs at the same moment had {_either(place, value, one)}")
            else:
                yield Finding("random", name, f"two runs at the same moment sent other values in {place}")


def _other_moments(rehearsal: Rehearsal, name: str) -> Iterator[Finding]:
    until = time.monotonic() + _CLOCK_SECONDS
    for boundary, points in moments(rehearsal.moment):
        before: tuple[datetime, RehearsalRun] | None = None
        for point in points:
            if time.monotonic() > until:
                rehearsal.harness.not_seen(
                    f"{name} takes long: the clock was not looked at around {boundary} and later."
                )
                return
            run = rehearsal.run(at=point, watched=False)
            what = _changed_meanwhile(before[1], run) if before is not None else None
            if before is not None and what is not None:
                between = f"{before[0]:{_MOMENT}} and {point:{_MOMENT}} UTC"
                yield Finding("clock", name, f"around {boundary} ({between}) two runs {what}")
                return
            before = point, run


def _changed_meanwhile(one: RehearsalRun, other: RehearsalRun) -> str | None:
    """What the clock alone changed between two runs."""
    if bool(one.error) != bool(other.error):
        return f"ended differently, one of them with {one.error or other.error!r:.80}"
    for place, value, after in _differences(one.outputs, other.outputs):
        return (
            f"had {_either(place, after, value)}"
            if place in _SHAPES
            else f"sent {value!r:.40} and {after!r:.40} in {place}"
        )
    return None


def _counts_on(one: Any, other: Any, third: Any) -> bool:
    if not all(isinstance(value, int) and not isinstance(value, bool) for value in (one, other, third)):
        return False
    return bool(other - one == third - other > 0)


def _either(place: str, one: Any, other: Any) -> str:
    return f"{one} outputs instead of {other}" if place == _NUMBER else f"{place} as {one} instead of {other}"


def _other_processes(
    rehearsal: Rehearsal, first: RehearsalRun, again: RehearsalRun, name: str, wanted: frozenset[Kind]
) -> Iterator[Finding]:
    if wanted & {"set order", "environment", "unstable key"}:
        yield from _differing_processes(rehearsal, first, again, name)
    if wanted & {"environment", "memory"} and first.error is None and first.outputs == again.outputs:
        yield from of_what_is_carried(rehearsal, first, name)


def _differing_processes(
    rehearsal: Rehearsal, first: RehearsalRun, again: RehearsalRun, name: str
) -> Iterator[Finding]:
    """Once for each handler: processes take their time."""
    harness = rehearsal.harness
    keys = [_key(harness, rehearsal.message) for _ in range(2)]
    if keys[0] != keys[1]:
        yield Finding("unstable key", name, f"its key is another one each time it is asked: {keys[0]} and {keys[1]}")
        return
    if name in harness.compared:
        return
    harness.compared.add(name)
    here, keys_there = elsewhere.as_json(first.outputs), set()
    for answer in elsewhere.answers(harness, rehearsal.message):
        keys_there.add(answer["key"])
        if len(keys_there) > 1:
            one, other = sorted(keys_there)
            yield Finding("unstable key", name, f"two processes count it by other ids: {one} and {other}")
            return
        # Outputs that differ from run to run have been told already.
        if first.outputs == again.outputs and answer["failed"] == bool(first.error) and answer["outputs"] != here:
            yield _of_another_process(harness, rehearsal.message, name, here, answer["outputs"])
            return


def _of_another_process(harness: Harness, message: Message, name: str, here: list[Any], there: list[Any]) -> Finding:
    told = elsewhere.difference(here, there)
    if elsewhere.tells_processes_apart(harness, message) and not elsewhere.is_reordered(here, there):
        return Finding("environment", name, f"another process on another host sent other values: {told}")
    return Finding("set order", name, f"two processes sent the same outputs in another order, as that of a set: {told}")


def _key(harness: Harness, message: Message) -> str:
    return elsewhere.key_of(decode(harness.process().consumer, Delivery(message=message, queue="")))


def _redelivered(first: RehearsalRun, again: RehearsalRun, redelivery: RehearsalRun, name: str) -> Iterator[Finding]:
    if redelivery.execution is None:
        return
    said = "told that it is redelivered (second attempt), it"
    if [text for text, _ in again.seen.writes] != [text for text, _ in redelivery.seen.writes]:
        yield Finding(
            "redelivered", name, f"{said} sent {len(redelivery.seen.writes)} writes instead of {len(again.seen.writes)}"
        )
    elif bool(redelivery.error) != bool(first.error):
        yield Finding("redelivered", name, f"{said} ended with {redelivery.error or first.error!r}")
    elif first.outputs == again.outputs != redelivery.outputs:
        yield Finding(
            "redelivered",
            name,
            f"{said} sent other outputs ({len(redelivery.outputs)} instead of {len(again.outputs)})",
        )


def _swallowed(rehearsal: Rehearsal, first: RehearsalRun, name: str) -> Iterator[Finding]:
    actions = len(first.seen.statements) + len(first.outputs)
    for number in range(1, min(actions, _MOST_FAILURES) + 1):
        run = rehearsal.run(fail_at=number)
        if run.seen.injected and run.error is None:
            yield Finding(
                "swallowed error", name, f"an error in its action {number} of {actions} did not come out of it"
            )
            return


def _races(rehearsal: Rehearsal, name: str) -> Iterator[Finding]:
    insert = unguarded(rehearsal.harness, rehearsal.message)
    if insert is not None:
        text = " ".join(insert.split())[:80]
        yield Finding(
            "check then insert", name, f"it looks before it inserts, and no unique key holds off a second one: {text}"
        )


# Comparing ----------------------------------------------------------------------------------------------------------


def _differences(one: list[ToldOutput], other: list[ToldOutput]) -> list[tuple[str, Any, Any]]:
    """Where two runs' outputs differ: (place, value, other value)."""
    if len(one) != len(other):
        return [(_NUMBER, len(one), len(other))]
    found = []
    for number, (left, right) in enumerate(zip(one, other, strict=True), start=1):
        where = f"output {number} to {left[0]}"
        if left[:2] != right[:2]:
            found.append((_PLACE, left[:2], right[:2]))
        found += _value_differences(_parsed(left[2]), _parsed(right[2]), "$", where)
        found += _value_differences(left[3], right[3], "headers", where)
    return found


def _value_differences(one: Any, other: Any, path: str, where: str) -> list[tuple[str, Any, Any]]:
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [item for key in one for item in _value_differences(one[key], other[key], f"{path}.{key}", where)]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [item for index, (a, b) in pairs for item in _value_differences(a, b, f"{path}[{index}]", where)]
    return [] if one == other else [(f"{path} of {where}", one, other)]


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body, parse_float=read_number)
    except ValueError:
        return body


def _handler_name(harness: Harness, message: Message) -> str:
    declared = harness.registry.find(message).message_type
    return elsewhere.name_of(harness.registry.declared[declared].function).rpartition("<locals>.")[2]
