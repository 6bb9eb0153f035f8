"""A private PostgreSQL."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from contextlib import closing
from typing import LiteralString

import psycopg
from psycopg import sql
from sqlalchemy import make_url

from tests.servers import programs
from tests.servers.process import Server, with_database


class PostgreSQL(Server):
    """A PostgreSQL with real durability and a few prepared transactions.

    PostgreSQL refuses to run as root: then it runs as user postgres, who gets `base` and nothing else.
    """

    need = programs.POSTGRESQL
    stop_signal = signal.SIGINT  # "fast": ends the sessions, writes a checkpoint

    @property
    def url(self) -> str:
        """SQLAlchemy URL of the maintenance database."""
        return f"postgresql+psycopg://postgres@127.0.0.1:{self.port}/postgres"

    def prepare(self) -> None:
        """Create the cluster."""
        user = self.user()
        if user:
            shutil.chown(self.base, user)
        initdb = [programs.path("initdb"), "-D", str(self.data), "-U", "postgres", "--auth=trust", "--no-sync"]
        done = subprocess.run(
            [*(("runuser", "-u", user, "--") if user else ()), *initdb, "--encoding=UTF8", "--locale=C.UTF-8"],
            check=False,
            capture_output=True,
            text=True,
            cwd=self.base,
        )
        if done.returncode:
            raise RuntimeError(f"initdb failed:\n{done.stderr}")

    def command(self) -> list[str]:
        """Everything in the foreground, sockets on loopback and in the data directory only."""
        settings = {
            "port": self.port,
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": self.data,
            "max_prepared_transactions": 10,
            "max_connections": 400,
            # Not in /dev/shm, where a killed server would leave it.
            "dynamic_shared_memory_type": "mmap",
        }
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        return [programs.path("postgres"), "-D", str(self.data), *options]

    def user(self) -> str | None:
        """Root must become postgres."""
        return "postgres" if os.geteuid() == 0 else None

    def check(self) -> None:
        """Ask a question of the maintenance database."""
        query(self.url, "SELECT 1")

    def stop_immediately(self) -> None:
        """Stop without a checkpoint, as `pg_ctl stop -m immediate` does: the next start recovers from the log."""
        if self.container:
            self.container.kill()
        else:
            self.process.stop(signal.SIGQUIT)

    def close(self) -> None:
        """End it for good; killed instead, it would leave a segment of shared memory behind in the system."""
        if not self.container:
            self.stop_immediately()
        super().close()

    def create_database(self, name: str) -> str:
        """Create a database and return its SQLAlchemy URL."""
        return create_database(self.url, name)

    def drop_database(self, name: str) -> None:
        """Drop a database, whoever is still connected to it."""
        drop_database(self.url, name)


def create_database(url: str, name: str) -> str:
    """Create a database on the server that `url` names and return its own URL."""
    query(url, sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    return with_database(url, name)


def drop_database(url: str, name: str) -> None:
    """Drop a database, whoever is still connected to it; its prepared transactions are rolled back first."""
    for (gid,) in query(url, "SELECT gid FROM pg_prepared_xacts WHERE database = %s", name):
        query(with_database(url, name), sql.SQL("ROLLBACK PREPARED {}").format(sql.Literal(gid)))
    query(url, sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))


def query(url: str, statement: LiteralString | sql.Composed, *parameters: object) -> list[tuple[object, ...]]:
    """Run one statement outside of a transaction."""
    address = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
    with closing(psycopg.connect(address, autocommit=True, connect_timeout=5)) as connection:
        cursor = connection.execute(statement, parameters or None)
        return cursor.fetchall() if cursor.description else []
