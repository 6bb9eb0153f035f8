"""A private PgBouncer in front of a PostgreSQL."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

from sqlalchemy import make_url

from tests.servers import programs
from tests.servers.postgresql import create_database, drop_database, query
from tests.servers.process import Server

if TYPE_CHECKING:
    from pathlib import Path

_CONFIGURATION = """\
[databases]
* = {server}

[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {listen_port}
unix_socket_dir =
auth_type = any
admin_users = postgres
pool_mode = {mode}
default_pool_size = {size}
server_lifetime = {lifetime}
max_client_conn = 500
server_login_retry = 1
query_wait_timeout = 3
"""


class PgBouncer(Server):
    """A pooler whose few server connections are shared by all clients, each for one transaction at a time.

    PgBouncer refuses to run as root: then it runs as user postgres, who gets `base` and nothing else.

    Args:
        base: folder for its configuration and log.
        behind: SQLAlchemy URL of the PostgreSQL behind it.
        mode: `transaction` or `session`.
        size: server connections for each database.
        lifetime: seconds until a server connection is replaced; at 0 each transaction has one of its own.
    """

    need = programs.PGBOUNCER

    def __init__(
        self, base: Path, behind: str, *, mode: str = "transaction", size: int = 4, lifetime: int = 3600
    ) -> None:
        super().__init__(base)
        self._behind_url = behind
        self._mode = mode
        self._size = size
        self._lifetime = lifetime

    @property
    def url(self) -> str:
        """SQLAlchemy URL of the maintenance database, through the pooler."""
        return self.through(self._behind_url)

    def through(self, url: str) -> str:
        """The URL of a database of the server behind it, by way of the pooler."""
        return make_url(url).set(host="127.0.0.1", port=self.port).render_as_string(hide_password=False)

    def create_database(self, name: str) -> str:
        """Create a database on the server behind it, and return its URL by way of the pooler."""
        return self.through(create_database(self._behind_url, name))

    def drop_database(self, name: str) -> None:
        """Drop a database, whoever is still connected to it."""
        drop_database(self._behind_url, name)

    def prepare(self) -> None:
        """Write the configuration."""
        self.data.mkdir()
        behind = make_url(self._behind_url)
        server = {"host": behind.host, "port": behind.port, "user": behind.username, "password": behind.password}
        (self.data / "pgbouncer.ini").write_text(
            _CONFIGURATION.format(
                server=" ".join(f"{name}={value}" for name, value in server.items() if value),
                listen_port=self.port,
                mode=self._mode,
                size=self._size,
                lifetime=self._lifetime,
            )
        )
        if user := self.user():
            for path in (self.base, self.data, self.data / "pgbouncer.ini"):
                shutil.chown(path, user)

    def command(self) -> list[str]:
        """Everything in the foreground."""
        return [programs.path("pgbouncer"), str(self.data / "pgbouncer.ini")]

    def user(self) -> str | None:
        """Root must become somebody else."""
        return "postgres" if os.geteuid() == 0 else None

    def check(self) -> None:
        """Ask a question through it."""
        query(self.url, "SELECT 1")
