"""Fixtures that give tests real servers.

A shared server starts when the first test asks for it and serves the whole run, all of its processes (`keeper.py`); a test
gets a database or vhost of its own there. Tests that stop, kill or starve a server take an `own_...` one.
"""

from __future__ import annotations

import uuid
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from redis import Redis as RedisClient
from sqlalchemy import make_url

from tests.servers import compose, given, keeper
from tests.servers.activemq import ActiveMQ
from tests.servers.documents import Moto, PouchDB
from tests.servers.install import in_ci
from tests.servers.mariadb import MariaDB
from tests.servers.pgbouncer import PgBouncer
from tests.servers.postgresql import PostgreSQL
from tests.servers.process import Server, scratch_directory
from tests.servers.rabbitmq import RabbitMQ
from tests.servers.redis import Redis

if TYPE_CHECKING:
    from collections.abc import Iterator

REDIS_DATABASES = range(1, 16)
LEASE = "idemp-test-lease"

S = TypeVar("S", bound=Server)


def require(kind: type[Server]) -> None:
    """Skip the test where this server can't run; in CI that is a failure."""
    if kind.need.missing() and not (kind.need.name in compose.SERVICES and compose.available()):
        line = f"!!! {kind.need.name} is MISSING: `python -m tests.servers.install` says what can be done"
        if in_ci() and not kind.need.optional:
            pytest.fail(line, pytrace=False)
        pytest.skip(line)


@contextmanager
def private(kind: type[S]) -> Iterator[S]:
    """A running server that nothing else uses, with a data directory of its own."""
    require(kind)
    with scratch_directory(kind.need.name.lower()) as base, kind(base) as server:
        yield server


def of_the_run(kind: type[S], *arguments: object) -> S:
    """The server that all processes of the run share."""
    require(kind)
    return keeper.shared(kind, *arguments)


@pytest.fixture
def unique_name() -> str:
    """A name that nothing else has: for databases, vhosts, queues, keys."""
    return f"idemp_test_{uuid.uuid4().hex[:12]}"


@pytest.fixture(scope="session")
def postgresql() -> PostgreSQL | given.GivenPostgreSQL:
    """The run's PostgreSQL: never stop it."""
    url = given.url_of("POSTGRESQL")
    return given.GivenPostgreSQL(url) if url else of_the_run(PostgreSQL)


@pytest.fixture
def postgresql_url(postgresql: PostgreSQL | given.GivenPostgreSQL, unique_name: str) -> Iterator[str]:
    """SQLAlchemy URL of an empty PostgreSQL database of the test's own."""
    yield postgresql.create_database(unique_name)
    postgresql.drop_database(unique_name)


@pytest.fixture(scope="session")
def pgbouncer(postgresql: PostgreSQL | given.GivenPostgreSQL) -> PgBouncer:
    """The run's PgBouncer, in transaction mode in front of the run's PostgreSQL: never stop it."""
    return of_the_run(PgBouncer, postgresql.url)


@contextmanager
def pooler(behind: str, **options: Any) -> Iterator[PgBouncer]:
    """A running PgBouncer that nothing else uses."""
    require(PgBouncer)
    with scratch_directory("pgbouncer") as base, PgBouncer(base, behind, **options) as server:
        yield server


@pytest.fixture
def pooled_url(pgbouncer: PgBouncer, postgresql_url: str) -> str:
    """SQLAlchemy URL of an empty PostgreSQL database of the test's own, by way of PgBouncer."""
    return pgbouncer.through(postgresql_url)


@pytest.fixture(scope="session")
def mariadb() -> MariaDB | given.GivenMariaDB:
    """The run's MariaDB: never stop it."""
    url = given.url_of("MARIADB")
    return given.GivenMariaDB(url) if url else of_the_run(MariaDB)


@pytest.fixture
def mariadb_url(mariadb: MariaDB | given.GivenMariaDB, unique_name: str) -> Iterator[str]:
    """SQLAlchemy URL of an empty MariaDB database of the test's own."""
    yield mariadb.create_database(unique_name)
    mariadb.drop_database(unique_name)


@pytest.fixture
def mysql_url(unique_name: str) -> Iterator[str]:
    """SQLAlchemy URL of an empty database on the user's MySQL; there is no private one."""
    url = given.url_of("MYSQL")
    if url is None:
        pytest.skip("IDEMP_TEST_MYSQL_URL names no MySQL server")
    server = given.GivenMariaDB(url)
    yield server.create_database(unique_name)
    server.drop_database(unique_name)


@pytest.fixture(scope="session")
def rabbitmq() -> RabbitMQ | given.GivenRabbitMQ:
    """The run's RabbitMQ: never stop it, and raise no alarm."""
    url = given.url_of("RABBITMQ")
    return given.GivenRabbitMQ(url) if url else of_the_run(RabbitMQ)


@pytest.fixture
def rabbitmq_url(rabbitmq: RabbitMQ | given.GivenRabbitMQ, unique_name: str) -> Iterator[str]:
    """URL (`pyamqp://`) of an empty vhost of the test's own."""
    yield rabbitmq.create_vhost(unique_name)
    rabbitmq.delete_vhost(unique_name)


@pytest.fixture(scope="session")
def redis_server() -> Redis | given.GivenRedis:
    """The run's Redis: never stop it."""
    url = given.url_of("REDIS")
    return given.GivenRedis(url) if url else of_the_run(Redis)


@pytest.fixture
def redis_url(redis_server: Redis | given.GivenRedis) -> Iterator[str]:
    """URL of a Redis database that was empty and holds one key, the test's lease."""
    for number in REDIS_DATABASES:
        url = make_url(redis_server.url).set(database=str(number)).render_as_string(hide_password=False)
        with closing(RedisClient.from_url(url)) as client:
            if client.set(LEASE, "1", nx=True, ex=3600):
                if client.dbsize() == 1:
                    yield url
                    client.flushdb()
                    return
                client.delete(LEASE)
    pytest.fail("no Redis database is empty", pytrace=False)


@pytest.fixture(scope="session")
def activemq_url() -> str:
    """URL (`stomp://`) of the run's ActiveMQ: never stop it. It has no vhosts: take a unique name."""
    return given.url_of("ACTIVEMQ") or of_the_run(ActiveMQ).url


@pytest.fixture(scope="session")
def pouchdb() -> PouchDB:
    """The run's server of CouchDB's protocol: never stop it."""
    return of_the_run(PouchDB)


@pytest.fixture(scope="session")
def moto() -> Moto:
    """The run's server of DynamoDB's protocol: never stop it."""
    return of_the_run(Moto)


@pytest.fixture
def own_postgresql() -> Iterator[PostgreSQL]:
    """A PostgreSQL that this test may stop and kill."""
    with private(PostgreSQL) as server:
        yield server


@pytest.fixture
def own_mariadb() -> Iterator[MariaDB]:
    """A MariaDB that this test may stop and kill."""
    with private(MariaDB) as server:
        yield server


@pytest.fixture
def own_redis() -> Iterator[Redis]:
    """A Redis that this test may stop and kill."""
    with private(Redis) as server:
        yield server


@pytest.fixture
def own_activemq() -> Iterator[ActiveMQ]:
    """An ActiveMQ that this test may stop and kill."""
    with private(ActiveMQ) as server:
        yield server


@pytest.fixture
def own_rabbitmq(spare_rabbitmq: SpareRabbitMQ) -> RabbitMQ:
    """A RabbitMQ that this test may stop, kill and starve; empty."""
    return spare_rabbitmq.take()


@pytest.fixture(scope="session")
def spare_rabbitmq() -> Iterator[SpareRabbitMQ]:
    """The node behind `own_rabbitmq`."""
    require(RabbitMQ)
    with closing(SpareRabbitMQ()) as spare:
        yield spare


class SpareRabbitMQ:
    """One node that tests take in turn, because starting one takes seconds: a node found dead is replaced."""

    def __init__(self) -> None:
        self._server: RabbitMQ | None = None
        self._stack = ExitStack()

    def take(self) -> RabbitMQ:
        """A running node without alarms, vhosts or connections of earlier tests."""
        if self._server is None or not self._server.running:
            self.close()
            self._server = self._stack.enter_context(private(RabbitMQ))
        else:
            self._server.reset()
        return self._server

    def close(self) -> None:
        """End the node."""
        self._stack.close()
