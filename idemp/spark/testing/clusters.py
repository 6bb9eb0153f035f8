"""A standalone cluster on this machine whose workers are different hosts, as speculation wants it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Final

from idemp.spark import require
from idemp.spark.testing import jvm
from idemp.testing.processes import Process, wait_until

SPECULATION: Final[Mapping[str, str]] = MappingProxyType(
    {
        "spark.speculation": "true",
        "spark.speculation.interval": "100ms",
        "spark.speculation.multiplier": "1.2",
        "spark.speculation.quantile": "0.3",
        "spark.speculation.minTaskRuntime": "200ms",
    }
)
"""Settings by which Spark starts a copy of a task that takes a little longer than the others, on another host."""


@contextmanager
def standalone(
    folder: Path, *, hosts: Sequence[str] = ("127.0.0.1", "127.0.0.2"), cores: int = 1, memory: str = "1g"
) -> Iterator[str]:
    """A master, and a worker on each host; all of them end with the block, and with this process.

    Linux answers on all of 127.0.0.0/8; elsewhere the second address has to be added to the loopback interface.

    Args:
        folder: for logs, and for what executors write.
        hosts: a loopback address for each worker.
        cores: of each worker.
        memory: of each worker, for its executors.

    Returns:
        The master's URL, for `local_session(folder, master=…)`.

    Raises:
        ConfigurationError: a package or Java is missing.
        TimeoutError: a process did not start; the error has its last words.

    Example:
        ```python
        with standalone(folder) as url, local_session(folder, master=url, options=SPECULATION) as spark:
            ...
        ```
    """
    require()
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        master = _started(
            stack, folder, "master", "127.0.0.1", "--host", "127.0.0.1", "--port", "0", "--webui-port", "0"
        )
        url = _told(master, r"Starting Spark master at (spark://\S+)")
        workers = [
            _started(
                stack, folder, f"worker-{number}", host, "--host", host, "--webui-port", "0", "--cores", str(cores),
                "--memory", memory, "--work-dir", str(folder / f"work-{number}"), url,
            )
            for number, host in enumerate(hosts)
        ]  # fmt: skip
        for worker in workers:
            _told(worker, r"Successfully registered with master (\S+)")
        yield url


def _started(stack: ExitStack, folder: Path, name: str, host: str, *arguments: str) -> Process:
    role = name.partition("-")[0]
    process = Process(folder / f"{name}.log")
    environment = {
        "SPARK_LOCAL_IP": host,  # the web pages listen here, too
        "SPARK_LOCAL_HOSTNAME": host,
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_DAEMON_JAVA_OPTS": jvm.flags(),
        "SPARK_NO_DAEMONIZE": "1",
    }
    program = f"org.apache.spark.deploy.{role}.{role.capitalize()}"
    command = [str(jvm.spark_home() / "bin" / "spark-class"), program, *arguments]
    process.start(command, cwd=folder, environment=environment)
    stack.callback(process.kill)
    return process


def _told(process: Process, pattern: str) -> str:
    """Wait for a line of its log, and answer what the pattern's group is."""
    found = re.compile(pattern)

    def there() -> bool:
        return found.search(process.log.read_text(errors="replace")) is not None

    def there_or_ended() -> bool:
        if not process.running:
            raise RuntimeError(f"A process of the cluster ended while it started:\n{process.log_tail()}")
        return there()

    wait_until(there_or_ended, pattern, seen=process.log_tail)
    match = found.search(process.log.read_text(errors="replace"))
    assert match is not None  # noqa: S101 - it was there
    return match[1]
