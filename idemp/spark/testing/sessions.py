"""A Spark session for tests: it starts fast, listens on this machine alone, and can have faults."""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from idemp.errors import ConfigurationError
from idemp.spark import require
from idemp.spark.testing import jvm
from idemp.spark.testing.plans import DRIVER, FAULTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pyspark.sql import SparkSession

LOOPBACK: Final[Mapping[str, str]] = {"SPARK_LOCAL_IP": "127.0.0.1", "SPARK_LOCAL_HOSTNAME": "127.0.0.1"}
"""The variables by which all of Spark's processes listen on loopback only."""

_QUIET: Final[Mapping[str, str]] = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.locality.wait": "0s",  # all hosts are this machine
    "spark.log.level": "ERROR",
    # What an executor held that was killed is not asked for again and again, every five seconds.
    "spark.shuffle.io.maxRetries": "1",
    "spark.shuffle.io.retryWait": "200ms",
    "spark.sql.shuffle.partitions": "2",
    # The default asks the program `readlink` about each file of a checkpoint, some 30 times for a micro-batch.
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    "spark.sql.session.timeZone": "UTC",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}

_END_SECONDS: Final = 60.0


@contextmanager
def local_session(
    folder: Path,
    *,
    master: str = "local[2,4]",
    options: Mapping[str, str] | None = None,
    cache: Path | None = None,
) -> Iterator[SparkSession]:
    """A session of this machine alone, stopped at the end; all that it writes lies in `folder`.

    It starts in half the time, because the classes that Spark loads come from an archive. The first session on a machine
    makes it, which takes half a minute once; while one process does that, others start without it.

    Args:
        folder: for its warehouse, scratch files and faults.
        master: by default two cores, and four attempts for each task, as a cluster gives it. `local-cluster[2,1,1024]` has
            executors that can be killed; the URL of a `standalone` cluster has hosts.
        options: further settings of Spark's.
        cache: where archives are kept; default `idemp/spark` in the user's cache folder.

    Raises:
        ConfigurationError: a package or Java is missing, or this process has a session already.
    """
    require()
    from pyspark.sql import SparkSession

    if SparkSession.getActiveSession() is not None:
        raise ConfigurationError(
            "This process has a Spark session already, and a process can have one.",
            fix="Stop that one first, or use it.",
        )
    with _environment(PYSPARK_PYTHON=sys.executable, **LOOPBACK):
        builder = SparkSession.builder.master(master).appName("idemp")
        for name, value in {**_settings(folder, cache), **(options or {})}.items():
            builder = builder.config(name, value)
        session = builder.getOrCreate()
        application = session.sparkContext.applicationId
        try:
            yield session
        finally:
            session.stop()
            _end_jvm()
            _clear_work(application)


def _settings(folder: Path, cache: Path | None) -> dict[str, str]:
    """Settings for the driver, and for Python workers wherever they are started."""
    flags = jvm.flags(cache)
    inherited = {
        FAULTS: str(folder / "faults"),
        "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path),
        **{name: value for name, value in os.environ.items() if name == DRIVER},
    }
    return {
        **_QUIET,
        "spark.driver.extraJavaOptions": flags,
        "spark.executor.extraJavaOptions": flags,
        "spark.local.dir": str(folder / "scratch"),
        "spark.python.daemon.module": "idemp.spark.testing.daemon",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        **{f"spark.executorEnv.{name}": value for name, value in inherited.items()},
    }


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Variables for the processes that Spark starts; afterwards they are as before."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _end_jvm() -> None:
    """PySpark keeps its JVM until the process ends; a test process may live on, and the next session wants another one."""
    from pyspark import SparkContext

    gateway: Any = SparkContext._gateway  # noqa: SLF001 - there is no public way
    SparkContext._gateway = SparkContext._jvm = None  # noqa: SLF001
    if gateway is None or gateway.proc is None:
        return
    gateway.shutdown()
    gateway.proc.stdin.close()  # which ends it
    gateway.proc.wait(_END_SECONDS)


def _clear_work(application: str) -> None:
    """A `local-cluster` keeps what its executors say inside of PySpark's own installation, for ever."""
    work = jvm.spark_home() / "work"
    shutil.rmtree(work / application, ignore_errors=True)
    with suppress(OSError):  # not there, or another session's
        work.rmdir()
