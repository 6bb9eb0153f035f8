"""`assert_idempotent`: runs of a handler are compared, not its code."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final
from uuid import UUID, uuid4

from pydantic import BaseModel
from sqlalchemy import Connection, MetaData, exc, select
from sqlalchemy.orm import Session

from idemp.app import APPS, App
from idemp.errors import ConfigurationError, Unreadable, describe_error
from idemp.handlers import function_name
from idemp.identity import Key, uuid7
from idemp.messages import Delivery, check_list, encode, parse
from idemp.policy import Idempotent, Policy
from idemp.testing.app import AppTest
from idemp.testing.conditions import Conditions
from idemp.testing.elsewhere import Elsewhere, name_of
from idemp.testing.faults import CURES, Fault, NotIdempotent, TrialReport
from idemp.testing.observing import Statement
from idemp.testing.remembering import shape
from idemp.testing.runs import Run, Runner

__all__ = ["assert_idempotent", "assert_idempotent_async", "rows_of"]

LATER: Final = 183_845.0  # seconds: two days, three hours, four minutes and five seconds
MOST: Final = 12  # statements that are made to fail
PROCESSES: Final = 6  # where a handler makes sets; two items have one order in half of them
ALWAYS: Final = (
    "files, connections, threads and pools that were there before",
    "what drivers and other libraries in C do by themselves, such as psycopg.connect()",
)


def assert_idempotent(
    handler: Callable[..., Any],
    message: BaseModel | Mapping[str, Any] | bytes,
    *,
    app: App | None = None,
    policy: Policy | None = None,
    tables: MetaData | None = None,
    setup: Callable[[Session], object] | None = None,
    state: Callable[[Session], Any] | None = None,
    properties: Mapping[str, Any] | None = None,
    allow: Collection[str] = (),
    database: str | None = None,
    loop: asyncio.AbstractEventLoop | None = None,
) -> TrialReport:
    """Run a handler many times on one message, and compare the runs.

    Each run is rolled back before its COMMIT: twice alike, at a later time, with other random values, as a second attempt, in other
    processes, with errors in its statements, and side by side with an equal message of another id. Meanwhile, what it does outside
    its transaction is observed. In the end the message is delivered twice, and committed. What it sends goes nowhere, so no other
    handler runs.

    Args:
        handler: A function that `App.handler` has taken, or any other one with a `policy`.
        message: A model, a mapping or JSON text.
        app: Where the handler belongs to, if it belongs to several.
        policy: Of a function that belongs to no app; its message has to be a model then.
        tables: Tables of the handler, which are created.
        setup: Fills them before all runs.
        state: Returns what each run has to leave equal, whatever the clock, chance and attempt.
        properties: Of the message, such as `headers` or `reply_to`.
        allow: Kinds of faults that are none here, such as `"clock"`; see `idemp.testing.faults.CURES`.
        database: URL of an empty database for tests; by default a temporary SQLite file.
        loop: Event loop of an `async def` handler, which runs in another thread; by default one of the kit's.

    Raises:
        NotIdempotent: It is not. The text names each cause and its cure, and what was not looked at.
        AssertionError: The handler failed on the message, so nothing was compared.
        ConfigurationError: The arguments fit no handler.

    Example:
        >>> import datetime
        >>> from idemp import Context
        >>> class PlaceOrder(BaseModel):
        ...     __message_type__ = "shop.PlaceOrder"
        ...     order_id: int
        >>> def place_order(command: PlaceOrder, ctx: Context) -> None:
        ...     at = str(datetime.date.today())
        ...     ctx.send({"order_id": command.order_id, "at": at}, to="stock", type="shop.ReserveStock")
        >>> assert_idempotent(place_order, PlaceOrder(order_id=7), policy=Idempotent(key="order_id"))
        Traceback (most recent call last):
        idemp.testing.faults.NotIdempotent: place_order is not idempotent:
        1. clock: at a later time, output 1 to stock has another $.at: ...
            Cure: take the time from the message, or leave it to the database (a default of the column)
        ...
    """
    __tracebackhide__ = True  # pytest shows the line of the test
    check_list(allow, "allow")
    if unknown := sorted(set(allow) - set(CURES)):
        raise ConfigurationError(f"allow={unknown}: there are {', '.join(CURES)}")
    app, name = _app_of(handler, message, app, policy), function_name(handler)
    with AppTest(app, tables=tables, database=database, broker=None) as test:
        test.loop = loop or test.loop
        if setup is not None:
            with test.session() as session:
                setup(session)
        registered = next(each for each in app.handlers.values() if each.function == handler)
        body = message if isinstance(message, bytes) else encode(message)
        delivery = Delivery(app.name, {"message_id": uuid7(), "type": registered.type, **(properties or {})}, body)
        runner = Runner(registered, test.url, test.database.tables.prefix, state=state, loop=test.loop)
        try:
            trial = _Trial(test, runner, delivery, tables, state)
            found = [each for each in trial.faults() if each.kind not in allow]
            found = found or [each for each in trial.delivered() if each.kind not in allow]
        finally:
            runner.close()
    if found:
        first = {each.kind: each for each in reversed(found)}  # of each kind
        raise NotIdempotent(name, [*first.values()][::-1], trial.not_looked_at)
    return TrialReport(name, runner.runs, trial.not_looked_at)


async def assert_idempotent_async(handler: Callable[..., Any], message: Any, **options: Any) -> TrialReport:
    """Do the same for an `async def` handler, on the event loop that runs: for clients that belong to it.

    Args:
        handler: See `assert_idempotent`, as for all other arguments.
        message: A model, a mapping or JSON text.
        options: The other arguments.

    Raises:
        NotIdempotent: It is not.
        AssertionError: The handler failed on the message, so nothing was compared.
        ConfigurationError: The arguments fit no handler.

    Example:
        >>> async def test_place_order() -> None:
        ...     await assert_idempotent_async(place_order, PlaceOrder(order_id=7), tables=Base.metadata)
    """
    loop = asyncio.get_running_loop()
    return await asyncio.to_thread(assert_idempotent, handler, message, loop=loop, **options)


def _app_of(function: Callable[..., Any], message: Any, app: App | None, policy: Policy | None) -> App:
    """Return the app that a handler belongs to: it is tested under the policy that counts."""
    apps = [each for each in ([app] if app else APPS) if any(one.function == function for one in each.handlers.values())]
    name = function_name(function)
    if len(apps) == 1 and policy is None:
        return apps[0]
    if len(apps) > 1:
        raise ConfigurationError(f"{name} belongs to {len(apps)} apps: pass app=")
    if app is None and policy is not None and not apps:
        if not isinstance(message, BaseModel):
            raise ConfigurationError(f"{name} belongs to no app: pass a model as its message, or test it by its app")
        made = App("test")
        APPS.discard(made)
        made.handler(type(message), policy=policy)(function)
        return made
    raise ConfigurationError(f"{name} belongs to {'an app, whose policy counts' if apps else 'no app: pass policy='}")


class _Trial:
    """All runs of one handler on one message."""

    def __init__(
        self, test: AppTest, runner: Runner, delivery: Delivery, tables: MetaData | None, state: Callable[[Session], Any] | None
    ) -> None:
        self._test, self._runner, self._delivery, self._tables, self._state = test, runner, delivery, tables, state
        self._handler, self._given = runner.handler, Conditions()
        self.not_looked_at = list(ALWAYS)

    def faults(self) -> Iterator[Fault]:
        first = self._runner.run(self._delivery, self._given)
        known = list(_outside(first))
        yield from known
        if first.error is not None or first.ended is not None:
            if first.error is not None and not known:
                raise AssertionError(
                    f"{function_name(self._handler.function)} failed on the message, so nothing was compared: "
                    f"{describe_error(first.error)}"
                ) from first.error
            return
        alike = yield from self._compared(first)
        others = self._start_others(first) if alike else []  # else nothing could be told from them; it takes them some time
        yield from self._swallowed(first)
        yield from self._race()
        yield from self._elsewhere(first, others)

    # Runs that have to be equal

    def _compared(self, first: Run) -> Generator[Fault, None, bool]:
        again = self._runner.run(self._delivery, self._given)
        yield from _outside(again)
        if again.seen.left:
            yield Fault("thread", f"it started {again.seen.left[0]}, and did not wait for it")
        difference = None
        if remembered := self._remembered(first, again):
            yield Fault("memory", f"it changed {', '.join(remembered[:3])}, which outlives the message")
        elif difference := _difference(first, again):
            yield Fault("chance", f"in a second run that is alike, {difference}")
        if remembered or difference:
            return False
        given = self._given
        for kind, words, other in (
            ("clock", "at a later time", replace(given, at=given.at + LATER)),
            ("chance", "with other random values", replace(given, seed=1)),
            ("chance", "with low random values", replace(given, draws="lowest")),
            ("chance", "with high random values", replace(given, draws="highest")),
            ("attempt", "as a second attempt", replace(given, attempt=2)),
        ):
            if difference := _difference(first, self._runner.run(self._delivery, other), writes=kind == "attempt"):
                yield Fault(kind, f"{words}, {difference}")
        return True

    def _start_others(self, first: Run) -> list[Elsewhere]:
        for each in (self._handler.function, self._handler.model):
            if name_of(each) is None:
                what = f"other processes: {function_name(each)} cannot be imported there by its name"
                self.not_looked_at.append(what)
                return []
        count = PROCESSES if first.after.uses_sets else 1
        return [Elsewhere(self._handler, seed) for seed in range(1, count + 1)]

    def _elsewhere(self, first: Run, others: Sequence[Elsewhere]) -> Iterator[Fault]:
        for other in others:
            answer = other.run(self._delivery, self._given, self._test.url, self._test.database.tables.prefix)
            if answer is None:
                self.not_looked_at.append("other processes: they could not import the handler")
                return
            outputs = json.loads(json.dumps(first.outputs))
            there = Run(answer["outputs"], answer["error"], None, first.seen, first.before, first.after, first.state)
            if difference := _difference(replace(first, outputs=outputs), there):
                reordered = _sorted(outputs) == _sorted(answer["outputs"])
                yield Fault("order" if reordered else "process", f"in another process, {difference}")
                return

    def _remembered(self, first: Run, again: Run) -> list[str]:
        """Return what was changed, but what is made at its first use, to stay, whatever the message."""
        found = again.before.changed(again.after)
        once = [place for place in first.before.changed(first.after) if place not in found]
        if once:
            other = self._runner.run(self._varied(), self._given)
            if other.error is None:
                found += [place for place in other.before.changed(other.after) if place in once]
            else:  # nothing is shown by a message that fails
                leaves = [repr(shape(leaf)) for leaf in _leaves(parse(self._delivery.body)).values()]
                found += [place for place in once if any(leaf in repr(first.after.places.get(place)) for leaf in leaves)]
        return found

    def _varied(self) -> Delivery:
        """Return another message: each value that can be another one is."""
        document = parse(self._delivery.body)
        for path, leaf in _leaves(document).items():
            for value in _others(leaf):
                changed = _with(document, path, value)
                if self._fits(changed):
                    document = changed
                    break
        return self._copy(document)

    def _fits(self, document: Any) -> bool:
        try:
            self._handler.accept(self._copy(document))
        except Unreadable:
            return False
        return True

    def _copy(self, document: Any) -> Delivery:
        return replace(
            self._delivery, properties={**self._delivery.properties, "message_id": uuid7()}, body=json.dumps(document).encode()
        )

    # Errors, races, deliveries

    def _swallowed(self, first: Run) -> Iterator[Fault]:
        count = len(first.seen.statements)
        if count > MOST:
            self.not_looked_at.append(f"errors in statements after the first {MOST} of {count}")
        for number in range(1, min(count, MOST) + 1):
            run = self._runner.run(self._delivery, self._given, fail_at=number)
            if run.seen.failed and run.error is None and _difference(first, run, writes=True):  # else it has tried again
                statement = " ".join(first.seen.statements[number - 1].text.split())[:60]
                yield Fault("swallowed", f"an error in its statement {number} of {count} did not come out: {statement}")
                return

    def _race(self) -> Iterator[Fault]:
        """Handle an equal message of another id at the same time: as if both had looked before either wrote."""
        other = self._same_of_another_id()
        if other is None:
            return
        _, after = self._runner.run_all([self._delivery, other], self._given)
        alone = self._runner.run(other, self._given)
        done = {each.text for each in after.seen.statements}
        missing = [each for each in alone.seen.statements if each.inserts and each.text not in done]
        if not missing or after.error is not None or any(each.locks and each.rows for each in alone.seen.statements):
            return
        through: list[bool] = []

        def late(connection: Connection) -> None:
            through.extend(_gets_through(connection, each) for each in alone.seen.statements if each.writes)

        self._runner.run_all([self._delivery], self._given, then=late)
        if all(through):
            statement = " ".join(missing[0].text.split())[:60]
            yield Fault("race", f"it looks before it inserts, and no unique constraint stops a second one: {statement}")

    def _same_of_another_id(self) -> Delivery | None:
        """Return a message that differs only in what it is counted by."""
        document, policy = parse(self._delivery.body), self._handler.policy
        if isinstance(policy, Idempotent):
            key = Key.of(policy.key)
            if key.kind not in ("body", "message_id"):
                self.not_looked_at.append("two messages at the same time: their key is neither a field nor the id of the message")
                return None
            for name in key.names:
                path = tuple(name.split("."))
                values = [_with(document, path, value) for value in _others(_leaves(document).get(path))]
                document = next(filter(self._fits, values), document)
            if document == parse(self._delivery.body) and key.kind == "body":
                self.not_looked_at.append("two messages at the same time: no other key fits the message")
                return None
        return self._copy(document)

    def delivered(self) -> Iterator[Fault]:
        """Deliver the message twice, and commit."""
        test, type, rows = self._test, self._handler.type, []
        test.delivers = False  # what it sends to its own queue would run other handlers, with all that they do outside
        for number in range(2):
            expected = 1 if self._handler.opted_in else number + 1
            test.send(self._delivery.body, **self._delivery.properties)
            try:
                test.run_until_idle()
            except Exception as error:
                raise AssertionError(f"{type} could not be committed: {describe_error(error)}") from error
            assert test.runs[type] == expected, f"{type} was handled {test.runs[type]} times, not {expected}"
            with test.session() as session:
                rows.append(self._state(session) if self._state is not None else rows_of(session, self._tables))
        if not self._handler.opted_in and rows[0] != rows[1]:
            yield Fault("repeated", "it is not opted in, and a second delivery changed what the first one had written")


def _outside(run: Run) -> Iterator[Fault]:
    if run.ended is not None:
        yield Fault("commit", f"it ended the transaction of its claim: {run.ended}")
    if run.seen.elsewhere:
        yield Fault("connection", f"it wrote on another connection: {run.seen.elsewhere[0]}")
    for kind, what in run.seen.outside:
        yield Fault(kind, f"before its transaction was committed, it called {what}")


def _difference(one: Run, other: Run, *, writes: bool = False) -> str | None:
    """Return what differs between two runs."""
    if bool(one.error) != bool(other.error):
        return f"it fails: {other.error!r}" if other.error else "it does not fail"
    if one.state != other.state:
        return f"the state is {other.state!r:.60}, not {one.state!r:.60}"
    texts = [[each.text for each in run.seen.statements if each.writes] for run in (one, other)]
    if writes and texts[0] != texts[1]:
        return f"it writes by {len(texts[1])} statements, not {len(texts[0])}"
    if len(one.outputs) != len(other.outputs):
        return f"it sends {len(other.outputs)} messages, not {len(one.outputs)}"
    for number, (left, right) in enumerate(zip(one.outputs, other.outputs, strict=True), start=1):
        where = f"output {number} to {left[1]}"
        if left[:4] != right[:4]:
            return f"{where} goes to {right[1]} as {right[2]}"
        for document, root in ((4, "$"), (5, "headers")):
            if path := _first_difference(left[document], right[document], root):
                return f"{where} has another {path}"
    return None


def _first_difference(one: Any, other: Any, path: str) -> str | None:
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        found = (_first_difference(one[key], other[key], f"{path}.{key}") for key in one)
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        found = (_first_difference(*pair, f"{path}[{at}]") for at, pair in enumerate(zip(one, other, strict=True)))
    else:
        return None if one == other else f"{path}: {one!r:.40}, then {other!r:.40}"
    return next(filter(None, found), None)


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sorted(each) for key, each in sorted(value.items())}
    return sorted(map(_sorted, value), key=repr) if isinstance(value, list) else value


def _gets_through(connection: Connection, statement: Statement) -> bool:
    try:
        with connection.begin_nested():
            result = connection.exec_driver_sql(statement.text, statement.values)
            changed = result.rowcount
            result.close()
    except exc.IntegrityError as error:
        return "foreign key" in str(error.orig).lower()  # to a row that was rolled back: no guard
    return statement.rows <= 0 or changed != 0


def _leaves(document: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    if not isinstance(document, dict):
        return {path: document}
    return {place: leaf for key, value in document.items() for place, leaf in _leaves(value, (*path, key)).items()}


def _with(document: Any, path: tuple[str, ...], value: Any) -> Any:
    return {**document, path[0]: _with(document[path[0]], path[1:], value)} if path else value


def _others(value: Any) -> list[Any]:
    """Return values that may replace it."""
    if isinstance(value, bool) or value is None:
        return []
    if isinstance(value, int | float):
        return [value + 1_000_003, value + 1, value - 1]
    if isinstance(value, str):
        try:
            UUID(value)
        except ValueError:
            return [f"{value}x", f"x{value}", value[::-1]]
        return [str(uuid4())]
    return []


def rows_of(session: Session, tables: MetaData | None) -> dict[str, list[str]]:
    """Return all rows; the numbers that a database gives them do not count.

    Example:
        >>> rows_of(Session(), None)
        {}
    """
    found = {}
    for table in tables.sorted_tables if tables is not None else ():
        counted = table.autoincrement_column
        rows = session.execute(select(*(column for column in table.columns if column is not counted)))
        found[table.name] = sorted(map(repr, rows))
    return found
