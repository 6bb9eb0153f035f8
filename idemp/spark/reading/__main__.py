"""The process that holds a snapshot: `idemp.spark.reading.snapshots.hold` starts it."""

from __future__ import annotations

import sys

from idemp.spark.reading.snapshots import serve

if __name__ == "__main__":
    serve(sys.stdin, sys.stdout)
