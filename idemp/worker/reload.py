"""Development mode: a worker that is started again when a source file changes."""

from __future__ import annotations

import contextlib
import itertools
import os.path
import signal
import subprocess
import threading
from collections.abc import Sequence
from importlib.util import cache_from_source
from pathlib import Path
from types import FrameType
from typing import Final

from idemp.errors import needs
from idemp.events import log
from idemp.worker.lifecycle import INTERRUPTED, SIGNALS

__all__ = ["run_reloading"]

POLL: Final = 100  # milliseconds between looks at the process


def run_reloading(command: Sequence[str]) -> int:
    """Run a worker until SIGTERM or SIGINT, and start it again when a source file below the current folder changes.

    The worker is stopped by SIGTERM, so it finishes its handler. If it has ended by itself, the next change starts it.

    Args:
        command: Starts the worker.

    Returns:
        The exit code: 0, or 130 if a second signal has interrupted the worker.

    Raises:
        NotInstalled: `watchfiles` is missing.

    Example:
        >>> run_reloading.__name__
        'run_reloading'
    """
    with needs("reload"):
        from watchfiles import PythonFilter, watch

    stopping, is_source = threading.Event(), PythonFilter(extra_extensions=(".toml",))
    process: subprocess.Popen[bytes] | None = None
    running = ending = False

    def stop(_number: int, _frame: FrameType | None) -> None:
        again = stopping.is_set()
        stopping.set()
        if process is not None and (again or not ending):  # a second signal would interrupt its handler
            process.terminate()

    for each in (*SIGNALS, signal.SIGHUP):  # the worker has a session of its own, so a closed terminal does not end it
        signal.signal(each, stop)
    for changes in watch(".", watch_filter=None, stop_event=stopping, rust_timeout=POLL, yield_on_timeout=True):
        changed = sorted({os.path.relpath(path) for change, path in changes if is_source(change, path)})
        if changed:
            log("worker.reloaded", files=", ".join(changed))
        if changed and process is not None and not stopping.is_set():
            ending = True
            process.terminate()
            process.wait()
            ending = False
        _forget(changed)
        if (changed or process is None) and not stopping.is_set():
            process, running = subprocess.Popen(command, start_new_session=True), True  # noqa: S603 - our own command
            if stopping.is_set():  # the signal came while it was started
                process.terminate()
        elif running and process is not None and process.poll() is not None:
            running = False
            log("worker.ended", code=process.returncode)
    return INTERRUPTED if process is not None and process.wait() == INTERRUPTED else 0


def _forget(paths: Sequence[str]) -> None:
    """Remove what Python has compiled: it compares only the size and the second of a change, so it could run the old code."""
    for path, level in itertools.product(paths, ("", 1, 2)):
        with contextlib.suppress(OSError):
            Path(cache_from_source(path, optimization=level)).unlink()
