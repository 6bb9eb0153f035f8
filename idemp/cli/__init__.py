"""The command line `idemp`."""

import os
import signal
from typing import NoReturn

__all__ = ["main"]


def main() -> NoReturn:
    """Run the command line. SIGTERM ends the process from here on: a container's first process ignores signals without a handler."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(143))  # while modules are imported; a worker has a handler of its own

    from idemp.cli.main import main as run

    run()
