"""Other databases by SQLAlchemy: prepared transactions on PostgreSQL, XA on MariaDB and MySQL."""

from idemp.twophase.sql.database import SqlDatabase
from idemp.twophase.sql.decisions import SqlDecisions
from idemp.twophase.sql.wiring import coordinator_of

__all__ = ["SqlDatabase", "SqlDecisions", "coordinator_of"]
