"""The database and the broker as one value, and what each call of a port does to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from idemp.messages import SUSPICIOUS

Call = tuple[Any, ...]
Answer = Any
ONE_BY_ONE = frozenset({"worker 2.0"})  # so that it gets copies of what another one has

WAITS, DUE, LEASED, DEAD = "waits", "due", "leased", "dead"


@dataclass(frozen=True)
class Row:
    """A retry: a delivery in the database."""

    message: int
    when: str
    holder: str = ""
    deliveries: int = 0
    attempts: int = 0
    deaths: int = 0


@dataclass(frozen=True)
class State:
    """Everything that outlives a process.

    Attributes:
        queue: Messages that wait at the broker, each with its redelivered flag.
        taken: Messages that were delivered and not acknowledged: process, tag, message.
        opened: Claims of open transactions, by their process.
        effects: How often the effect of each message is committed.
        pending: Outputs without a confirm, by message: in grace, due or leased.
        sent: How often the broker took the output of each message.
    """

    queue: tuple[tuple[int, bool], ...]
    taken: tuple[tuple[str, int, int], ...] = ()
    tags: int = 0
    claims: frozenset[int] = frozenset()
    opened: frozenset[tuple[int, str]] = frozenset()
    effects: tuple[int, ...] = (0, 0)
    pending: frozenset[tuple[int, str]] = frozenset()
    rows: frozenset[Row] = frozenset()
    sent: tuple[int, ...] = (0, 0)


def apply(state: State, process: str, call: Call) -> tuple[State, Answer]:
    """Return the state behind a call of a process, and its answer. Promises that a call could break are judged here."""
    name, *arguments = call
    call_of: Callable[..., tuple[State, Answer]] = CALLS[name]
    return call_of(state, process, *arguments)


def receive(state: State, process: str, limit: int) -> tuple[State, Answer]:
    found = state.queue[: 1 if process in ONE_BY_ONE else limit]
    tagged = tuple((process, state.tags + number, message) for number, (message, _) in enumerate(found))
    answer = tuple((tag, message, again) for (_, tag, message), (_, again) in zip(tagged, found, strict=True))
    return replace(state, queue=state.queue[len(found) :], taken=state.taken + tagged, tags=state.tags + len(found)), answer


def ack(state: State, process: str, tags: tuple[int, ...]) -> tuple[State, Answer]:
    kept = {row.message for row in state.rows} | state.claims
    for _, tag, message in state.taken:
        assert tag not in tags or message in kept, f"message {message} is acknowledged before a commit"
    return replace(state, taken=tuple(each for each in state.taken if each[0] != process or each[1] not in tags)), None


def claim(state: State, process: str, messages: tuple[tuple[int, str], ...]) -> tuple[State, Answer]:
    answers = []
    for message, resends in messages:
        if message in state.claims:
            when = dict(state.pending).get(message)
            answers.append(("duplicate", when is not None, when == DUE or (when is not None and resends != "due")))
        elif any(each == message and other != process for each, other in state.opened):
            answers.append(("in flight",))
            break
        else:
            state = replace(state, opened=state.opened | {(message, process)})
            answers.append(("claimed",))
    return state, tuple(answers)


def finish(state: State, process: str, handled: tuple[int, ...], effects: tuple[int, ...]) -> tuple[State, Answer]:
    counts = tuple(count + effects.count(message) for message, count in enumerate(state.effects))
    assert max(counts) <= 1, "an effect is committed twice"
    claims, pending = state.claims | set(handled), state.pending | {(message, WAITS) for message in handled}
    return rollback(replace(state, claims=claims, pending=pending, effects=counts), process)


def rollback(state: State, process: str) -> tuple[State, Answer]:
    return replace(state, opened=frozenset(each for each in state.opened if each[1] != process)), None


def publish(state: State, process: str, outputs: tuple[int, ...]) -> tuple[State, Answer]:
    for message in outputs:
        assert message in state.claims, f"the output of message {message} is sent without a commit"
    return replace(state, sent=tuple(count + outputs.count(message) for message, count in enumerate(state.sent))), None


def confirm(state: State, process: str, outputs: tuple[int, ...]) -> tuple[State, Answer]:
    for message in outputs:
        assert state.sent[message], f"the output of message {message} counts as sent without the broker's word"
    return replace(state, pending=frozenset(each for each in state.pending if each[0] not in outputs)), None


def refuse(state: State, process: str, outputs: tuple[int, ...]) -> tuple[State, Answer]:
    waiting = frozenset((message, WAITS if message in outputs else when) for message, when in state.pending)
    return replace(state, pending=waiting), None


def lease_outputs(state: State, process: str) -> tuple[State, Answer]:
    due = tuple(sorted(message for message, when in state.pending if when == DUE))
    leased = frozenset((message, LEASED if when == DUE else when) for message, when in state.pending)
    return replace(state, pending=leased), due


def lease_messages(state: State, process: str, limit: int) -> tuple[State, Answer]:
    due = sorted((row for row in state.rows if row.when == DUE), key=lambda row: row.message)
    calm = [row for row in due if row.deaths < SUSPICIOUS]
    state, answer = lease(state, process, calm[:limit])
    return state, (answer, len(calm) < len(due))


def lease_suspect(state: State, process: str) -> tuple[State, Answer]:
    due = sorted((row for row in state.rows if row.when == DUE), key=lambda row: row.message)
    return lease(state, process, [row for row in due if row.deaths >= SUSPICIOUS][:1])


def lease(state: State, process: str, found: list[Row]) -> tuple[State, Answer]:
    leased = [replace(row, when=LEASED, holder=process, deliveries=row.deliveries + 1) for row in found]
    answer = tuple((row.message, row.deliveries, row.attempts, row.deaths) for row in leased)
    return replace(state, rows=state.rows.difference(found).union(leased)), answer


def settle(state: State, process: str, failed: tuple[Call, ...], done: tuple[tuple[int, int], ...]) -> tuple[State, Answer]:
    rows = {row.message: row for row in state.rows}

    def ours(message: int, deliveries: int) -> bool:
        row = rows.get(message)
        return row is not None and (row.holder, row.deliveries) == (process, deliveries)

    for message, deliveries, when, attempts, deaths in failed:
        if deliveries is None:
            rows.setdefault(message, Row(message, when, attempts=attempts, deaths=deaths))  # a conflict leaves a row alone
        elif ours(message, deliveries):
            rows[message] = replace(rows[message], when=when, holder="", attempts=attempts)
    for message, deliveries in done:
        if ours(message, deliveries):
            del rows[message]
    return replace(state, rows=frozenset(rows.values())), None


def abort(state: State, process: str) -> State:
    """Return the state when the transaction of a process is rolled back."""
    return rollback(state, process)[0]


def die(state: State, process: str) -> State:
    """Return the state behind the death of a process."""
    return disconnect(abort(state, process), process)


def disconnect(state: State, process: str) -> State:
    """Return the state when the broker has lost a process: what it has not acknowledged is delivered again."""
    back = tuple((message, True) for each, _, message in state.taken if each == process)
    taken = tuple(each for each in state.taken if each[0] != process)
    return replace(state, queue=back + state.queue, taken=taken)


def let_pass(state: State, alive: tuple[str, ...] = ()) -> State:
    """Return the state when delays, graces, and leases of processes that are gone have run out."""

    def later(row: Row) -> Row:
        gone = row.when == LEASED
        return row if row.when == DEAD or row.holder in alive else replace(row, when=DUE, holder="", deaths=row.deaths + gone)

    pending = frozenset((message, DUE) for message, _ in state.pending)
    return replace(state, rows=frozenset(map(later, state.rows)), pending=pending)


CALLS: dict[str, Callable[..., tuple[State, Answer]]] = {
    each.__name__: each
    for each in (
        receive, ack, claim, finish, rollback, publish, confirm, refuse, lease_outputs, lease_messages, lease_suspect,
        settle
    )
}  # fmt: skip
