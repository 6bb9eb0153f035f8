"""A private MariaDB."""

from __future__ import annotations

import os
import subprocess
from contextlib import closing

import pymysql
from pymysql.constants import ER
from sqlalchemy import make_url

from tests.servers import programs
from tests.servers.process import Server, with_database


class MariaDB(Server):
    """A MariaDB with its defaults."""

    need = programs.MARIADB

    @property
    def url(self) -> str:
        """SQLAlchemy URL of the server's own schema."""
        return f"mariadb+pymysql://root@127.0.0.1:{self.port}/mysql"

    def prepare(self) -> None:
        """Create the data directory."""
        install = [programs.path("mariadb-install-db"), "--no-defaults", f"--datadir={self.data}", "--skip-test-db"]
        done = subprocess.run(
            [*install, "--auth-root-authentication-method=normal", *self._as_root()],
            check=False,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"mariadb-install-db failed:\n{done.stdout}{done.stderr}")

    def command(self) -> list[str]:
        """Everything in the foreground, its socket in the data directory."""
        return [
            programs.path("mariadbd"),
            "--no-defaults",
            f"--datadir={self.data}",
            f"--socket={self.data}/socket",
            f"--pid-file={self.data}/pid",
            "--bind-address=127.0.0.1",
            f"--port={self.port}",
            "--skip-name-resolve",
            "--max-connections=400",
            *self._as_root(),
        ]

    def check(self) -> None:
        """Ask a question."""
        query(self.url, "SELECT 1")

    def create_database(self, name: str) -> str:
        """Create a database and return its SQLAlchemy URL."""
        return create_database(self.url, name)

    def drop_database(self, name: str) -> None:
        """Drop a database, whoever still holds locks in it."""
        drop_database(self.url, name)

    @staticmethod
    def _as_root() -> list[str]:
        # It refuses to run as root without being told so.
        return ["--user=root"] if os.geteuid() == 0 else []


def create_database(url: str, name: str) -> str:
    """Create a database on the server that `url` names and return its own URL."""
    query(url, f"CREATE DATABASE `{name}` CHARACTER SET utf8mb4")
    return with_database(url, name)


def drop_database(url: str, name: str) -> None:
    """Drop a database, whoever still holds locks in it."""
    in_it = "SELECT id FROM information_schema.processlist WHERE db = %s AND id <> CONNECTION_ID()"
    for (connection,) in query(url, in_it, name):
        try:
            query(url, f"KILL {connection}")
        except pymysql.err.OperationalError as error:
            if error.args[0] != ER.NO_SUCH_THREAD:  # it has ended by itself meanwhile
                raise
    query(url, f"DROP DATABASE IF EXISTS `{name}`")


def query(url: str, statement: str, *parameters: object) -> tuple[tuple[object, ...], ...]:
    """Run one statement outside of a transaction."""
    at = make_url(url)
    connecting = pymysql.connect(
        host=at.host or "127.0.0.1",
        port=at.port or 3306,
        user=at.username,
        password=str(at.password or ""),
        database=at.database,
        autocommit=True,
        connect_timeout=5,
    )
    with closing(connecting) as connection, connection.cursor() as cursor:
        cursor.execute(statement, parameters or None)
        return tuple(cursor.fetchall())
