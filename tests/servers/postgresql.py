"""A private PostgreSQL. Its files are in memory, so it need not wait for disks; a killed process loses nothing there."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Sequence

from tests.servers.databases import query
from tests.servers.process import Server, find

FOLDERS = "/usr/lib/postgresql/*/bin"


class Postgresql(Server):
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
        }
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        return [str(find("postgres", "postgresql", FOLDERS)), "-D", str(self.base / "data"), *options]

    def check(self) -> object:
        return query(self.url, "SELECT 1")
