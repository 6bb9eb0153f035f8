"""Faults for the tasks of a session, and proof that they happened."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from idemp.errors import ConfigurationError
from idemp.spark.testing.plans import DRIVER, FAULTS, Fault, Fired, Plan

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@contextmanager
def inject(session: SparkSession, *faults: Fault) -> Iterator[Callable[[], list[Fired]]]:
    """Have faults in the tasks of a session while the block runs; what was frozen is killed at its end.

    Args:
        session: one of `local_session`.
        faults: where several are due at the same place, the first one happens.

    Returns:
        A function that tells what happened so far: say how often, or the test proves nothing.

    Raises:
        ConfigurationError: the session is not one of `local_session`, or has nobody whom the fault could kill.

    Example:
        ```python
        with inject(spark, Fault("kill", "after commit", attempt=0)) as fired:
            run_pipeline(spark)
        assert len(fired()) == 1
        ```
    """
    plan = Plan.put(_folder(session, faults), faults)
    try:
        yield plan.fired
    finally:
        plan.lift()
        for each in plan.fired():
            if each.fault.how == "freeze":
                _end_if_frozen(each.place.pid)


def fired_in(folder: Path) -> list[Fired]:
    """What happened in the sessions on a folder, such as those of drivers that were killed.

    Args:
        folder: that of their `local_session`.

    Example:
        >>> fired_in(Path("/no/such/folder"))
        []
    """
    plans = sorted((folder / "faults").glob("*/plan.json"), key=lambda file: file.stat().st_mtime_ns)
    return [fired for file in plans for fired in Plan(file.parent).fired()]


def _folder(session: SparkSession, faults: tuple[Fault, ...]) -> Path:
    found = session.conf.get(f"spark.executorEnv.{FAULTS}", None)
    if found is None:
        raise ConfigurationError("This session has no place for faults.", fix="Make it with local_session().")
    hows = {fault.how for fault in faults}
    if "kill executor" in hows and str(session.sparkContext.master).startswith("local["):
        raise ConfigurationError(
            "Under this master the driver is the only executor.",
            fix='Use local_session(folder, master="local-cluster[2,1,1024]").',
        )
    if "kill driver" in hows and DRIVER not in os.environ:
        raise ConfigurationError("It would kill the test itself.", fix="Run the pipeline by run_driver().")
    return Path(found)


def _end_if_frozen(pid: int) -> None:
    """SIGKILL a worker that still stands still; its number may be another process's by now."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_STOPPED and "idemp.spark.testing.daemon" in process.cmdline():
            process.send_signal(signal.SIGKILL)
    except psutil.NoSuchProcess:
        return
