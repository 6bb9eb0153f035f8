"""A private PostgreSQL. Its files are in memory, so it need not wait for disks; a killed process loses nothing there."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import ClassVar

import psycopg
from sqlalchemy import make_url

from tests.servers.databases import query
from tests.servers.process import Server, find, wait_until

FOLDERS = "/usr/lib/postgresql/*/bin"


class Postgresql(Server):
    options: ClassVar[Mapping[str, object]] = {}
    user = "postgres" if os.geteuid() == 0 else None  # it refuses to run as root
    stop_signal = signal.SIGINT  # ends sessions, and writes a checkpoint

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
            "max_prepared_transactions": 100,
            "dynamic_shared_memory_type": "mmap",  # a killed server would leave a segment behind
            **self.options,
        }
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        return [str(find("postgres", "postgresql", FOLDERS)), "-D", str(self.base / "data"), *options]

    def check(self) -> object:
        return query(self.url, "SELECT 1")


class Unwritten(Postgresql):
    """A PostgreSQL that keeps lazy commits in its memory for seconds, and loses them whenever it or one of its sessions ends."""

    stop_signal = signal.SIGQUIT
    options: ClassVar[Mapping[str, object]] = {"wal_writer_delay": "10s", "wal_writer_flush_after": "1GB", "autovacuum": "off"}

    def end_a_session(self) -> None:
        """Kill a process of the server, so that it throws its memory away and recovers."""
        address = make_url(self.url).set(drivername="postgresql").render_as_string(hide_password=False)
        with psycopg.connect(address) as connection, suppress(psycopg.OperationalError):
            os.kill(connection.info.backend_pid, signal.SIGKILL)
            connection.execute("SELECT 1")
        wait_until(lambda: query(self.url, "SELECT NOT pg_is_in_recovery()"), "the recovery")
