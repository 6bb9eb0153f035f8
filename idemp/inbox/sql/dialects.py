"""How each database claims: its statements, how long it waits, and how it proves that the transaction is the same.

| database | claim | a holder of the same id | proof |
|---|---|---|---|
| PostgreSQL | `INSERT … ON CONFLICT DO NOTHING RETURNING` | `lock_timeout`, set and reset by that statement | its id |
| SQLite | the same, under `BEGIN IMMEDIATE` | can't be: one writer at a time | savepoint |
| MariaDB | `INSERT IGNORE`, rows counted | `SET STATEMENT innodb_lock_wait_timeout` | savepoint |
| MySQL | `INSERT IGNORE`, rows counted | `SET SESSION innodb_lock_wait_timeout` around it | savepoint |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from idemp.errors import ConfigurationError
from idemp.inbox.sql.claim_mysql import MariadbDialect, MysqlDialect
from idemp.inbox.sql.claim_sqlite import SqliteDialect

if TYPE_CHECKING:
    from sqlalchemy.engine import Dialect as SqlAlchemyDialect

    from idemp.inbox.sql.claiming import ClaimDialect
    from idemp.inbox.sql.tables import Part, Tables


_MYSQL: Final = ("pymysql", "mysqldb", "mysqlconnector", "mariadbconnector")
_DRIVERS: Final = {"postgresql": ("psycopg",), "sqlite": ("pysqlite",), "mysql": _MYSQL, "mariadb": _MYSQL}


def dialect_for(dialect: SqlAlchemyDialect, tables: Tables | Part, *, without_returning: bool = False) -> ClaimDialect:
    """The claim dialect of an engine.

    Args:
        dialect: the engine's.
        tables: where the inbox lives, or some of its ids.
        without_returning: take MySQL's path on MariaDB, too.

    Raises:
        ConfigurationError: a database, or a driver, that idemp does not know.
    """
    check_driver(dialect)
    match dialect.name:
        case "postgresql":
            from idemp.inbox.sql.claim_postgresql import PostgresDialect  # psycopg is an extra

            return PostgresDialect(tables)
        case "sqlite":
            return SqliteDialect(tables)
    is_mariadb = getattr(dialect, "is_mariadb", False) and not without_returning
    return MariadbDialect(tables) if is_mariadb else MysqlDialect(tables)


def check_driver(dialect: SqlAlchemyDialect) -> None:
    """Check that idemp knows an engine's database and driver.

    Raises:
        ConfigurationError: it does not.
    """
    if dialect.driver not in _DRIVERS.get(dialect.name, ()):
        raise ConfigurationError(
            f"idemp does not know the database driver {dialect.name}+{dialect.driver}.",
            fix="Use postgresql+psycopg://, mysql+pymysql://, mariadb+pymysql:// or sqlite://.",
        )
