"""Install what the servers of the tests need: `python -m tests.servers.install`. A second run installs nothing."""

from __future__ import annotations

from tests.servers import postgresql, rabbitmq
from tests.servers.process import find

if __name__ == "__main__":
    find("initdb", "postgresql", postgresql.FOLDERS)
    find("pgbouncer", "pgbouncer")
    find("rabbitmq-server", "rabbitmq-server", str(rabbitmq.BIN))
