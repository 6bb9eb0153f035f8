"""A private MariaDB. Its files are in memory; a killed process loses nothing there."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence

from tests.servers.databases import query
from tests.servers.process import Server, find


class Mariadb(Server):
    user = "mysql" if os.geteuid() == 0 else None

    @property
    def url(self) -> str:
        return f"mysql+pymysql://root@127.0.0.1:{self.port}/mysql"

    def prepare(self) -> None:
        install = find("mariadb-install-db", "mariadb-server")
        if self.user:
            shutil.chown(self.base, self.user)
        options = [
            "--no-defaults",
            f"--datadir={self.base / 'data'}",
            "--auth-root-authentication-method=normal",
            "--skip-test-db",
        ]
        subprocess.run([str(install), *options], user=self.user, group=self.user, check=True, capture_output=True, cwd=self.base)

    def command(self) -> Sequence[str]:
        settings = {
            "datadir": self.base / "data",
            "socket": self.base / "socket",
            "pid-file": self.base / "pid",
            "port": self.port,
            "bind-address": "127.0.0.1",
            "max-connections": 300,
            "innodb-buffer-pool-size": "64M",
            "innodb-log-file-size": "32M",
        }
        options = [f"--{name}={value}" for name, value in settings.items()]
        return [str(find("mariadbd", "mariadb-server")), "--no-defaults", *options, "--skip-name-resolve"]

    def check(self) -> object:
        return query(self.url, "SELECT 1")
