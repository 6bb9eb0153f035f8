"""A private Redis, in memory."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from itertools import count

from tests.servers.process import Server, find


class Redis(Server):
    _numbers = count()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def prepare(self) -> None:
        find("redis-server", "redis-server")

    def command(self) -> Sequence[str]:
        options = {"bind": "127.0.0.1", "port": self.port, "databases": 1000, "save": "", "appendonly": "no", "dir": self.base}
        return [
            str(find("redis-server", "redis-server")),
            *(part for name, value in options.items() for part in (f"--{name}", str(value))),
        ]

    def check(self) -> object:
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
            connection.sendall(b"PING\r\n")
            assert connection.recv(7) == b"+PONG\r\n"
            return True

    def create_database(self) -> str:
        """Return the URL of an empty database."""
        return f"redis://127.0.0.1:{self.port}/{next(self._numbers)}"
