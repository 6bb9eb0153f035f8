"""A private PostgreSQL. Its files are in memory, so it need not wait for disks; a killed process loses nothing there."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Sequence
from typing import Any

import psycopg
from sqlalchemy import make_url

from tests.servers.process import Server, find

FOLDERS = "/usr/lib/postgresql/*/bin"


class Postgresql(Server):
    user = "postgres" if os.geteuid() == 0 else None  # it refuses to run as root
    stop_signal = signal.SIGINT  # ends sessions, and writes a checkpoint
    durable = False

    @property
    def url(self) -> str:
        return f"postgresql+psycopg://postgres@127.0.0.1:{self.port}/postgres"

    def prepare(self) -> None:
        initdb = find("initdb", "postgresql", FOLDERS)
        if self.user:
            shutil.chown(self.base, self.user)
        options = [
            "-D",
            str(self.base / "data"),
            "-U",
            "postgres",
            "--auth=trust",
            "--no-sync",
            "--encoding=UTF8",
            "--locale=C.UTF-8",
        ]
        subprocess.run([str(initdb), *options], user=self.user, group=self.user, check=True, capture_output=True, cwd=self.base)

    def command(self) -> Sequence[str]:
        settings = {
            "port": self.port,
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": self.base,
            "max_connections": 300,
            "fsync": "on" if self.durable else "off",
            "dynamic_shared_memory_type": "mmap",  # a killed server would leave a segment behind
        }
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        return [str(find("postgres", "postgresql", FOLDERS)), "-D", str(self.base / "data"), *options]

    def check(self) -> object:
        return query(self.url, "SELECT 1")


def query(url: str, statement: str, *parameters: object) -> list[tuple[Any, ...]]:
    """Run a statement by a plain client, outside of a transaction."""
    address = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(address, autocommit=True, connect_timeout=5) as connection:
        cursor = connection.execute(statement.encode(), parameters or None)
        return cursor.fetchall() if cursor.description else []


def create_database(url: str, template: str | None = None) -> str:
    """Create a database, as a copy of another one if it is given; return its URL."""
    name = f"test_{secrets.token_hex(6)}"
    query(url, f"CREATE DATABASE {name}" + (f" TEMPLATE {make_url(template).database}" if template else ""))
    return make_url(url).set(database=name).render_as_string(hide_password=False)


def drop_database(url: str) -> None:
    """Drop a database with all its connections."""
    query(
        make_url(url).set(database="postgres").render_as_string(hide_password=False),
        f"DROP DATABASE {make_url(url).database} WITH (FORCE)",
    )
