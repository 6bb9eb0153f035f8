"""A thread that repeats a piece of work, survives outages and reports anything else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from idemp.errors import Unavailable
from idemp.events import log
from idemp.ports import Kind

__all__ = ["Repeated"]


class Repeated(threading.Thread):
    """Runs a function again and again in a daemon thread.

    Args:
        function: Returns whether to run it again at once, or the seconds until then.
        every: Seconds between runs otherwise.
        classify: Says whether an error is an outage, which is logged once and survived.
        failed: Called with any other error; the thread has ended.

    Attributes:
        away: Whether there is an outage.

    Example:
        >>> done = threading.Event()
        >>> thread = Repeated("example", lambda: done.set(), 0.01, lambda error: None, print)
        >>> thread.start(); done.wait(10), thread.end()
        (True, None)
    """

    def __init__(
        self,
        name: str,
        function: Callable[[], bool | float | None],
        every: float,
        classify: Callable[[BaseException], Kind | None],
        failed: Callable[[BaseException], None],
    ) -> None:
        super().__init__(name=f"idemp-{name}", daemon=True)
        self._function, self._every, self._classify, self._failed = function, every, classify, failed
        self._ended, self._woken = False, threading.Event()
        self._began: float | None = None
        self.away = False

    @property
    def silent(self) -> float:
        """Seconds for which a run has not come to its end."""
        began = self._began
        return 0.0 if began is None else time.monotonic() - began

    def run(self) -> None:
        """Run until `end`."""
        pause = self._every
        while not self._pause(pause):
            self._began = time.monotonic()
            try:
                again = self._function()
                pause = self._every if again is None or again is False else 0.0 if again is True else again
            except BaseException as error:  # noqa: BLE001 - the consuming thread raises it
                pause = min(self._every, 1.0)
                if not isinstance(error, Unavailable) and self._classify(error) is None:
                    self._failed(error)
                    return
                if not self.away:
                    log("thread.paused", thread=self.name, error=error)
                self.away = True
            else:
                if self.away:
                    log("thread.resumed", thread=self.name)
                self.away = False
            self._began = None

    def _pause(self, pause: float) -> bool:
        """Wait, until `wake` at most; return whether the thread is to end."""
        self._woken.wait(pause)
        self._woken.clear()
        return self._ended

    def wake(self) -> None:
        """Run the function now, or once more if it is running."""
        self._woken.set()

    def end(self) -> None:
        """End the thread after the run that is under way."""
        self._ended = True
        self.wake()
        self.join(timeout=30.0)
