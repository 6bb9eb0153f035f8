"""Failures: one table that decides the fate of a delivery whose handling raised an error.

The first rule that fits decides. Rules about the database ask the store what the error means. If either the database
or the message may be to blame, they ask whether another connection can take work now.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any, Final

from idemp.errors import (
    Conflict,
    IdempError,
    InFlight,
    Late,
    Poison,
    Refuse,
    TimedOut,
    TransactionEnded,
    TransactionRolledBack,
    Undelivered,
    UnknownType,
    Unreadable,
)
from idemp.policy import Retry
from idemp.ports import Kind

__all__ = ["RULES", "Action", "Decision", "Phase", "Rule", "decide"]


class Action(Enum):
    """Fate of a delivery.

    Example:
        >>> Action("park").name
        'PARK'
    """

    HOLD = "hold"
    """The worker keeps it, and consumption pauses."""
    RERUN = "run again"
    """It runs again at once, a few times."""
    RETRY = "retry"
    """It becomes a row that is due later."""
    PARK = "park"
    """It becomes a dead letter."""


class Phase(IntEnum):
    """Phase of a handling in which it failed.

    Example:
        >>> Phase.CLAIM < Phase.HANDLER
        True
    """

    ACCEPT = 1
    CLAIM = 2
    HANDLER = 3
    FINISH = 4
    DISPATCH = 5


@dataclass(frozen=True)
class Rule:
    """A row of the table.

    Attributes:
        name: Name of the rule in logs, retries and dead letters.
        action: Fate of the delivery; RERUN becomes RETRY after `reruns`.
        why: The reason, for the documentation.
        uncounted: Retries that do not count as attempts; None if none ever does.
        delay: Seconds before an uncounted retry.
        then: What follows the uncounted retries: RETRY counts by the policy, PARK makes a dead letter.

    Example:
        >>> RULES["conflict"].action
        <Action.PARK: 'park'>
    """

    name: str
    action: Action
    why: str
    reruns: int = 0
    uncounted: int | None = 0
    delay: float = 0.0
    then: Action = Action.RETRY


RULES: Final[Mapping[str, Rule]] = {
    rule.name: rule
    for rule in (
        Rule("unreadable", Action.PARK, "body, properties or id cannot be understood"),
        Rule("unknown type", Action.RETRY, "no handler takes the type; the next release may", 0, 20, 5.0, Action.PARK),
        Rule("refused", Action.PARK, "the handler raised Refuse, or an error that its policy does not retry"),
        Rule("conflict", Action.PARK, "another message was handled under the id"),
        Rule("late", Action.PARK, "claims of the age of the message have been deleted, so it may have been handled"),
        Rule("poison", Action.PARK, "the message has ended its process too often"),
        Rule("rolled back", Action.RETRY, "the handler's transaction was rolled back while it ran"),
        Rule("transaction ended", Action.PARK, "the handler ended the transaction of its claim"),
        Rule("in flight", Action.RETRY, "another transaction holds the claim", 0, None, 1.0),
        Rule("undelivered", Action.RETRY, "the broker took no output of a type that is not opted in", 0, None, 5.0),
        Rule("unsendable", Action.RETRY, "the broker cannot take the outputs of a type that is not opted in"),
        Rule("message class", Action.PARK, "the message class or a key raised an error while decoding"),
        Rule("database busy", Action.RETRY, "a deadlock, a serialization failure or a busy database", 5, 20, 1.0),
        Rule("database away", Action.HOLD, "no connection can claim and store at the moment"),
        Rule("connection lost", Action.RETRY, "the connection went away, and the database takes other work", 1, 3, 5.0),
        Rule("before the handler", Action.RETRY, "the claim failed, and the database takes other work", 1, None, 5.0),
        Rule("handler", Action.RETRY, "the handler raised an error, or its changes could not be stored"),
    )
}

_BY_ERROR: Final[Sequence[tuple[type[Exception], str]]] = (
    (Unreadable, "unreadable"),
    (UnknownType, "unknown type"),
    (Conflict, "conflict"),
    (Late, "late"),
    (Poison, "poison"),
    (TransactionRolledBack, "rolled back"),
    (TransactionEnded, "transaction ended"),
    (InFlight, "in flight"),
    (Undelivered, "undelivered"),
)


@dataclass(frozen=True, slots=True)
class Decision:
    """Verdict about one failed delivery.

    Attributes:
        counted: Whether the run counts as an attempt.
        delay: Seconds before an uncounted retry.

    Example:
        >>> Decision(RULES["conflict"], Action.PARK).counted
        False
    """

    rule: Rule
    action: Action
    counted: bool = False
    delay: float | None = None


def decide(
    error: Exception,
    phase: Phase,
    retry: Retry,
    history: Sequence[Mapping[str, Any]],
    store: Any,
    *,
    own: bool = False,
    reruns: int = 0,
) -> Decision:
    """Return the decision about a failed delivery.

    Args:
        error: The error that was raised.
        phase: How far the handling had come.
        retry: The retry rules of the message type.
        history: Earlier failures, from which uncounted retries are summed up.
        store: The store, which classifies errors of the database and is probed.
        own: Whether this very unit of work raised the error; an idemp error of another unit inside the handler is the handler's.
        reruns: How often the delivery was run again at once.
    """
    rule = RULES[_rule(error, phase, retry, store, own=own, reruns=reruns)]
    if reruns < rule.reruns:
        return Decision(rule, Action.RERUN)
    if rule.action is not Action.RETRY:
        return Decision(rule, rule.action)
    rounds = sum(entry["times"] for entry in history if entry["rule"] == rule.name)
    if rule.uncounted is None or rounds < rule.uncounted:
        return Decision(rule, Action.RETRY, delay=rule.delay)
    return Decision(rule, rule.then, counted=rule.then is Action.RETRY)


def _rule(error: Exception, phase: Phase, retry: Retry, store: Any, *, own: bool, reruns: int) -> str:
    if isinstance(error, IdempError) and (own or phase is not Phase.HANDLER):
        for kind, name in _BY_ERROR:
            if isinstance(error, kind):
                return "unsendable" if isinstance(error, Undelivered) and error.own else name
    if phase is Phase.ACCEPT:
        return "message class"
    if phase is Phase.HANDLER and isinstance(error, Refuse):
        return "refused"
    meaning: Kind | None = store.classify(error)
    if meaning is Kind.TRANSIENT and reruns < RULES["database busy"].reruns:
        return "database busy"
    open_question = phase is not Phase.HANDLER or meaning in (Kind.TRANSIENT, Kind.LOST) or isinstance(error, TimedOut)
    if open_question and not store.probe():
        return "database away"
    if phase is Phase.CLAIM and meaning is not None:  # failures before the handler never count
        return "before the handler"
    if meaning in (Kind.TRANSIENT, Kind.LOST):
        return "database busy" if meaning is Kind.TRANSIENT else "connection lost"
    return "handler" if retry.retries(error) else "refused"
