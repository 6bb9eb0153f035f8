"""Which programs each server needs, the packages that bring them, and where they are found."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.servers import node

# Distributions keep server programs off the ordinary user's PATH.
EXTRA_FOLDERS = ("/usr/lib/rabbitmq/bin", "/usr/local/sbin", "/usr/sbin")


@dataclass(frozen=True)
class Need:
    """What the tests of one server need on this machine; those of an optional one may be skipped even in CI.

    `packages` are apt-get's, `modules` npm's.
    """

    name: str
    programs: tuple[str, ...]
    packages: tuple[str, ...]
    optional: bool = False
    modules: tuple[str, ...] = ()

    def missing(self) -> tuple[str, ...]:
        """The programs that are not installed."""
        return tuple(program for program in self.programs if find(program) is None)


POSTGRESQL = Need("PostgreSQL", ("initdb", "postgres"), ("postgresql",))
PGBOUNCER = Need("PgBouncer", ("pgbouncer",), ("pgbouncer",))
# The -core packages bring the programs without a service.
MARIADB = Need("MariaDB", ("mariadb-install-db", "mariadbd"), ("mariadb-server-core", "mariadb-client-core"))
RABBITMQ = Need("RabbitMQ", ("rabbitmq-server", "rabbitmqctl", "epmd"), ("rabbitmq-server",))
REDIS = Need("Redis", ("redis-server",), ("redis-server",))
# The libraries are what its answers to questions about queues are written with; the package only recommends them.
ACTIVEMQ = Need("ActiveMQ", ("activemq", "java"), ("activemq", "libxstream-java", "libjettison-java"), optional=True)
AMQP_TOOLS = Need("amqp-tools", ("amqp-publish",), ("amqp-tools",))
# The model checker; it writes a verifier in C.
SPIN = Need("spin", ("spin", "cc"), ("spin", "gcc", "libc6-dev"), optional=True)
# What Spark runs on; PySpark itself comes with the Python packages.
JAVA = Need("Java", ("java",), ("openjdk-17-jre-headless",))
# Speaks CouchDB's protocol, which no package of Debian's does.
NODE = Need("Node.js", ("node", "npm"), ("nodejs", "npm"), optional=True)
POUCHDB = Need("PouchDB Server", ("node", "pouchdb-server"), (), optional=True, modules=("pouchdb-server@4.2.0",))
# Speaks DynamoDB's protocol; it comes with the Python packages.
MOTO = Need("Moto", (), ())

MAIN_LANE = (POSTGRESQL, PGBOUNCER, MARIADB, RABBITMQ, REDIS, AMQP_TOOLS, JAVA)
SLOW_LANE = (*MAIN_LANE, ACTIVEMQ, SPIN, NODE, POUCHDB)


def find(program: str) -> Path | None:
    """Where a program is installed: /usr/lib before PATH, whose entries may be wrappers that change user."""
    postgresql = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=_version, reverse=True)
    folders = [*map(str, postgresql), *EXTRA_FOLDERS, os.environ.get("PATH", os.defpath), str(node.programs())]
    found = shutil.which(program, path=os.pathsep.join(folders))
    return Path(found) if found else None


def path(program: str) -> str:
    """Where a program is, or FileNotFoundError."""
    found = find(program)
    if found is None:
        raise FileNotFoundError(f"{program} is not installed; `python -m tests.servers.install` can install it")
    return str(found)


def _version(folder: Path) -> int:
    return int(folder.parent.name) if folder.parent.name.isdigit() else 0
