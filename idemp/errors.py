"""All errors of idemp, in one tree.

IdempError
├── ConfigurationError      settings, policies, tables or handlers are refused at start
│   └── NotInstalled        a package of an extra is missing
├── MessageError            the message is to blame
│   ├── Unreadable          its body or its properties cannot be understood
│   ├── UnknownType         no handler takes its type
│   ├── Conflict            another message was handled under its id
│   ├── Late                it is older than its retention window, so a claim of it may be gone
│   ├── Poison              it has ended its process too often
│   └── Refuse              the handler refuses it permanently
├── HandlerError            the handler is to blame
│   ├── TransactionEnded    it ended the transaction of its claim
│   │   ├── BlockEnded      so did a block in a session of the caller's
│   │   └── TransactionRolledBack
│   │       └── BlockRolledBack  a block in a session of the caller's caught a database error
│   ├── TimedOut            it ran for longer than its time-out
│   └── UnusableOutput      it emitted a message that could not be published or read back
├── InFlight                another transaction holds the claim
├── Undelivered             the broker did not take an output that is not stored
├── DispatchIncomplete      committed, but outputs wait for a relay and none is alive
└── Unavailable             the database or the broker takes no work
"""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import ClassVar

__all__ = [
    "BlockEnded",
    "BlockRolledBack",
    "ConfigurationError",
    "Conflict",
    "DispatchIncomplete",
    "HandlerError",
    "IdempError",
    "InFlight",
    "Late",
    "MessageError",
    "NotInstalled",
    "Poison",
    "Refuse",
    "TimedOut",
    "TransactionEnded",
    "TransactionRolledBack",
    "Unavailable",
    "Undelivered",
    "UnknownType",
    "Unreadable",
    "UnusableOutput",
    "describe_error",
    "describe_place",
    "describe_trace",
    "needs",
]

LONGEST_TEXT = 2_000
LONGEST_TRACE = 8_000
LIBRARIES = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib"))
"""Folders of code that is not the user's."""


class IdempError(Exception):
    """Base of all errors of idemp.

    Attributes:
        committed: Whether the database committed the handling; None if that is unknown or no handling was under way.

    Example:
        >>> issubclass(Refuse, IdempError), Refuse.committed
        (True, False)
    """

    committed: bool | None = None


class ConfigurationError(IdempError, ValueError):
    """A setting, policy, handler or table is refused; the text names the fix.

    Example:
        >>> raise ConfigurationError("lease: '5 parsecs' is not a duration: write 30s, 15m, 12h or 7d")
        Traceback (most recent call last):
        idemp.errors.ConfigurationError: lease: '5 parsecs' is not a duration: write 30s, 15m, 12h or 7d
    """


class NotInstalled(ConfigurationError, ImportError):
    """A package is missing; the text names the extra that installs it.

    Example:
        >>> issubclass(NotInstalled, ImportError)
        True
    """


class MessageError(IdempError):
    """The message is to blame: running it again would not help. Nothing was committed.

    Example:
        >>> issubclass(Unreadable, MessageError)
        True
    """

    committed = False


class Unreadable(MessageError):
    """The body or the properties of a message cannot be understood.

    Example:
        >>> from idemp.messages import parse
        >>> parse(b"{'a': 1}")
        Traceback (most recent call last):
        idemp.errors.Unreadable: the body is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)
    """


class UnknownType(MessageError):
    """No handler of this app takes the type of the message.

    Example:
        >>> raise UnknownType("no handler takes messages of type 'shop.Order'")
        Traceback (most recent call last):
        idemp.errors.UnknownType: no handler takes messages of type 'shop.Order'
    """


class Conflict(MessageError):
    """Another message was handled under the same id: the payload, the type or the original id differs.

    Example:
        >>> Conflict.committed
        False
    """


class Late(MessageError):
    """The message is older than the retention window, so it may have been handled and its claim deleted.

    Example:
        >>> Late.committed
        False
    """


class Poison(MessageError):
    """The message has ended the process of its handler more often than its policy allows.

    Example:
        >>> issubclass(Poison, MessageError)
        True
    """


class Refuse(MessageError):
    """Raised by a handler: this message will never be handled, so it becomes a dead letter at once.

    Example:
        >>> def ship(order):
        ...     raise Refuse(f"order {order} was cancelled")
    """


class HandlerError(IdempError):
    """The handler is to blame; the fix is in its code.

    Example:
        >>> issubclass(TransactionEnded, HandlerError)
        True
    """

    committed: bool | None = False


class TimedOut(HandlerError):
    """The handler ran for longer than its `timeout`. What it has done was rolled back, and the run counts as an attempt.

    Example:
        >>> print(TimedOut(31.2, 30))
        the handler ran for 31.2 s, and its time-out is 30 s: its transaction was rolled back
    """

    def __init__(self, took: float, timeout: float) -> None:
        super().__init__(f"the handler ran for {took:.1f} s, and its time-out is {timeout:g} s: its transaction was rolled back")


class TransactionEnded(HandlerError):
    """The handler ended the transaction of its claim, which idemp commits after the handler.

    Args:
        how: The call or statement that ended it.
        committed: Whether effects and claim are committed although the outputs were not stored; None if that is unknown.

    Example:
        >>> print(TransactionEnded("session.commit()"))
        the handler ended the transaction of its claim by session.commit(): remove that call, idemp commits after the handler
    """

    who: ClassVar[str] = "the handler"
    ends: ClassVar[str] = "remove that call, idemp commits after the handler"

    def __init__(self, how: str, *, committed: bool | None = False) -> None:
        self.committed = committed
        consequence = {
            True: ". Its claim and effects so far are committed, and its outputs are not stored",
            None: ". Whether its claim and effects are committed is unknown: check with idemp inbox show",
        }
        super().__init__(f"{self.who} ended the transaction of its claim by {how}: {self.ends}{consequence.get(committed, '')}")


class BlockEnded(TransactionEnded):
    """A block of `Inbox.claim` or `App.initiate(session=…)` ended the transaction that it is in, or tried to commit it.

    Example:
        >>> BlockEnded("session.commit()").ends
        'commit after the block, and end nothing within it'
    """

    who = "the block"
    ends = "commit after the block, and end nothing within it"


class TransactionRolledBack(TransactionEnded):
    """The transaction of the claim was rolled back while the handler ran; nothing was committed.

    A failed flush rolls back, too, so a handler that catches a database error must do so around `begin_nested()`.

    Example:
        >>> TransactionRolledBack("a rollback").committed
        False
    """

    ends = "nothing was committed; catch database errors around session.begin_nested()"


class BlockRolledBack(TransactionRolledBack):
    """A database error was caught in a block of `Inbox.claim`, and its transaction can only be rolled back; nothing was committed.

    Example:
        >>> BlockRolledBack("a database error that it caught").committed
        False
    """

    who = "the block"


class UnusableOutput(HandlerError, ValueError):
    """An emitted message could not be published or read back, so it is refused before COMMIT.

    Example:
        >>> issubclass(UnusableOutput, ValueError)
        True
    """


class InFlight(IdempError):
    """Another transaction holds the claim: deliver the message again. Nothing was committed.

    Example:
        >>> InFlight.committed
        False
    """

    committed = False


class Undelivered(IdempError):
    """The broker did not take outputs that are not stored, so the delivery runs again.

    Attributes:
        own: Whether every refusal was the output's own fault (returned or unsendable).

    Example:
        >>> Undelivered("no queue takes 'stock'", own=True).own
        True
    """

    committed = True

    def __init__(self, text: str, *, own: bool) -> None:
        super().__init__(text)
        self.own = own


class DispatchIncomplete(IdempError):
    """Outputs are stored and not confirmed, and no relay is alive that would send them.

    Example:
        >>> issubclass(DispatchIncomplete, IdempError)
        True
    """


class Unavailable(IdempError):
    """The database or the broker takes no work at the moment.

    Example:
        >>> raise Unavailable("the broker's tables cannot be written: disk full")
        Traceback (most recent call last):
        idemp.errors.Unavailable: the broker's tables cannot be written: disk full
    """


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Turn an ImportError into NotInstalled, which names the extra to install. The outermost of nested blocks decides.

    Raises:
        NotInstalled: A module cannot be imported.

    Example:
        >>> with needs("couchdb"):
        ...     import couch
        Traceback (most recent call last):
        idemp.errors.NotInstalled: No module named 'couch': pip install 'idemp[couchdb]'
    """
    try:
        yield
    except ImportError as error:
        missing = str(error).partition(": pip install ")[0]
        refusal = NotInstalled(f"{missing}: pip install 'idemp[{extra}]'")
        refusal.name = error.name
        raise refusal from None


def describe_error(error: BaseException) -> str:
    r"""Return class and text of an error on one line, safe to log and to store: cut, escaped and without NUL.

    Example:
        >>> describe_error(ValueError("a\0b"))
        'ValueError: a\\x00b'
        >>> class Broken(Exception):
        ...     def __str__(self):
        ...         raise SystemExit
        >>> describe_error(Broken())
        'Broken: (its text cannot be read)'
    """
    try:
        text = " ".join(str(error).splitlines())
    except BaseException:  # noqa: BLE001 - the text of an error may raise anything, SystemExit included
        text = "(its text cannot be read)"
    name = type(error).__name__
    return _storable(f"{name}: {text}" if text else name, LONGEST_TEXT)


def describe_place(error: BaseException, package: str) -> str:
    """Return the line of the user's code that raised an error, or called a library that did, in parentheses; "" if none has run.

    Args:
        error: The error that was raised.
        package: The user's top-level package; its code counts as the user's even if it is installed as a library.

    Example:
        >>> describe_place(ValueError("no trace"), "shop")
        ''
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    for frame, line in reversed(frames):
        file, owner = frame.f_code.co_filename, _owner(frame)
        installed = file.startswith(LIBRARIES)
        if owner != __name__.partition(".")[0] and not file.startswith("<") and (owner == package or not installed):
            return f" ({_storable(file, LONGEST_TEXT)}, line {line})"
    return ""


def describe_trace(error: BaseException) -> str:
    """Return the end of an error's traceback as storable text, without frames of idemp's own where there are others.

    Example:
        >>> describe_trace(ValueError("no trace"))
        ''
    """
    try:
        frames = list(traceback.walk_tb(error.__traceback__))
        others = [(frame, line) for frame, line in frames if _owner(frame) != __name__.partition(".")[0]]
        lines = traceback.StackSummary.extract(iter(others or frames)).format()
        return _storable("".join(lines)[-LONGEST_TRACE:], LONGEST_TRACE)
    except BaseException:  # noqa: BLE001 - as in describe_error
        return ""


def _owner(frame: FrameType) -> str:
    """Return the package that the code of a frame belongs to."""
    return str(frame.f_globals.get("__name__")).partition(".")[0]


def _storable(text: str, longest: int) -> str:
    cut = text if len(text) <= longest else text[: longest - 1] + "…"
    shown = (char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode() for char in cut)
    return "".join(shown)
