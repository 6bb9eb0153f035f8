"""The inbox in a SQL database."""

from idemp.inbox.sql.engine import create_engine_safely
from idemp.inbox.sql.store import SqlStore
from idemp.inbox.sql.streams import SqlStreams
from idemp.inbox.sql.tables import Tables, shared_tables

__all__ = ["SqlStore", "SqlStreams", "Tables", "create_engine_safely", "shared_tables"]
