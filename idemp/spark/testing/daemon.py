"""PySpark's own daemon, which forks Python workers, with faults: `spark.python.daemon.module` names this module."""

from __future__ import annotations

import os
import runpy

if __name__ == "__main__":
    from idemp.spark.testing import injection

    injection.install(executor=os.getppid())
    runpy.run_module("pyspark.daemon", run_name="__main__", alter_sys=True)
