"""Whether messages were handled at all: a test in which every one of them fails would pass, and show nothing."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from idemp.deadletter import without_story
from idemp.errors import LateMessage, MessageError, PayloadConflict, TooManyHops, WorkerDied
from idemp.messages import DEAD_PREFIX

if TYPE_CHECKING:
    from collections.abc import Iterable

    from idemp.handlers import Registry
    from idemp.messages import Message
    from idemp.testing.execution import Execution
    from idemp.testing.harness import Harness
    from idemp.testing.promises import Promises

_ENOUGH: Final = 20
_SAMPLES: Final = 20
_MOST_SHOWN: Final = 400
# What a fault of the test, or another message under the same key, is reason enough for.
_NOT_ITS_OWN: Final = {error.__name__ for error in (LateMessage, PayloadConflict, TooManyHops, WorkerDied)}


class NeverHandled(AssertionError):
    """No message of a type was ever handled, so nothing was shown about its handler.

    Example:
        >>> issubclass(NeverHandled, AssertionError)
        True
    """


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a message was not handled, though nobody meant it to fail.

    Attributes:
        told: the error, in short.
        error: what its handler raised; `None` where no handler saw it.
    """

    told: str
    error: BaseException | None = None


@dataclass(slots=True)
class _Fate:
    """What became of the messages of one type."""

    published: int = 0
    committed: int = 0
    on_purpose: int = 0
    failure: Failure | None = None
    samples: dict[bytes, Message] = field(default_factory=dict)


class Handled:
    """Counts, over the runs of a machine, what became of the messages of each type.

    Example:
        >>> from idemp import App, Idempotent
        >>> from idemp.testing.harness import Harness
        >>> from idemp.testing.promises import Promises
        >>> app, handled = App("orders"), Handled()
        >>> @app.handler(dict, type="orders.Place", policy=Idempotent(key="id", attempts=1))
        ... def place(message: dict[str, int]) -> None:
        ...     message.idd
        >>> with Harness(app) as harness:
        ...     message = harness.send({"id": 7}, type="orders.Place")
        ...     harness.rest()
        ...     handled.count(Promises(harness), [message])
        ...     handled.check(Promises(harness))
        Traceback (most recent call last):
        ...
        idemp.testing.handled.NeverHandled: No message of orders.Place was ever handled: ... AttributeError: ...
    """

    def __init__(self) -> None:
        self._fates: dict[str, _Fate] = {}

    def count(self, promises: Promises, published: Iterable[Message], *, again: bool = False) -> None:
        """Add what became of these messages, once they have come to rest; `again` if they have been counted before."""
        fates = fates_of(promises)
        for message in published:
            name = promises.harness.registry.find(message).message_type
            fate = self._fates.setdefault(name, _Fate())
            fate.published += not again
            if len(fate.samples) < _SAMPLES:
                fate.samples.setdefault(message.body, message)
            found = fates.get(promises.key_of(message)[0])
            fate.committed += found is True
            fate.on_purpose += found is False
            if isinstance(found, Failure) and fate.failure is None:
                fate.failure = found

    def check(self, promises: Promises, *, ended: bool = True) -> None:
        """See that messages of each type were handled, or failed on purpose.

        Some are handled only after others, and may just not have met them: these get another chance, without faults.

        Args:
            promises: where that can be tried; it begins anew.
            ended: whether there will be no more messages. Where other types were handled, this is said after 20 of a type.

        Raises:
            NeverHandled: it is not so; says why the first one failed.
        """
        least = 1 if ended and not any(fate.committed for fate in self._fates.values()) else _ENOUGH
        for name, fate in self._fates.items():
            if fate.published >= least and not fate.committed and fate.failure is not None:
                self._try_again(name, promises)
                if not fate.committed:
                    _raise(name, fate, fate.failure)

    def _try_again(self, name: str, promises: Promises) -> None:
        """After messages of all other types that were handled, and of each of them."""
        others = [list(fate.samples.values()) for fate in self._fates.values() if fate.committed]
        for first in [[message for samples in others for message in samples], *others] if others else []:
            promises.begin_anew()
            for messages in (first, self._fates[name].samples.values()):
                sent = [_anew(message, number, promises.harness) for number, message in enumerate(messages)]
                for message in sent:
                    promises.harness.send(message)
                promises.harness.rest()
            self.count(promises, sent, again=True)
            if self._fates[name].committed:
                return


def fates_of(promises: Promises) -> dict[str, bool | Failure | None]:
    """What became of the messages, by key: `True` for committed, `False` for parked on purpose, or the failure.

    `None` stands for what is nobody's fault: a conflict, a late message, a process that died too often.
    """
    harness = promises.harness
    fates: dict[str, bool | Failure | None] = {}
    last: dict[str, Execution] = {}
    for execution in harness.executions:
        key = promises.key_of(execution.message)[0]
        last[key] = execution
        if execution.committed:
            fates[key] = True
    for message in harness.dead():
        key = promises.key_of(without_story(message))[0]
        if key not in fates:
            fates[key] = _why_parked(message, last.get(key), harness.registry)
    return fates


def _why_parked(dead: Message, last: Execution | None, registry: Registry) -> bool | Failure | None:
    reason = dead.headers.get(f"{DEAD_PREFIX}reason")
    if reason in _NOT_ITS_OWN:
        return None
    if last is None or last.error is None:
        return Failure(_short(f"{reason}: {dead.headers.get(f'{DEAD_PREFIX}error')}"))
    policy = registry.find(last.message).policy
    if isinstance(last.error, MessageError) or (policy.refusing_rule(last.error) or "").startswith("refuse_on"):
        return False
    return Failure(_short(f"{type(last.error).__name__}: {last.error}"), last.error)


def _anew(message: Message, number: int, harness: Harness) -> Message:
    return replace(message, message_id=f"{message.type} {number}", timestamp=harness.clock.now())


def _raise(name: str, fate: _Fate, first: Failure) -> None:
    begun = f"No message of {name} was ever handled: {fate.published} published, none committed."
    if first.error is None and not fate.on_purpose:
        raise NeverHandled(f"{begun} No handler got to see one; the first failure:\n  {advised(first)}")
    raise NeverHandled(f"{begun} The first failure:\n  {advised(first)}") from first.error


def advised(failure: Failure) -> str:
    """A failure, and what to do about it."""
    mend = (
        "Mend the messages: their bodies, or the id that the policy asks for."
        if failure.error is None
        else "Mend it, or give it what it needs: tables=, rows by setup=, other messages about the same thing. Where it "
        "shall fail, have it raise Refuse, or name the error in refuse_on= of its policy."
    )
    return f"{failure.told}\nSo nothing was shown about its handler. {mend}"


def _short(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + "…"
