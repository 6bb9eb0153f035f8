"""What the tests of task queues and of FastStream share: a database in which changes are counted, and a parent of workers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.servers import ask
from tests.servers.databases import locked, query
from tests.worker.test_loop import wait_for

TABLES = (
    "CREATE TABLE changed (what TEXT)",
    "CREATE TABLE arrived (id TEXT, what TEXT)",
    "CREATE TABLE once (what TEXT UNIQUE DEFERRABLE INITIALLY DEFERRED)",
)

on_postgresql = pytest.mark.parametrize("kind", ["postgresql"], indirect=True)
every_broker = pytest.mark.parametrize("broker", ["rabbitmq", "redis"], indirect=True)
on_rabbitmq = pytest.mark.parametrize("broker", ["rabbitmq"], indirect=True)


@pytest.fixture
def broker(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of a virtual host of RabbitMQ, or of a database of Redis."""
    if request.param == "redis":
        yield ask("redis", "create_database")
        return
    url = ask("rabbitmq", "create_vhost")
    yield url
    ask("rabbitmq", "delete_vhost", url)


@pytest.fixture
def make_shop(request: pytest.FixtureRequest, url: str, broker: str, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Makes shops of the module of the test."""
    made: list[Any] = []

    def make_shop(database: str = url, **settings: object) -> Any:
        made.append(request.module.Shop(database, broker, tmp_path, **settings))
        return made[-1]

    for table in TABLES:
        query(url, table)
    yield make_shop
    for shop in made:
        shop.close()


class Service:
    """Processes that handle messages, their log, and their database."""

    def __init__(self, database: str, folder: Path) -> None:
        self.database, self.log = database, folder / "log"

    def changed(self) -> Counter[str]:
        return Counter(what for (what,) in query(self.database, "SELECT what FROM changed"))

    @contextmanager
    def locked(self, lock: int) -> Iterator[Callable[[int], None]]:
        """Hold a lock for which handlers wait; yield a function that waits until so many do."""
        with locked(self.database, lock) as waiting:
            yield lambda count: wait_for(lambda: waiting(count))


class Workers(Service):
    """Workers that are forked from one parent, which has imported everything; lines of input tell it what to do."""

    def __init__(self, module: str, database: str, folder: Path, environment: dict[str, str]) -> None:
        super().__init__(database, folder)
        self.environment, self.pids = {**os.environ, "IDEMP_DATABASE_URL": database, **environment}, list[int]()
        command, pipe = [sys.executable, "-m", module], subprocess.PIPE
        with self.log.open("ab") as log:
            self._parent = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, env=self.environment, text=True)

    def tell(self, *said: object) -> None:
        assert self._parent.stdin is not None
        print(*said, file=self._parent.stdin, flush=True)

    def pid(self) -> int:
        """Return the process id of a worker that the parent has started."""
        assert self._parent.stdout is not None
        return int(self._parent.stdout.readline())

    def close(self) -> None:
        self._parent.communicate()  # the end of its input ends it and its workers

    def arrived(self) -> dict[str, int]:
        """Return under how many ids each follow-up has arrived."""
        return dict(query(self.database, "SELECT what, count(DISTINCT id) FROM arrived GROUP BY what"))
