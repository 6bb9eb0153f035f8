"""A pipeline in a process of its own, which can be killed without the test."""

from __future__ import annotations

import os
import pkgutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from idemp.spark.testing.plans import DRIVER
from idemp.testing.processes import Process

_KILLED: Final = 256 - 9


@dataclass(frozen=True, slots=True)
class Ended:
    """How a driver ended.

    Attributes:
        status: its exit status, 0 to 255.
        said: what it printed last, and what was logged.

    Example:
        >>> Ended(status=247, said="").killed
        True
    """

    status: int
    said: str

    @property
    def killed(self) -> bool:
        """Whether SIGKILL ended it."""
        return self.status == _KILLED


def run_driver(target: str, *arguments: str, log: Path, seconds: float = 120.0) -> Ended:
    """Call a function in a new process, which makes a session of its own; wait until nothing of it is left.

    Its faults may be `kill driver`. Its JVMs and Python workers end with it, and with this process.

    Args:
        target: the function, as `MODULE:FUNCTION`; it is found where this process would find it.
        arguments: texts for it.
        log: the file for what it prints and logs; it is continued.
        seconds: how long it may take.

    Raises:
        TimeoutError: it took longer, and was killed.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     run_driver("builtins:print", "hello", log=Path(folder, "log"))
        Ended(status=0, said='hello')
    """
    process = Process(log)
    command = [sys.executable, "-m", "idemp.spark.testing.drivers", target, *arguments]
    path = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
    process.start(command, cwd=Path.cwd(), environment={"PYTHONPATH": path})
    status = process.wait(seconds)
    return Ended(status, process.log_tail(lines=200))


def _main(target: str, *arguments: str) -> None:
    os.environ[DRIVER] = str(os.getpgrp())  # the guard made the group, for this process and what it starts
    pkgutil.resolve_name(target)(*arguments)


if __name__ == "__main__":
    _main(*sys.argv[1:])
