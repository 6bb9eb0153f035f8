"""Spark sessions on one machine, the check for Java, and short errors for failed tasks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from idemp import errors
from idemp.errors import ConfigurationError, IdempError, needs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["GivenUp", "check_java", "given_up", "session"]

OLDEST: Final = 17
OURS: Final = re.compile(r"^idemp\.errors\.(\w+): (.+)$", re.MULTILINE)
OF_PYTHON: Final = re.compile(r"Traceback \(most recent call last\):\n(?:[ \t].*\n)+(\S.*)")
OF_JAVA: Final = re.compile(r"^Caused by: [\w.$]+: (.+)$", re.MULTILINE)


class GivenUp(IdempError):
    """Spark gave up a task after its last attempt. Earlier commits stay: run the job again.

    Example:
        >>> str(GivenUp("no space left"))
        'no space left'
    """


def session(name: str = "idemp", *, master: str | None = "local[*,4]", options: Mapping[str, str] | None = None) -> SparkSession:
    """Return a session of Spark: by default all cores of this machine, four attempts a task, UTC, loopback, no UI.

    Args:
        name: Name of the application.
        master: Spark's master, or the address of a server of Spark Connect (`sc://…`); None leaves it to `spark-submit`.
        options: Further options of Spark.

    Raises:
        ConfigurationError: PySpark, or a Java that it can use, is missing.

    Example:
        >>> def count() -> int:
        ...     with session("backfill") as spark:
        ...         return spark.read.parquet("archive").count()
    """
    with needs("spark"):
        from pyspark.sql import SparkSession
    if master is not None and master.startswith("sc://"):
        return _configured(SparkSession.builder.remote(master), {"spark.sql.session.timeZone": "UTC"} | dict(options or {}))
    check_java(os.environ)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    chosen = {"spark.sql.session.timeZone": "UTC", "spark.log.level": "ERROR"}
    if master is not None:
        chosen |= {"spark.master": master, "spark.ui.enabled": "false"}
        if master.startswith("local"):
            chosen["spark.sql.shuffle.partitions"] = str(4 * (os.cpu_count() or 1))
            os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
            chosen |= dict.fromkeys(("spark.driver.host", "spark.driver.bindAddress"), "127.0.0.1")
    return _configured(SparkSession.builder.appName(name), chosen | dict(options or {}))


def _configured(builder: SparkSession.Builder, options: Mapping[str, str]) -> SparkSession:
    for option, value in options.items():
        builder = builder.config(option, value)
    return builder.getOrCreate()


def check_java(environment: Mapping[str, str]) -> None:
    """Refuse a missing or too old Java, with which Spark would not start.

    Raises:
        ConfigurationError: Java is missing or too old.

    Example:
        >>> check_java({"JAVA_HOME": "/nowhere"})
        Traceback (most recent call last):
        idemp.errors.ConfigurationError: there is no Java in JAVA_HOME=/nowhere: Spark needs Java 17 or later (on Debian: ...)
    """
    home = environment.get("JAVA_HOME")
    where = f"in JAVA_HOME={home}" if home else "on the PATH"
    java = str(Path(home, "bin", "java")) if home else shutil.which("java", path=environment.get("PATH"))
    needed = f"Spark needs Java {OLDEST} or later (on Debian: apt install openjdk-17-jre-headless)"
    try:
        output = subprocess.run([java or "", "-version"], capture_output=True, text=True, timeout=60, check=True).stderr  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        raise ConfigurationError(f"there is no Java {where}: {needed}") from None
    version = re.search(r'version "(\d+)', output)
    if version is not None and int(version[1]) < OLDEST:
        raise ConfigurationError(f"the Java {where} is version {version[1]}: {needed}")


@contextmanager
def given_up() -> Iterator[None]:
    """Turn Spark's error about a failed task into the error that the task raised.

    Raises:
        IdempError: The task raised an error of idemp.
        GivenUp: The task raised another error.

    Example:
        >>> def count(frame: "DataFrame") -> int:
        ...     with given_up():
        ...         return frame.count()
    """
    from py4j.protocol import Py4JError
    from pyspark.errors import AnalysisException, PySparkException

    try:
        yield
    except AnalysisException as error:
        text = (error.getMessage() or str(error)).splitlines()[0]
        raise ConfigurationError(f"Spark cannot read the input: {text}; nothing was handled") from None
    except (PySparkException, Py4JError) as error:
        raise _meaning(str(error)) from error


def _meaning(account: str) -> IdempError:
    r"""Return the last error of idemp in the text of a Spark error, else the last one of Python, else of Java.

    Example:
        >>> _meaning("…\nidemp.errors.Unavailable: it is away\n  at org.apache…")
        Unavailable('it is away')
        >>> _meaning("…Traceback (most recent call last):\n  File …\nKeyError: 'sku'\n")
        GivenUp("Spark gave up: KeyError: 'sku'")
    """
    if ours := OURS.findall(account):
        kind = getattr(errors, ours[-1][0], GivenUp)
        return kind(ours[-1][1]) if issubclass(kind, IdempError) else GivenUp(ours[-1][1])
    texts = OF_PYTHON.findall(account) or OF_JAVA.findall(account) or [account.strip().splitlines()[0]]
    return GivenUp(f"Spark gave up: {texts[-1][:400]}")
