"""A deadline for each run of a handler: one that blocks is interrupted, and the failure shows where it stood."""

from __future__ import annotations

import ctypes
import itertools
import signal
import sys
import threading
import traceback
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from idemp.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator

SECONDS: Final = 30.0
"""How long one run of a handler may take, unless the test says otherwise."""

_EITHER_END: Final = 6  # frames that are shown
_CALLER: Final = "idemp.testing.harness"
# Not SIGALRM, which pytest-timeout uses. None on systems that can't interrupt a thread so.
_SIGNAL: Any = getattr(signal, "SIGVTALRM", None) if hasattr(signal, "pthread_kill") else None


class HandlerHangs(AssertionError):
    """A handler did not return within the deadline, was interrupted, and its handling was rolled back.

    Example:
        >>> issubclass(HandlerHangs, AssertionError)
        True
    """


class Hung(BaseException):
    """A handler was interrupted: like a death of its process, nothing of the worker handles this."""


class _Interrupted(KeyboardInterrupt):  # drivers cancel their statement then
    pass


class Deadline:
    """Interrupts what takes longer than its seconds.

    Args:
        seconds: real ones, whatever the clock of a rehearsal says.

    Raises:
        ConfigurationError: they are not more than 0.

    Example:
        >>> import time
        >>> deadline = Deadline(0.01)
        >>> try:
        ...     with deadline.watching("place"):
        ...         time.sleep(60)
        ... except Hung as hung:
        ...     print(str(hung).splitlines()[0])
        place did not return within 0.01 s and was interrupted. Its handling was rolled back. It stood here:
    """

    def __init__(self, seconds: float = SECONDS) -> None:
        if not seconds > 0:
            raise ConfigurationError(
                f"deadline={seconds!r} is no time.", fix="Give the seconds that one run of a handler may take."
            )
        self._seconds = seconds

    @contextmanager
    def watching(self, name: str) -> Iterator[None]:
        """Interrupt the block if it takes longer.

        Raises:
            Hung: it did.
        """
        ended, stood, ident = threading.Event(), list[str](), threading.get_ident()
        by_signal = _SIGNAL is not None and threading.current_thread() is threading.main_thread()

        def interrupted(number: int, frame: Any) -> None:
            del number, frame
            if not ended.is_set():
                raise _Interrupted

        def watch() -> None:
            while not ended.wait(self._seconds):
                stood.append(_stack_of(ident))
                if by_signal:
                    signal.pthread_kill(ident, _SIGNAL)
                else:
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(_Interrupted))

        watcher = threading.Thread(target=watch, name="deadline of a handler", daemon=True)
        before = signal.signal(_SIGNAL, interrupted) if by_signal else None
        watcher.start()
        try:
            try:
                yield
            finally:
                ended.set()
        except _Interrupted:
            raise Hung(
                f"{name} did not return within {self._seconds:g} s and was interrupted. Its handling was rolled back. "
                f"It stood here:\n{stood[0]}Give what it waits for a timeout; if it may take that long, say deadline= in "
                "seconds."
            ) from None
        finally:
            watcher.join()
            if by_signal:
                signal.signal(_SIGNAL, before)


@contextmanager
def told_hangs() -> Iterator[None]:
    """Raise what a test reports, for a handler that was interrupted in the block."""
    try:
        yield
    except Hung as hung:
        raise HandlerHangs(str(hung)) from None


def _stack_of(ident: int) -> str:
    """Where a thread stands, without the frames of the kit that called the handler."""
    stack = traceback.walk_stack(sys._current_frames().get(ident))  # noqa: SLF001 - of another thread
    frames = list(itertools.takewhile(lambda each: each[0].f_globals.get("__name__") != _CALLER, stack))
    lines = traceback.StackSummary.extract(iter(frames[::-1])).format()
    if len(lines) > 2 * _EITHER_END:
        lines[_EITHER_END:-_EITHER_END] = ["  …\n"]
    return "".join(lines)
