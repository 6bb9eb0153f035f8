"""What an error means for its delivery: one table of rules, which the protocol, batches and start records all ask.

The first rule that fits decides. A rule looks at the error, at the phase in which it was raised, and where these leave it
open at whether the store can take a handling now, which is asked on another connection. So an error that is not understood
is never taken for an outage: if the store takes other work, the error belongs to its delivery, and counts.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from idemp.errors import (
    BranchUnavailable,
    BranchUnfinished,
    DispatchIncomplete,
    IdempError,
    LostBeforeCommit,
    MessageError,
    Refuse,
    StoreUnavailable,
    TransactionEnded,
    TransientStoreError,
    UnknownMessageType,
    WorkerDied,
)
from idemp.showing import guarded

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

__all__ = [
    "MAX_DEFERRALS",
    "RULES",
    "Action",
    "Phase",
    "Phases",
    "Rule",
    "Start",
    "is_decisive",
    "markdown",
    "phase_of",
    "raised_in",
    "repeats_after",
    "rule_for",
    "start_after",
]

MAX_DEFERRALS: Final = 20
"""How often a delivery comes back uncounted because the database asks for it (deadlocks, lock waits); then it counts."""
_FREE_LOSSES: Final = 3
_REPEATS: Final = 5

_FOR_ALL: Final = ((Exception,), (MemoryError, BaseException))
_UNSENDABLE: Final = frozenset({"returned", "unsendable"})


class Phase(enum.Enum):
    """Where in its life a delivery is.

    Example:
        >>> Phase.STORE.value
        'store outputs'
    """

    DECODE = "decode"  #: type, body, key
    BEGIN = "begin"  #: record of the start, connection, transaction
    CLAIM = "claim"
    HANDLER = "handler"  #: the function, and what its session still holds
    STORE = "store outputs"
    COMMIT = "commit"
    DISPATCH = "dispatch"


_BEFORE: Final = frozenset({Phase.BEGIN, Phase.CLAIM})
_FROM_HANDLER: Final = frozenset({Phase.HANDLER, Phase.STORE, Phase.COMMIT})
_OF_THE_STORE: Final = frozenset({Phase.BEGIN, Phase.CLAIM, Phase.STORE, Phase.COMMIT})


class Action(enum.Enum):
    """What follows for the delivery."""

    PARK = "park"  #: to the dead-letter queue, at once
    RETRY = "retry"  #: it comes back after a pause; see `Rule.free`
    HOLD = "hold"  #: it stays in hand, nothing is consumed, and it runs again
    LEAVE = "leave"  #: it is not settled: the broker delivers it again


class Start(enum.Enum):
    """What becomes of the record that the handler has started, where there is one (see `idemp.suspects`)."""

    ENDED = "ended"  #: forgotten, and earlier ones with it
    TAKEN_BACK = "taken back"  #: the handler did not run, or not by its own fault: earlier ones stay
    STAYS = "stays"  #: as if the process had been killed


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One row of the table.

    Attributes:
        what: the error in words, for people.
        errors: its classes.
        action: what follows.
        phases: where it was raised.
        test: what else must be true of the error.
        obstacle: whether the store can take no handling at all; `None` where that does not matter, and is not asked.
        stopping: whether the operator has asked the process to stop; `None` where that does not matter.
        repeats: how often the delivery first runs again at once.
        free: how often it then comes back without counting as an attempt; `None` for no bound.
        counts: whether it counts after that, until it is parked after the policy's `attempts`; else it is parked.
        by_policy: whether `refuse_on` and `retry_on` may park it before.
        start: what becomes of the recorded start.
    """

    what: str
    errors: tuple[type[BaseException], ...]
    action: Action
    phases: frozenset[Phase] = frozenset(Phase)
    test: Callable[[Any], bool] | None = None
    obstacle: bool | None = None
    stopping: bool | None = None
    repeats: int = 0
    free: int | None = 0
    counts: bool = True
    by_policy: bool = False
    start: Start = Start.ENDED

    def fits(self, error: BaseException, phase: Phase) -> bool:
        """Whether it is about this error in this phase, whatever the store and the operator say."""
        return issubclass(type(error), self.errors) and phase in self.phases and (self.test is None or self.test(error))


RULES: Final = (
    Rule(
        what="`SystemExit`, `KeyboardInterrupt`, `MemoryError`, cancellation, after the operator asked the process to stop",
        errors=(MemoryError, BaseException),
        test=lambda error: not isinstance(error, Exception) or isinstance(error, MemoryError),
        stopping=True,
        action=Action.LEAVE,
        start=Start.TAKEN_BACK,
    ),
    Rule(
        what="`SystemExit`, `KeyboardInterrupt`, `MemoryError`, cancellation",
        errors=(MemoryError, BaseException),
        test=lambda error: not isinstance(error, Exception) or isinstance(error, MemoryError),
        action=Action.LEAVE,
        start=Start.STAYS,
    ),
    Rule(
        what="the connection that brought the delivery is lost, and its type is not opted in (`LostBeforeCommit`)",
        errors=(LostBeforeCommit,),
        action=Action.LEAVE,
        start=Start.STAYS,
    ),
    Rule(
        what="its handler was started `attempts` times, and never came to an end (`WorkerDied`)",
        errors=(WorkerDied,),
        action=Action.PARK,
        start=Start.TAKEN_BACK,
    ),
    Rule(
        what="no handler takes its type, and none has taken a message of this queue yet",
        errors=(UnknownMessageType,),
        test=lambda error: not error.queue_is_ours,
        action=Action.RETRY,
        free=None,
    ),
    Rule(
        what="no handler takes its type, others of its queue were taken",
        errors=(UnknownMessageType,),
        action=Action.RETRY,
        free=MAX_DEFERRALS,
        counts=False,
    ),
    Rule(
        what="it can never be handled: not readable, too large, no usable id, payload conflict, older than the window, "
        "too many hops, `Refuse`",
        errors=(MessageError,),
        action=Action.PARK,
    ),
    Rule(
        what="the handler ended the transaction of its claim (`TransactionEnded`)",
        errors=(TransactionEnded,),
        action=Action.PARK,
    ),
    Rule(
        what="deadlock, serialization failure, lock wait (`TransientStoreError`)",
        errors=(TransientStoreError,),
        action=Action.RETRY,
        repeats=_REPEATS,
        free=MAX_DEFERRALS,
        start=Start.TAKEN_BACK,
    ),
    Rule(
        what="the database can't be reached, or refuses connections or writes (`StoreUnavailable`)",
        errors=(StoreUnavailable,),
        phases=_BEFORE,
        action=Action.HOLD,
        repeats=_REPEATS,
        start=Start.TAKEN_BACK,
    ),
    Rule(
        what="the database connection is lost, COMMIT has no answer, or a resource of the server is used up",
        errors=(StoreUnavailable,),
        obstacle=True,
        action=Action.HOLD,
        repeats=1,
        start=Start.TAKEN_BACK,
    ),
    Rule(
        what="the same, and by its claim the handling was not committed: a pooler's timeout, or MySQL's `wait_timeout`, "
        "ended the connection while the handler ran, for example",
        errors=(StoreUnavailable,),
        obstacle=False,
        action=Action.RETRY,
        repeats=1,
        free=_FREE_LOSSES,
        start=Start.TAKEN_BACK,
    ),
    Rule(
        what="committed in this database, and not yet in another one (`BranchUnfinished`)",
        errors=(BranchUnfinished,),
        test=lambda error: not error.is_lost,  # what only a person can repair is parked in the end, and seen there
        action=Action.RETRY,
        free=None,
    ),
    Rule(
        what="the connection to another database is lost while the handler ran, and that database answers on another one",
        errors=(BranchUnavailable,),
        test=lambda error: error.answers,
        action=Action.RETRY,
        free=_FREE_LOSSES,
    ),
    Rule(
        what="another database of the handling can't be reached, or prepares no more (`BranchUnavailable`)",
        errors=(BranchUnavailable,),
        action=Action.RETRY,
        free=None,
    ),
    Rule(
        what="outputs of a type that is not opted in have no confirm: the broker refuses them for now",
        errors=(DispatchIncomplete,),
        test=lambda error: not set(error.reasons) <= _UNSENDABLE,
        action=Action.RETRY,
        free=None,
    ),
    Rule(
        what="any other error of the store: a table of idemp's own is missing or altered, a privilege is revoked, …",
        errors=(Exception,),
        phases=_OF_THE_STORE,
        obstacle=True,
        action=Action.HOLD,
        start=Start.TAKEN_BACK,
    ),
    Rule(
        what="anything else: the handler raises, be it an error of idemp's own that idemp did not raise for this handling; "
        "a constraint fails at COMMIT, no queue takes an output; PostgreSQL ended the handler's transaction by "
        "`idle_in_transaction_session_timeout` or `transaction_timeout`; the handler left a role or read-only mode set in "
        "it (`HandlerError`), …",
        errors=(Exception,),
        action=Action.RETRY,
        by_policy=True,
    ),
)
"""The table, in order: the first rule that fits decides."""


def is_decisive(error: Exception) -> bool:
    """Whether a rule of its own decides about an error: so it must be idemp that raised it, and for this handling.

    Raised by a handler itself, or in another handling that it began, it says nothing about this one. `Refuse` is meant to be
    raised by handlers.

    Example:
        >>> is_decisive(StoreUnavailable("away")), is_decisive(Refuse("no such customer")), is_decisive(ValueError())
        (True, False, False)
    """
    kind = type(error)
    if issubclass(kind, Refuse) or not issubclass(kind, IdempError):
        return False
    return any(issubclass(kind, rule.errors) for rule in RULES if rule.errors not in _FOR_ALL)


class Phases:
    """The phase that one run of a delivery is in; an error that leaves the block says in which one it was raised.

    Example:
        >>> from contextlib import suppress
        >>> error = ValueError("no stock")
        >>> with suppress(ValueError), Phases() as phases:
        ...     phases.now = Phase.STORE
        ...     raise error
        >>> phase_of(error)
        <Phase.STORE: 'store outputs'>
    """

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = Phase.BEGIN

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            raised_in(self.now, error)


def raised_in(phase: Phase, error: BaseException) -> None:
    """Note in an error in which phase it was raised, unless it says so already."""

    def note() -> None:
        if not hasattr(error, "idemp_phase"):
            error.idemp_phase = phase  # type: ignore[attr-defined]

    guarded(note, lambda _: None)  # a class of the user's own, which may take no attributes


def phase_of(error: BaseException) -> Phase:
    """In which phase an error was raised; the handler's, if that is not known."""
    phase = guarded(lambda: getattr(error, "idemp_phase", None), lambda _: None)
    return phase if isinstance(phase, Phase) else Phase.HANDLER


def rule_for(error: Exception, obstacle: Callable[[], bool]) -> Rule:
    """The rule that decides about a delivery.

    Args:
        error: what was raised.
        obstacle: whether the store can take no handling at all now; asked only where a rule depends on it.

    Example:
        >>> rule_for(ValueError("no stock"), lambda: False).action
        <Action.RETRY: 'retry'>
    """
    asked: list[bool] = []

    def holds(wanted: bool | None) -> bool:
        if wanted is None:
            return True
        if not asked:
            asked.append(obstacle())
        return asked[0] is wanted

    phase = phase_of(error)
    return next(rule for rule in RULES if not rule.stopping and rule.fits(error, phase) and holds(rule.obstacle))


def start_after(error: BaseException, *, stopping: bool) -> Start:
    """What becomes of the recorded start of a handler after an error.

    Args:
        error: what was raised.
        stopping: whether the operator has asked the process to stop.

    Example:
        >>> start_after(SystemExit(1), stopping=False), start_after(SystemExit(0), stopping=True)
        (<Start.STAYS: 'stays'>, <Start.TAKEN_BACK: 'taken back'>)
    """
    phase = phase_of(error)
    rules = (rule for rule in RULES if rule.stopping in (None, stopping) and not rule.obstacle)
    return next(rule for rule in rules if rule.fits(error, phase)).start


def repeats_after(error: Exception) -> int:
    """How often a delivery runs again at once after this error.

    Example:
        >>> repeats_after(ValueError("no stock")), repeats_after(TransientStoreError("deadlock"))
        (0, 5)
    """
    phase = phase_of(error)
    return next(rule for rule in RULES if not rule.stopping and rule.fits(error, phase)).repeats


# For people -----------------------------------------------------------------------------------------------------------


def markdown() -> str:
    """The rules as a table for `docs/explanation/failures.md`; `python -m tests.docs.failures` writes it there."""
    head = ("what happened", "where", "can the store take a handling?", "the message", "counts as an attempt")
    rows = [head, ("---",) * len(head), *(_row(rule) for rule in RULES)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def _row(rule: Rule) -> tuple[str, str, str, str, str]:
    everywhere = rule.phases == frozenset(Phase)
    where = "anywhere" if everywhere else ", ".join(phase.value for phase in Phase if phase in rule.phases)
    asked = {None: "not asked", True: "no", False: "yes"}[rule.obstacle]
    return rule.what, where, asked, _follows(rule), _counted(rule)


def _follows(rule: Rule) -> str:
    at_once = {0: "", 1: "runs again at once, then "}.get(
        rule.repeats, f"runs again at once, {rule.repeats} times, then "
    )
    if rule.action is Action.PARK:
        return "parked at once"
    if rule.action is Action.HOLD:
        return f"{at_once}held; consumption pauses until the store takes handlings"
    if rule.action is Action.LEAVE:
        return "not settled: the broker delivers it again" + (
            "" if rule.start is Start.TAKEN_BACK else "; parked as `WorkerDied` in the end"
        )
    if not rule.counts:
        return f"comes back after a pause; parked after {rule.free} times"
    parked = "" if rule.free is None else "; parked after `attempts`"
    return f"{at_once}comes back after a pause{parked}" + (
        "; `refuse_on` may park it at once" if rule.by_policy else ""
    )


def _counted(rule: Rule) -> str:
    if rule.action is Action.LEAVE:
        return "no" if rule.start is Start.TAKEN_BACK else "from the second start on"
    if rule.action is Action.PARK:
        return ""
    if rule.action is Action.HOLD or rule.free is None or not rule.counts:
        return "no"
    return f"after {rule.free} times" if rule.free else "yes"
