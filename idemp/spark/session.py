"""The Spark session of a command."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from idemp.spark import require

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pyspark.sql import SparkSession

_EVERYWHERE: Final[Mapping[str, str]] = {
    "spark.sql.session.timeZone": "UTC",
    "spark.log.level": "ERROR",
    "spark.ui.showConsoleProgress": "false",
}
_SUBMITTED: Final = "PYSPARK_GATEWAY_PORT"  # set by spark-submit
_LOCAL: Final = "local[*,4]"  # all cores, and four attempts for each task, as a cluster gives it
_HERE: Final[Mapping[str, str]] = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.ui.enabled": "false",
}


@contextmanager
def session(name: str, *, master: str | None = None, conf: Mapping[str, str] | None = None) -> Iterator[SparkSession]:
    """A session for the time of a block: of `spark-submit` where that started us, of a master, else of this machine alone.

    Where there is one already, as in a notebook, it is that one, and it stays.

    Args:
        name: of the application, for Spark's own pages.
        master: Spark's, such as `spark://host:7077`.
        conf: further settings of Spark's; they win.

    Raises:
        ConfigurationError: a package or Java is missing.
    """
    require()
    from pyspark.sql import SparkSession

    existing = SparkSession.getActiveSession()
    if existing is not None:
        yield existing
        return
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(name)
    for key, value in {**_EVERYWHERE, **_where(master), **(conf or {})}.items():
        builder = builder.config(key, value)
    made = builder.getOrCreate()
    try:
        yield made
    finally:
        made.stop()


def _where(master: str | None) -> Mapping[str, str]:
    """Settings that say where it runs; on this machine it listens to nobody else."""
    if master is None and _SUBMITTED in os.environ:
        return {}
    master = master or _LOCAL
    return {"spark.master": master, **(_HERE if master.startswith("local") else {})}
