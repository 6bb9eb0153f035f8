"""PySpark's own daemon, which forks Python workers, with faults: `spark.python.daemon.module` names this module."""

from __future__ import annotations

import os
import runpy
from contextlib import suppress
from importlib import import_module
from typing import Final

# What a task of a pipeline imports, a second's work: here once, instead of in each worker that a fault makes anew. The
# threads of pyarrow and NumPy (jemalloc's, OpenBLAS's) are at rest, and both libraries make them again after a fork.
_NEEDED: Final = ("pyspark.worker", "pyarrow.compute", "pandas", "idemp.spark.task", "idemp.bulk.setwise", "psycopg")


def _import_early() -> None:
    for name in _NEEDED:
        with suppress(ModuleNotFoundError):  # a task that needs it will say so
            import_module(name)


if __name__ == "__main__":
    from idemp.spark.testing import injection

    _import_early()
    injection.install(executor=os.getppid())
    runpy.run_module("pyspark.daemon", run_name="__main__", alter_sys=True)
