r"""Exceptions of others, shown whatever they do: their class, their text, their traceback.

A handler may raise anything: an exception whose `__str__` raises, or exits; whose metaclass has no name; whose notes, causes
or group members fail when they are read. It is looked at after its handler has ended, to retry or park its message. If that
look ended the worker, the message would come again and end the next worker. So nothing in here raises what the exception's
own code raises, `SystemExit` included. Only what a signal handler raises meanwhile goes through, such as Ctrl-C.
"""

from __future__ import annotations

import logging
import re
import signal
import sys
import threading
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "SafeLogger",
    "ancestors_of",
    "by_signal",
    "class_of",
    "described",
    "guarded",
    "logger",
    "readable",
    "stack_of",
    "text_of",
]

_LONGEST_NAME: Final = 200
# What a terminal obeys instead of showing it: controls but the end of a line, and marks that turn the order of letters.
_OBEYED: Final = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
# Read past a metaclass, which may answer these attributes by code of its own.
_NAME: Final[Any] = type.__dict__["__name__"]
_ANCESTORS: Final[Any] = type.__dict__["__mro__"]
_TRACEBACK: Final[Any] = BaseException.__dict__["__traceback__"]

T = TypeVar("T")


def by_signal(error: BaseException) -> bool:
    """Whether a signal handler of the main thread raised it, or Python itself for SIGINT: not the code that ran.

    Example:
        >>> by_signal(SystemExit(1))
        False
    """
    if threading.current_thread() is not threading.main_thread():
        return False  # signal handlers run in the main thread alone
    if issubclass(type(error), KeyboardInterrupt):
        return True
    known = (signal.getsignal(number) for number in signal.valid_signals())
    handlers = {getattr(handler, "__code__", None) for handler in known} - {None}
    return any(frame.f_code in handlers for frame, _ in traceback.walk_tb(_TRACEBACK.__get__(error)))


def readable(text: str) -> str:
    r"""A text of somebody else's for a terminal or a log: what would colour, overwrite or turn it is written as an escape.

    Example:
        >>> print(readable("order \x1b[31m7"))
        order \x1b[31m7
    """
    return _OBEYED.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def guarded(look: Callable[[], T], otherwise: Callable[[BaseException], T]) -> T:
    """Return what `look` answers; where it raises anything, what `otherwise` makes of that.

    Example:
        >>> guarded(lambda: 1 / 0, lambda error: class_of(error))
        'ZeroDivisionError'
    """
    try:
        return look()
    except BaseException as error:
        if by_signal(error):
            raise
        return otherwise(error)


def class_of(value: object) -> str:
    """Return the name of an object's class.

    Example:
        >>> class_of(ValueError("no stock"))
        'ValueError'
    """
    name: str = _NAME.__get__(type(value))
    return name[:_LONGEST_NAME]


def ancestors_of(value: object) -> tuple[type, ...]:
    """Return an object's class and all that it inherits from, the nearest first.

    Example:
        >>> [each.__name__ for each in ancestors_of(KeyError())]
        ['KeyError', 'LookupError', 'Exception', 'BaseException', 'object']
    """
    found: tuple[type, ...] = _ANCESTORS.__get__(type(value))
    return found


def text_of(value: object) -> str:
    r"""Return what an exception says, as a text that can be sent and stored anywhere.

    Example:
        >>> text_of(ValueError("no file \udc80"))
        'no file \\udc80'
        >>> class Mute(Exception):
        ...     def __str__(self):
        ...         return self.missing
        >>> text_of(Mute())
        '(AttributeError while it was to be shown)'
    """
    text = guarded(lambda: str(value), lambda error: f"({class_of(error)} while it was to be shown)")
    # Exactly a `str`: a subclass of it has methods of its own.
    return str.__str__(text).encode("utf-8", "backslashreplace").decode().replace("\x00", "\\x00")


def described(error: BaseException) -> str:
    """Return class and text of an exception.

    Example:
        >>> described(KeyError("sku")), described(SystemExit())
        ("KeyError: 'sku'", 'SystemExit')
    """
    return f"{class_of(error)}: {text_of(error)}".removesuffix(": ")


def stack_of(error: BaseException, limit: int | None = None) -> str:
    r"""Return an exception's traceback; without its text and its causes where these can't be shown.

    Args:
        error: what was raised.
        limit: how many frames, as for `traceback.format_exception`.

    Example:
        >>> stack_of(ValueError("no stock"))
        'ValueError: no stock\n'
    """

    def frames(failure: BaseException) -> str:
        where = guarded(lambda: "".join(traceback.format_tb(_TRACEBACK.__get__(error), limit)), lambda _: "")
        return f"{where}{described(error)}\n({class_of(failure)} while the rest was to be shown)\n"

    return text_of(guarded(lambda: "".join(traceback.format_exception(error, limit=limit)), frames))


class SafeLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger whose handlers, filters and formatters may fail: the work that is logged goes on.

    Where one fails, a line on stderr says so.

    Example:
        >>> SafeLogger(logging.getLogger("idemp.example"), {}).isEnabledFor(logging.DEBUG)
        False
    """

    def process(self, msg: Any, kwargs: Any) -> tuple[Any, Any]:
        """Add nothing."""
        return msg, kwargs

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log."""
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1  # this frame is not where it is logged
        try:
            super().log(level, msg, *args, **kwargs)
        except BaseException as error:
            if by_signal(error):
                raise
            _told_on_stderr(error)


def logger(name: str) -> SafeLogger:
    """Return the logger of this name, for what must not fail because of its log.

    Example:
        >>> logger("idemp.worker").logger is logging.getLogger("idemp.worker")
        True
    """
    return SafeLogger(logging.getLogger(name), {})


def _told_on_stderr(error: BaseException) -> None:
    if logging.raiseExceptions and sys.stderr is not None:
        with suppress(Exception):
            sys.stderr.write(f"idemp: a log line was lost, since a logging handler failed: {described(error)}\n")
