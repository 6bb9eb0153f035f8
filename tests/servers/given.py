"""The user's own servers, named by IDEMP_TEST_*_URL: used, but only inside what a test has created there itself."""

from __future__ import annotations

import json
import os
from base64 import b64encode
from dataclasses import dataclass
from urllib.parse import quote, urlsplit, urlunsplit
from urllib.request import Request, urlopen

from tests.servers import mariadb, postgresql

MANAGEMENT_URL = "IDEMP_TEST_RABBITMQ_MANAGEMENT_URL"


def url_of(server: str) -> str | None:
    """The URL that the user gave for a server, such as POSTGRESQL."""
    return os.environ.get(f"IDEMP_TEST_{server}_URL")


@dataclass(frozen=True)
class GivenPostgreSQL:
    """A PostgreSQL whose user may create databases."""

    url: str

    def create_database(self, name: str) -> str:
        """Create a database and return its SQLAlchemy URL."""
        return postgresql.create_database(self.url, name)

    def drop_database(self, name: str) -> None:
        """Drop a database that a test created."""
        postgresql.drop_database(self.url, name)


@dataclass(frozen=True)
class GivenMariaDB:
    """A MariaDB or MySQL whose user may create databases."""

    url: str

    def create_database(self, name: str) -> str:
        """Create a database and return its SQLAlchemy URL."""
        return mariadb.create_database(self.url, name)

    def drop_database(self, name: str) -> None:
        """Drop a database that a test created."""
        mariadb.drop_database(self.url, name)


@dataclass(frozen=True)
class GivenRabbitMQ:
    """A RabbitMQ with its management plugin, for AMQP itself can't create a vhost."""

    url: str

    def create_vhost(self, name: str) -> str:
        """Create a vhost that the URL's user may use, and return its URL."""
        everything = {"configure": ".*", "write": ".*", "read": ".*"}
        self._manage("PUT", f"vhosts/{quote(name)}", {})
        self._manage("PUT", f"permissions/{quote(name)}/{quote(self._user)}", everything)
        return urlunsplit(urlsplit(self.url)._replace(path=f"/{name}"))

    def permit_to_write_alone(self, name: str) -> None:
        """Take the rights to configure and to read in a vhost from its user."""
        rights = {"configure": "^$", "write": ".*", "read": "^$"}
        self._manage("PUT", f"permissions/{quote(name)}/{quote(self._user)}", rights)

    def delete_vhost(self, name: str) -> None:
        """Delete a vhost that a test created."""
        self._manage("DELETE", f"vhosts/{quote(name)}")

    @property
    def _user(self) -> str:
        return urlsplit(self.url).username or "guest"

    def _manage(self, method: str, path: str, body: object = None) -> None:
        parts = urlsplit(self.url)
        management = os.environ.get(MANAGEMENT_URL) or f"http://{parts.hostname}:15672"
        login = b64encode(f"{self._user}:{parts.password or 'guest'}".encode()).decode()
        request = Request(
            f"{management.rstrip('/')}/api/{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Basic {login}", "Content-Type": "application/json"},
        )
        with urlopen(request, timeout=10):
            pass


@dataclass(frozen=True)
class GivenRedis:
    """A Redis of which a test takes one empty database."""

    url: str
