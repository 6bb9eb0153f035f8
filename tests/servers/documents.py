"""Private servers that speak the protocols of document stores, in memory: their data ends with them."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.request import urlopen

from tests.servers import programs
from tests.servers.process import Server

if TYPE_CHECKING:
    import boto3

PASSWORD = "hush-hush"


class PouchDB(Server):
    """PouchDB Server, which speaks CouchDB's protocol."""

    need = programs.POUCHDB

    @property
    def url(self) -> str:
        """URL of the server, for its admin; databases are below it."""
        return f"http://admin:{PASSWORD}@127.0.0.1:{self.port}"

    def prepare(self) -> None:
        """A folder for what it writes: its log, and its configuration."""
        self.data.mkdir()
        (self.data / "config.json").write_text(json.dumps({"admins": {"admin": PASSWORD}}))

    def command(self) -> list[str]:
        """Everything in memory."""
        where = ("--host", "127.0.0.1", "--port", str(self.port), "--config", str(self.data / "config.json"))
        quiet = ("--no-stdout-logs", "--no-color")
        return [programs.path("node"), programs.path("pouchdb-server"), "--in-memory", *where, *quiet]

    def check(self) -> None:
        """Ask it for anything."""
        with urlopen(f"http://127.0.0.1:{self.port}", timeout=5):
            pass


class Moto(Server):
    """Moto, which speaks DynamoDB's protocol."""

    need = programs.MOTO

    @property
    def url(self) -> str:
        """The endpoint."""
        return f"http://127.0.0.1:{self.port}"

    def prepare(self) -> None:
        """Nothing but the folder that says that it was prepared."""
        self.data.mkdir()

    def command(self) -> list[str]:
        """One request at a time: see there."""
        return [sys.executable, "-m", "tests.servers.moto_server", str(self.port)]

    def environment(self) -> dict[str, str]:
        """Where this package is."""
        return {"PYTHONPATH": str(Path(__file__).parents[2])}

    def check(self) -> None:
        """Ask it for anything."""
        with urlopen(f"{self.url}/moto-api/data.json", timeout=5):
            pass


@functools.cache
def session() -> boto3.Session:
    """Credentials and a region that Moto takes; one for all, which has read the description of the service."""
    import boto3

    return boto3.Session(aws_access_key_id="test", aws_secret_access_key="not-so-secret", region_name="eu-central-1")
