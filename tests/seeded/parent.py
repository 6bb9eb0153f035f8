"""A process that has imported the libraries, and forks for each run of a fault: `python -m tests.seeded.parent`.

A line of input is a folder with `idemp` and `tests`, and the options of pytest there; a line of output is pytest's exit code.
"""

from __future__ import annotations

import importlib
import json
import os
import sys

import pytest

IMPORTED = (
    "alembic.command",
    "idemp.brokers.rabbitmq",
    "idemp.cli.main",
    "idemp.testing.machine",
    "tests.conftest",
    "tests.world",
)


def main() -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("idemp", "tests")]:
        del sys.modules[name]  # the folder's own are imported
    for line in sys.stdin:
        folder, options = json.loads(line)
        if not (child := os.fork()):
            os.chdir(folder)
            sys.path.insert(0, folder)
            os.environ["PYTHONPATH"] = folder
            null, out = os.open(os.devnull, os.O_RDONLY), os.open("out", os.O_CREAT | os.O_WRONLY)
            for number, target in ((null, 0), (out, 1), (out, 2)):
                os.dup2(number, target)
            sys.exit(pytest.main(options))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
