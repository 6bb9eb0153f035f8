"""The process that keeps the run's servers."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import psutil
import pytest
from redis import Redis as RedisClient

from idemp.testing.processes import wait_until
from tests.servers import keeper
from tests.servers.fixtures import require
from tests.servers.redis import Redis

if TYPE_CHECKING:
    from collections.abc import Iterator

RUN = """
import sys
from tests.servers import keeper
from tests.servers.redis import Redis
with keeper.keeping():
    print(keeper.shared(Redis).port, keeper.shared(Redis).port, flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def cache() -> Iterator[Path]:
    """Where kept servers are nobody else's; a short path, for sockets have no long ones."""
    require(Redis)
    with TemporaryDirectory() as folder:
        yield Path(folder)
        end(Path(folder))


@pytest.fixture
def environment(cache: Path) -> dict[str, str]:
    return {**os.environ, "XDG_CACHE_HOME": str(cache)}


def start(environment: dict[str, str]) -> tuple[subprocess.Popen[str], int]:
    """A run, and the port of its Redis."""
    run = subprocess.Popen(
        [sys.executable, "-c", RUN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    )
    assert run.stdout is not None
    first, second = map(int, run.stdout.readline().split())
    assert first == second
    return run, first


def end(cache: Path) -> str:
    command = [sys.executable, "-m", "tests.servers.keeper", "--end"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout


def answers(port: int) -> bool:
    with closing(RedisClient(port=port, socket_timeout=5)) as client:
        try:
            return bool(client.ping())
        except ConnectionError:
            return False
        except Exception as error:
            return "Connection refused" not in str(error)


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True])
def test_servers_end_with_the_run(killed: bool, environment: dict[str, str]) -> None:
    run, port = start({**environment, keeper.KEEP: ""})
    with run:
        assert answers(port)
        if killed:
            run.kill()
    wait_until(lambda: not answers(port), "the server has ended")


@pytest.mark.slow
def test_kept_servers_are_those_of_the_next_run(environment: dict[str, str], cache: Path) -> None:
    ports = set()
    for _ in range(2):
        run, port = start({**environment, keeper.KEEP: "1"})
        with run:
            ports.add(port)
        assert answers(port)
    assert len(ports) == 1
    assert "none" not in end(cache)
    wait_until(lambda: not answers(port), "the server has ended")
    assert "none was running" in end(cache)


def test_server_that_does_not_start_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"Redis did not start: .*argument"):
        keeper.shared(Redis, "no such argument")


def test_a_copy_can_not_end_the_server(redis_server: Redis) -> None:
    if not isinstance(redis_server, Redis):
        pytest.skip("the user's own server")
    with pytest.raises(AttributeError):
        redis_server.kill()
    assert answers(redis_server.port)
    assert psutil.pid_exists(int(Path(os.environ[keeper.FOLDER], keeper.PID).read_text()))
