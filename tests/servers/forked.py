"""Processes of the command line, forked from one that has imported everything.

What is killed and started again all the time need not begin with an interpreter's second of imports each time.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

IMPORTED = (
    "psycopg",
    "sqlalchemy.dialects.postgresql",
    "idemp.broker.kombu.consuming",
    "idemp.cli",
    "idemp.inbox.sql",
    "idemp.worker",
)


def forking(*modules: str) -> Any:
    """What makes processes: forked from one that has imported these modules, too, if it does not run yet."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*IMPORTED, *modules])
    return context


def run(arguments: Sequence[str], folder: Path, environment: Mapping[str, str], log: Path | None) -> None:
    """What the process does: it becomes `python -m idemp …`, started in a folder."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    sys.argv = ["idemp", *arguments]
    if log is not None:
        for path, descriptor in ((os.devnull, 1), (log, 2)):
            with open(path, "wb") as file:  # noqa: PTH123 - the null device is no file
                os.dup2(file.fileno(), descriptor)
    from idemp.cli import main

    main()


class Forked:
    """A process of the command line, to be used as a `subprocess.Popen`; by one thread at a time.

    Args:
        arguments: what follows `idemp`.
        folder: where it starts.
        environment: all of it.
        log: gets its stderr; its stdout goes nowhere then. Without one both are this process's.
    """

    def __init__(
        self, arguments: Sequence[str], *, folder: Path, environment: Mapping[str, str], log: Path | None = None
    ) -> None:
        self._process = forking().Process(target=run, args=(list(arguments), folder, dict(environment), log))
        self._process.start()

    @property
    def pid(self) -> int:
        """Its number."""
        return int(self._process.pid)

    @property
    def returncode(self) -> int | None:
        """Its exit code, the negative number of the signal that killed it, `None` while it runs."""
        return self._process.exitcode  # type: ignore[no-any-return]

    def poll(self) -> int | None:
        """The same."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, and return its exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return self.returncode

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._process.terminate()

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.kill()
