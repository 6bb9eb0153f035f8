"""Private servers for tests: one keeper for all processes of a run, and it ends with the run.

`IDEMP_TEST_POSTGRESQL_URL`, `IDEMP_TEST_MARIADB_URL` and `IDEMP_TEST_MYSQL_URL` name servers of the user's instead: URLs of roles
that may create databases. Without the last one, tests of MySQL run its statements on MariaDB.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Client
from pathlib import Path

FOLDER = "IDEMP_TEST_KEEPER"


@contextmanager
def keeping() -> Iterator[None]:
    """Start the keeper of a run; its servers start at their first use."""
    with tempfile.TemporaryDirectory(prefix="idemp-keeper-") as folder:
        Path(folder).chmod(0o755)  # PostgreSQL refuses to run as root, and its own user has to reach its data
        os.environ[FOLDER] = folder
        command = [sys.executable, "-m", "tests.servers.keeper", folder]
        keeper = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
        assert keeper.stdin is not None
        assert keeper.stdout is not None
        try:
            assert keeper.stdout.readline() == b"ready\n"
            yield
        finally:
            keeper.stdin.close()  # it ends even if this process is killed
            keeper.stdout.close()
            keeper.wait(60)


def server(kind: str) -> str:
    """Return the URL of the server that all tests of a run share."""
    return os.environ.get(f"IDEMP_TEST_{kind.upper()}_URL") or ask(kind, "address")


def ask(kind: str, method: str, *arguments: object) -> str:
    """Call a method of a server that the keeper keeps."""
    with Client(str(Path(os.environ[FOLDER]) / "socket"), "AF_UNIX") as connection:
        connection.send((kind, method, arguments))
        answer, error = connection.recv()
    if error:
        raise RuntimeError(f"{kind}.{method}: {error}")
    return str(answer)
