"""How each database claims: its statements, how long it waits, and how it proves that the transaction is the same.

| database | claim | a holder of the same id | proof |
|---|---|---|---|
| PostgreSQL | `INSERT … ON CONFLICT DO NOTHING RETURNING` | `lock_timeout`, set and reset by that statement | its id |
| SQLite | the same, under `BEGIN IMMEDIATE` | can't be: one writer at a time | savepoint |
| MariaDB | `INSERT IGNORE`, rows counted | `SET STATEMENT innodb_lock_wait_timeout` | savepoint |
| MySQL | `INSERT IGNORE`, rows counted | `SET SESSION innodb_lock_wait_timeout` around it | savepoint |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from idemp.errors import ConfigurationError
from idemp.inbox.sql.claim_mysql import MariadbDialect, MysqlDialect
from idemp.inbox.sql.claim_sqlite import SqliteDialect

if TYPE_CHECKING:
    from sqlalchemy.engine import Dialect as SqlAlchemyDialect

    from idemp.inbox.sql.claiming import ClaimDialect
    from idemp.inbox.sql.tables import Part, Tables


def dialect_for(dialect: SqlAlchemyDialect, tables: Tables | Part, *, without_returning: bool = False) -> ClaimDialect:
    """The claim dialect of an engine.

    Args:
        dialect: the engine's.
        tables: where the inbox lives, or some of its ids.
        without_returning: take MySQL's path on MariaDB, too.

    Raises:
        ConfigurationError: a database, or a driver, that idemp does not know.
    """
    match dialect.name, dialect.driver:
        case "postgresql", "psycopg":
            from idemp.inbox.sql.claim_postgresql import PostgresDialect  # psycopg is an extra

            return PostgresDialect(tables)
        case "sqlite", "pysqlite":
            return SqliteDialect(tables)
        case (("mysql" | "mariadb"), "pymysql" | "mysqldb" | "mysqlconnector" | "mariadbconnector"):
            is_mariadb = getattr(dialect, "is_mariadb", False) and not without_returning
            return MariadbDialect(tables) if is_mariadb else MysqlDialect(tables)
    raise ConfigurationError(
        f"idemp does not know the database driver {dialect.name}+{dialect.driver}.",
        fix="Use postgresql+psycopg://, mysql+pymysql://, mariadb+pymysql:// or sqlite://.",
    )
