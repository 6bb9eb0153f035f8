"""Chunks of rows through the handlers of an app, against its inbox: backfills, replays, and adoption of messages handled earlier."""

from idemp.errors import needs

with needs("postgresql"):
    from idemp.bulk.core import Bulk
    from idemp.bulk.rows import Answer, Parked, Report, Row
    from idemp.bulk.sets import SqlSet

__all__ = ["Answer", "Bulk", "Parked", "Report", "Row", "SqlSet"]
