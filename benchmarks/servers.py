"""Servers of a run: private ones, each started when something asks for it, and a database or queues of its own in them."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from kombu import Connection
from redis import Redis as Client

from idemp.inbox.sql import create_engine_safely
from idemp.testing import FaultProxy
from tests.servers import compose
from tests.servers.fixtures import private
from tests.servers.mariadb import MariaDB
from tests.servers.postgresql import PostgreSQL
from tests.servers.rabbitmq import RabbitMQ
from tests.servers.redis import Redis

if TYPE_CHECKING:
    from types import TracebackType

KINDS = {"postgresql": PostgreSQL, "mariadb": MariaDB, "rabbitmq": RabbitMQ, "redis": Redis}
DATABASES = ("postgresql", "mariadb", "sqlite")
BROKERS = ("rabbitmq", "redis", "local")


def version_of(kind: str, url: str) -> str:
    """Of a server that is running."""
    if kind in DATABASES:
        engine = create_engine_safely(url)
        with engine.connect() as connection:
            found = connection.dialect.server_version_info or ()
        engine.dispose()
        return ".".join(map(str, found))
    if kind == "rabbitmq":
        with Connection(url) as connection:
            return str(connection.connection.server_properties["version"])
    with closing(Client.from_url(url)) as client:
        return str(client.info()["redis_version"])


class Servers:
    """Private servers, which end with it. What one part of a run leaves there, no other part sees."""

    def __init__(self) -> None:
        self._open = ExitStack()
        self._running: dict[str, Any] = {}
        self._folder = Path(self._open.enter_context(tempfile.TemporaryDirectory(prefix="idemp-bench-")))
        self._given = 0

    def server(self, kind: str) -> Any:
        """The running server of a kind."""
        if kind not in self._running:
            if KINDS[kind].need.missing() and not compose.available():
                raise FileNotFoundError(f"{kind} is missing: `python -m tests.servers.install` says what can be done")
            self._running[kind] = self._open.enter_context(private(KINDS[kind]))
        return self._running[kind]

    def database(self, kind: str, *, round_trip: float = 0.0) -> str:
        """URL of a new database, so many milliseconds away."""
        self._given += 1
        if kind == "sqlite":
            return f"sqlite:///{self._folder}/{self._given}.db"
        server = self.server(kind)
        url: str = server.create_database(f"bench_{self._given}")
        if round_trip:
            proxy = self._open.enter_context(FaultProxy("127.0.0.1", server.port))
            proxy.slow(delay=round_trip / 2000)
            url = proxy.through(url)
        return url

    def broker(self, kind: str) -> str:
        """URL of a broker without queues."""
        self._given += 1
        match kind:
            case "local":
                return f"local://{self._folder}/{self._given}.queues"
            case "rabbitmq":
                url: str = self.server(kind).create_vhost(f"bench_{self._given}")
                return url
            case _:
                # Sixteen databases are as many as Redis has: 0 for what is no broker.
                number = 1 + sum(1 for name in self._running if name.startswith("redis "))
                self._running[f"redis {number}"] = None
                return str(self.server(kind).url).removesuffix("/0") + f"/{number}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()
