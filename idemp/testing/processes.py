"""Processes that can't outlive the tests that started them, and waiting for what they do."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_GUARD: Final = Path(__file__).with_name("guard.py")
_POLL_SECONDS: Final = 0.02


def wait_until(
    condition: Callable[[], bool], what: str, *, seconds: float = 60.0, seen: Callable[[], object] = str
) -> None:
    """Poll a condition until it holds.

    Args:
        condition: what is waited for.
        what: the same in words.
        seconds: how long at most.
        seen: what is there instead, for the error.

    Raises:
        TimeoutError: it says what did not happen, and what is seen instead.

    Example:
        >>> wait_until(lambda: False, "the end comes", seconds=0, seen=lambda: "nothing")
        Traceback (most recent call last):
        ...
        TimeoutError: not within 0 s: the end comes nothing
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:g} s: {what} {seen()}".rstrip())
        time.sleep(_POLL_SECONDS)


class Process:
    """One process under a guard, which ends it together with all that it started.

    Args:
        log: the file that its output goes to.

    Attributes:
        log: that file.
        pid: of the process itself, once it was started.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     process = Process(Path(folder, "log"))
        ...     process.start(["echo", "done"], cwd=Path(folder))
        ...     process.wait(), process.log_tail()
        (0, 'done')
    """

    def __init__(self, log: Path) -> None:
        self.log = log
        self.pid = 0
        self._guard: subprocess.Popen[str] | None = None

    def start(
        self,
        command: Sequence[str],
        *,
        cwd: Path,
        environment: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> None:
        """Start it.

        Args:
            command: the program and its arguments.
            cwd: where it works.
            environment: variables beside those of this process.
            user: the user to run as, where that must be another one.

        Raises:
            RuntimeError: it did not start; the error has what was said instead.
        """
        guard = [sys.executable, "-I", str(_GUARD), str(os.getpid()), user or "-", *command]
        with self.log.open("ab") as log:
            self._guard = subprocess.Popen(  # noqa: S603 - a test's own command
                guard,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=cwd,
                env={**os.environ, **(environment or {})},
                # Away from the terminal: an interrupt is for the test run, which then stops what it started.
                start_new_session=True,
                text=True,
            )
        assert self._guard.stdout is not None  # noqa: S101 - for the type checker
        told = self._guard.stdout.readline()
        if not told:
            self.kill()
            raise RuntimeError(f"{command[0]} did not start:\n{self.log_tail()}")
        self.pid = int(told)

    @property
    def running(self) -> bool:
        """Whether it still runs."""
        return self._guard is not None and self._guard.poll() is None

    def pids(self) -> list[int]:
        """The guard, the process and all that it started."""
        if self._guard is None or not self.running:
            return []
        with suppress(psutil.NoSuchProcess):
            guard = psutil.Process(self._guard.pid)
            return [guard.pid, *(child.pid for child in guard.children(recursive=True))]
        return []

    def wait(self, seconds: float = 60.0) -> int:
        """Wait for its end, and that of all that it started; kill it if it takes too long.

        Returns:
            Its exit status, 0 to 255; a signal counts as 256 less its number.

        Raises:
            TimeoutError: it took too long.
        """
        if self._guard is None:
            raise RuntimeError("It was not started, or is gone.")
        try:
            return self._guard.wait(seconds)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"not within {seconds:g} s: it ends\n{self.log_tail()}") from None
        finally:
            self.kill()

    def stop(self, signal_number: int, *, seconds: float = 30.0) -> None:
        """Ask it to end and wait until nothing of it is left; kill it if it takes too long."""
        if self._guard is not None and self.running:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal_number)
            with suppress(subprocess.TimeoutExpired):
                self._guard.wait(seconds)
        self.kill()

    def kill(self) -> None:
        """SIGKILL it and all that it started, and wait until nothing of it is left."""
        if self._guard is None:
            return
        assert self._guard.stdin is not None  # noqa: S101 - for the type checker
        assert self._guard.stdout is not None  # noqa: S101
        self._guard.stdin.close()
        self._guard.wait()
        self._guard.stdout.close()
        self._guard = None

    def log_tail(self, lines: int = 30) -> str:
        """The last lines of what it said."""
        said = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(said.splitlines()[-lines:])
