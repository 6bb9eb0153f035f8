"""Install what the servers of the tests need: `python -m tests.servers.install [java | node]`. A second run installs nothing."""

from __future__ import annotations

import sys

from tests.servers import java, postgresql, pouchdb, rabbitmq
from tests.servers.process import find

if __name__ == "__main__":
    if sys.argv[1:] == ["java"]:
        find("java", "default-jre-headless")
        find("activemq", "activemq", "/usr/share/activemq/bin")
        java.record_classes()
        sys.exit()
    if sys.argv[1:] == ["node"]:
        pouchdb.install()
        sys.exit()
    find("initdb", "postgresql", postgresql.FOLDERS)
    find("mariadbd", "mariadb-server")
    find("pgbouncer", "pgbouncer")
    find("rabbitmq-server", "rabbitmq-server", str(rabbitmq.BIN))
    find("redis-server", "redis-server")
