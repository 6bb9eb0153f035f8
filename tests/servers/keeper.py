"""The process that keeps the servers of a run: `python -m tests.servers.keeper FOLDER`. It ends when its input closes."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from threading import Lock, Thread

from tests.servers.mariadb import Mariadb
from tests.servers.postgresql import Postgresql
from tests.servers.process import Server
from tests.servers.rabbitmq import Rabbitmq
from tests.servers.redis import Redis

KINDS: dict[str, type[Server]] = {"mariadb": Mariadb, "postgresql": Postgresql, "rabbitmq": Rabbitmq, "redis": Redis}


class Keeper:
    """Starts each server once."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._running: dict[str, Server] = {}
        self._locks = {kind: Lock() for kind in KINDS}

    def serve(self, connection: Connection) -> None:
        with connection, suppress(EOFError, OSError):
            kind, method, arguments = connection.recv()
            try:
                with self._locks[kind]:
                    if kind not in self._running:
                        self._running[kind] = self._stack.enter_context(KINDS[kind](self._folder / kind))
                    connection.send((getattr(self._running[kind], method)(*arguments), ""))
            except Exception as error:
                connection.send(("", f"{type(error).__name__}: {error}"))


def main(folder: Path) -> None:
    with ExitStack() as stack, Listener(str(folder / "socket"), "AF_UNIX", backlog=64) as listener:
        keeper = Keeper(folder, stack)

        def accept() -> None:
            while True:
                with suppress(OSError, EOFError):
                    Thread(target=keeper.serve, args=(listener.accept(),), daemon=True).start()

        Thread(target=accept, daemon=True).start()
        print("ready", flush=True)
        os.read(sys.stdin.fileno(), 1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
