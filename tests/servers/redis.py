"""A private Redis."""

from __future__ import annotations

from contextlib import closing

from redis import Redis as Client

from tests.servers import programs
from tests.servers.process import Server


class Redis(Server):
    """A Redis that has every write on the disk before it answers."""

    need = programs.REDIS

    @property
    def url(self) -> str:
        """URL of database 0."""
        return f"redis://127.0.0.1:{self.port}/0"

    def prepare(self) -> None:
        """Create the data directory."""
        self.data.mkdir()

    def command(self) -> list[str]:
        """Everything in the foreground, every write synced."""
        options = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "save": "",
            "appendonly": "yes",
            "appendfsync": "always",
            "dir": str(self.data),
        }
        return [
            programs.path("redis-server"),
            *(part for name, value in options.items() for part in (f"--{name}", value)),
        ]

    def check(self) -> None:
        """Ping it; while it loads its data it answers with an error."""
        with closing(Client.from_url(self.url, socket_timeout=5)) as client:
            client.ping()
