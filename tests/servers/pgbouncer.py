"""A private PgBouncer before a PostgreSQL."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from sqlalchemy import make_url

from tests.servers.databases import query
from tests.servers.postgresql import Postgresql
from tests.servers.process import Server, find


class Pgbouncer(Server):
    user = Postgresql.user

    def __init__(self, base: Path, target: str, mode: str) -> None:
        super().__init__(base)
        self._target, self._mode = make_url(target), mode

    @property
    def url(self) -> str:
        return self._target.set(port=self.port).render_as_string(hide_password=False)

    def prepare(self) -> None:
        settings = {"listen_addr": "127.0.0.1", "listen_port": self.port, "auth_type": "any", "pool_mode": self._mode}
        lines = [f"{name} = {value}" for name, value in {**settings, "unix_socket_dir": ""}.items()]
        target = f"* = host={self._target.host} port={self._target.port} user={self._target.username}"
        (self.base / "ini").write_text("\n".join(["[databases]", target, "[pgbouncer]", *lines, ""]))
        if self.user:
            shutil.chown(self.base, self.user)

    def command(self) -> Sequence[str]:
        return [str(find("pgbouncer", "pgbouncer")), str(self.base / "ini")]

    def check(self) -> object:
        return query(self.url, "SELECT 1")
