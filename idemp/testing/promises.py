"""The promises, held against what a run did: at any time, and when everything has come to rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Result, ScalarResult, inspect
from sqlalchemy.orm import InstanceState

from idemp.broker.copies import attempt_of
from idemp.broker.port import Delivery
from idemp.deadletter import without_story
from idemp.errors import MessageError
from idemp.messages import HEADER_PREFIX, UNSTORED_HEADER
from idemp.testing.database_time import are_times, differing_places
from idemp.testing.story import differing, named
from idemp.work import decode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from uuid import UUID

    from idemp.messages import Message, Output
    from idemp.testing.execution import Execution
    from idemp.testing.harness import Harness

Content = tuple[str, str, str | None, bytes, tuple[tuple[str, str], ...]]
"""Exchange, routing key, type, body and the user's own headers of an output."""

_MOST_SHOWN: Final = 600


class PromiseBroken(AssertionError):
    """What happened is not what happens when each message is handled once.

    Example:
        >>> issubclass(PromiseBroken, AssertionError)
        True
    """


@dataclass(frozen=True)
class Seen:
    """What there was to see at the end of a run.

    Attributes:
        state: what the user's function read.
        stored: the outputs of opted-in handlings, by id.
        unstored: where the outputs of other handlings went, and their types.
    """

    state: Any
    stored: dict[UUID, Content]
    unstored: frozenset[tuple[str, str | None]]


class Promises:
    """Holds the promises against a harness.

    Args:
        harness: where the run took place.
        state: what must be equal in the end; default how many rows each of the user's tables has, if there is a database.
        setup: what is there before the first message; it may write, and its writes are committed.

    Example:
        >>> from idemp import App, Idempotent
        >>> from idemp.testing.harness import Harness
        >>> app = App("orders")
        >>> @app.handler(dict, type="orders.Place", policy=Idempotent(key="id"))
        ... def place(message: dict[str, int]) -> None: ...
        >>> with Harness(app) as harness:
        ...     promises, message = Promises(harness), harness.send({"id": 7}, type="orders.Place")
        ...     harness.rest()
        ...     promises.at_rest([message])
    """

    def __init__(
        self,
        harness: Harness,
        *,
        state: Callable[[Any], Any] | None = None,
        setup: Callable[[Any], object] | None = None,
    ) -> None:
        self.harness = harness
        self._state: Callable[[Any], Any] = state or harness.premises.default_state()
        self._setup = setup
        self._keys: dict[int, tuple[Message, str, bool]] = {}

    def begin_anew(self) -> None:
        """Empty the harness, and put there what is there at the beginning."""
        self.harness.begin_anew()
        self._keys.clear()
        if self._setup is not None:
            self.harness.premises.write(self._setup)

    def key_of(self, message: Message) -> tuple[str, bool]:
        """What makes two messages the same to the inbox, and whether their type is opted in."""
        known = self._keys.get(id(message))
        if known is None:
            try:
                work = decode(self.harness.consumer, Delivery(message=message, queue=self.harness.queue))
                key = str(work.effective.key if work.effective else message.message_id)
                known = (message, key, work.policy.idempotent)
            except MessageError:
                known = (message, f"no key: {message.message_id}", False)
            self._keys[id(message)] = known
        return known[1:]

    # At any time ----------------------------------------------------------------------------------------------------

    def at_any_time(self) -> None:
        """Effects at most once, and one id with one body.

        Raises:
            PromiseBroken: it is not so.
        """
        committed = Counter[str]()
        for execution in self.harness.executions:
            if execution.committed:
                key, idempotent = self.key_of(execution.message)
                committed[key] += idempotent
                _hold(committed[key] <= 1, f"{named(execution.message)} had its effects twice")
        _one_body_each(self.harness.publisher.sent)
        for id_, times in Counter(output.id for output in self.harness.effects).items():
            _hold(times <= 1, f"The effect {id_} was done {times} times, and no worker died of it")

    # At rest --------------------------------------------------------------------------------------------------------

    def at_rest(self, published: Iterable[Message]) -> None:
        """Every message handled once or parked, and all as in a run in which each was handled once, without faults.

        That other run follows in the same database: what is left in it afterwards is the other run's.

        Raises:
            PromiseBroken: it is not so.
        """
        self.at_any_time()
        harness = self.harness
        handled = self._in_order_of_commit()
        settled = {key for key, _ in handled} | {self.key_of(without_story(message))[0] for message in harness.dead()}
        for message in published:
            lost = f"{named(message)} was lost: it was neither handled nor parked in the dead-letter queue"
            _hold(self.key_of(message)[0] in settled, lost)
        confirmed = {output.id for output in (*harness.publisher.confirmed, *harness.effects)}
        seen = self._seen()
        self.begin_anew()
        for _, execution in handled:
            self._handle_once(execution)
        harness.run_effects()
        self._compare(seen, self._seen(), confirmed)

    def _in_order_of_commit(self) -> list[tuple[str, Execution]]:
        """Each message once: the last time that it was committed, where its type is not opted in."""
        last: dict[str, Execution] = {}
        for execution in self.harness.executions:
            if execution.committed:
                key, _ = self.key_of(execution.message)
                last.pop(key, None)
                last[key] = execution
        return list(last.items())

    def _handle_once(self, execution: Execution) -> None:
        message = execution.message
        try:
            self._process(message, execution.attempt)
        except Exception as error:
            raise PromiseBroken(
                f"{named(message)} was handled in this run. With each message handled once, in the same order and without "
                f"faults, its handler raises {error!r}. What it does depends on more than its message and the database."
            ) from error

    def _process(self, message: Message, attempt: int) -> None:
        """As a first attempt, which is what the state has to follow from; one that is meant to fail is tried again."""
        first = attempt_of(message)
        try:
            self.harness.process().process(message, attempt=first)
        except Exception:
            if attempt == first:
                raise
            self.harness.process().process(message, attempt=attempt)

    def state(self) -> Any:
        """What the user's function reads, in a form that can be compared."""
        own = self.harness.state(lambda session: comparable(self._state(session)))
        others = {name: database.rows() for name, database in self.harness.databases.items()}
        return (own, others) if others else own

    def _seen(self) -> Seen:
        harness = self.harness
        sent = [*harness.publisher.sent, *harness.effects]
        return Seen(
            self.state(),
            {output.id: _content(output) for output in sent if not _is_unstored(output)},
            frozenset((output.routing_key, output.message.type) for output in sent if _is_unstored(output)),
        )

    def _compare(self, run: Seen, reference: Seen, confirmed: set[UUID]) -> None:
        once = "with each message handled once, in the same order and without faults"
        told = f"  this run: {_short(run.state)}\n  once:     {_short(reference.state)}"
        places = differing_places(run.state, reference.state)
        if places and all(are_times(*values) for values in places.values()):
            told += f"\nOnly times differ: {', '.join(places)}. Leave out of state= what the database's clock gives."
        _hold(not places, f"The state is not what it is {once}.\n{told}")
        others = differing(list(run.stored), list(reference.stored))
        _hold(not others, f"The outputs are not those that are sent {once}: {others}")
        for id_, content in run.stored.items():
            same = content == reference.stored[id_]
            _hold(
                same,
                f"The output {id_} is not the one that is sent {once}.\n"
                f"  this run: {_short(content)}\n  once:     {_short(reference.stored[id_])}",
            )
            _hold(
                id_ in confirmed, f"The broker never confirmed the output {id_} to {content[1]}, and nothing is pending"
            )
        _hold(run.unstored == reference.unstored, f"Outputs went to {run.unstored}, and {once} to {reference.unstored}")


def comparable(value: Any) -> Any:
    """A value that can be compared after its session has ended: rows and ORM objects by their columns.

    Example:
        >>> comparable({"sold": (1, 2), "kinds": {"b", "a"}})
        {'sold': [1, 2], 'kinds': ["'a'", "'b'"]}
    """
    if isinstance(value, Mapping):
        return {key: comparable(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(repr(comparable(item)) for item in value)
    if isinstance(value, list | tuple | Result | ScalarResult | Iterator):
        return [comparable(item) for item in value]
    state = inspect(value, raiseerr=False)
    if isinstance(state, InstanceState):
        columns = {attribute.key: getattr(value, attribute.key) for attribute in state.mapper.column_attrs}
        return (type(value).__name__, columns)
    return value


def _hold(promise: bool, otherwise: str) -> None:
    if not promise:
        raise PromiseBroken(otherwise)


def _one_body_each(sent: Sequence[Output]) -> None:
    contents: dict[UUID, Content] = {}
    for output in sent:
        if not _is_unstored(output):
            first = contents.setdefault(output.id, _content(output))
            _hold(
                first == _content(output),
                f"The output {output.id} was sent with different contents: {_short(first)} and {_short(_content(output))}",
            )


def _content(output: Output) -> Content:
    headers = output.message.headers
    own = tuple(sorted((name, repr(value)) for name, value in headers.items() if not name.startswith(HEADER_PREFIX)))
    return output.exchange, output.routing_key, output.message.type, output.message.body, own


def _is_unstored(output: Output) -> bool:
    return bool(output.message.headers.get(UNSTORED_HEADER))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + "…"
