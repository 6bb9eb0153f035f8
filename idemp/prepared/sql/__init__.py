"""Prepared messages and barriers in SQL databases."""

from idemp.prepared.sql.barrier import SqlBarrier
from idemp.prepared.sql.home import SqlHome

__all__ = ["SqlBarrier", "SqlHome"]
