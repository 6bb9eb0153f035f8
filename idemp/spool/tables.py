"""The spool's two tables, beside idemp's own under the same prefix. They are made by whoever spools first.

```
spool     (queue)              what the queue's spool holds: first offset kept, next offset, bytes
spooled   (spool, offset)      the messages
```
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import BigInteger, Column, Integer, LargeBinary, MetaData, String, Table, Text
from sqlalchemy.dialects import mysql

from idemp.inbox.sql.tables import DEFAULT_PREFIX, Moment, Tables

_COLLATION: Final = "utf8mb4_bin"  # names differ by case, as they do in Python
_NAME = String(255).with_variant(mysql.VARCHAR(255, collation=_COLLATION), "mysql", "mariadb")
_TEXT = Text().with_variant(mysql.LONGTEXT(collation=_COLLATION), "mysql", "mariadb")
_BODY = LargeBinary().with_variant(mysql.LONGBLOB(), "mysql", "mariadb")
_ON_MYSQL: Final[dict[str, Any]] = {
    f"{family}_{option}": value
    for family in ("mysql", "mariadb")
    for option, value in (("engine", "InnoDB"), ("charset", "utf8mb4"))
}


class SpoolTables:
    """The spool's tables under a schema and a prefix.

    Args:
        schema: database schema, `None` for the connection's default.
        prefix: as for idemp's other tables.
        home: the schema where the default was found to be.

    Raises:
        ConfigurationError: a prefix that is no plain identifier.

    Example:
        >>> SpoolTables(prefix="billing_").spooled.name
        'billing_spooled'
    """

    def __init__(self, schema: str | None = None, prefix: str = DEFAULT_PREFIX, home: str | None = None) -> None:
        Tables(schema, prefix)  # the names are checked there
        self.metadata = MetaData(schema=schema if schema is not None else home)
        self.spool = Table(
            f"{prefix}spool",
            self.metadata,
            Column("id", Integer, primary_key=True, autoincrement=True),
            Column("queue", _NAME, nullable=False, unique=True),
            Column("first_offset", BigInteger, nullable=False),
            Column("next_offset", BigInteger, nullable=False),
            Column("stored_bytes", BigInteger, nullable=False),
            **_ON_MYSQL,
        )
        self.spooled = Table(
            f"{prefix}spooled",
            self.metadata,
            Column("spool_id", Integer, primary_key=True, autoincrement=False),
            Column("offset", BigInteger, primary_key=True, autoincrement=False),
            Column("message_id", _TEXT),
            Column("type", _TEXT),
            Column("body", _BODY, nullable=False),
            Column("headers", _TEXT),
            Column("time", Moment),
            **_ON_MYSQL,
        )
