"""A private PouchDB Server, in memory: it speaks the language of CouchDB."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from tests.servers.process import Server, find

PLACE = Path(sys.prefix) / "pouchdb"
PROGRAM = PLACE / "node_modules" / ".bin" / "pouchdb-server"


def install() -> None:
    """Install it in the virtual environment."""
    npm = find("npm", "npm")
    if not PROGRAM.exists():
        subprocess.run([npm, "install", "--no-audit", "--no-fund", "--prefix", PLACE, "pouchdb-server@4.2.0"], check=True)


class Pouchdb(Server):
    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def prepare(self) -> None:
        """Nothing is kept."""

    def command(self) -> Sequence[str]:
        return [str(PROGRAM), "--in-memory", "--host", "127.0.0.1", "--port", str(self.port), "--no-stdout-logs"]

    def check(self) -> object:
        return urllib.request.urlopen(self.url, timeout=5).read()
