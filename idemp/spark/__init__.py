"""The data pipeline on Spark, against the same inbox: a backfill skips messages that were handled online, and vice versa."""

from idemp.errors import needs

with needs("spark"):
    from idemp.spark.columns import Columns
    from idemp.spark.files import read_files
    from idemp.spark.lake import to_lake
    from idemp.spark.reading import Snapshot, read, snapshot
    from idemp.spark.reconcile import Gap, Reconciliation, reconcile
    from idemp.spark.session import session
    from idemp.spark.sink import Sink, Summary, sink

__all__ = [
    "Columns",
    "Gap",
    "Reconciliation",
    "Sink",
    "Snapshot",
    "Summary",
    "read",
    "read_files",
    "reconcile",
    "session",
    "sink",
    "snapshot",
    "to_lake",
]
