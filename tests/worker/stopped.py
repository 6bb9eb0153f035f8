"""Workers that get SIGTERM while they start; `python -m tests.worker.stopped` prints their exit codes as JSON."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from itertools import count
from types import FrameType
from typing import Any

from idemp.errors import Unavailable
from idemp.worker import Worker, lifecycle
from tests.apps import app

NO_MORE_LINES = 77
ATTEMPTS = count()  # a forked process counts its own


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def away_at_first() -> Worker:
    if next(ATTEMPTS) == 0:
        raise Unavailable("the database is away")
    return Worker(app)


def changed() -> Worker:
    """Make another error of what ends the start, as importing a module may."""
    try:
        terminate()
    except BaseException as error:
        raise RuntimeError("of another library") from error
    raise AssertionError


def ignored() -> Worker:
    """Ignore it, as a finalizer does."""
    try:
        terminate()
    except BaseException:
        return Worker(app)
    raise AssertionError


def stop_at(number: int) -> None:
    """Stop at a line of `lifecycle`, counted as they are executed."""
    lines = count(1)

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code is Worker.run.__code__:
            os._exit(NO_MORE_LINES)
        if frame.f_code.co_filename != lifecycle.__file__:
            return None
        if event == "line" and next(lines) == number:
            sys.settrace(None)
            terminate()
        return trace

    sys.settrace(trace)


def exit_code(begin: Callable[[], Worker], line: int = 0) -> int:
    """Return the exit code of a worker in a process of its own, as a supervisor starts it."""
    if not (child := os.fork()):
        signal.alarm(int(os.environ.get("IDEMP_TEST_PATIENCE", "60")))  # a worker that goes on would consume for ever
        signal.signal(signal.SIGTERM, lambda *_: os._exit(143))  # as the command line has it until a worker begins
        os.dup2(os.pipe()[0], sys.stdin.fileno())  # whose end would mean that the supervisor has gone
        database = app.database()
        if line:
            stop_at(line)
        lifecycle.run(begin, database, app.settings, supervisor=os.pipe()[1])
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> None:
    codes = [exit_code(changed), exit_code(ignored)]
    while codes[-1] != NO_MORE_LINES:
        codes.append(exit_code(away_at_first, len(codes) - 1))
    print(json.dumps(codes[:-1]))


if __name__ == "__main__":
    main()
