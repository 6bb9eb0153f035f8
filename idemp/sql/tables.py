"""The tables of idemp, by prefix.

All times are seconds since 1970 by the clock of the database. On SQLite the tables of `queue_metadata` live in a file of their own,
because a handler holds the only write lock of its file; elsewhere all tables are in one database.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    String,
    Table,
    Uuid,
)
from sqlalchemy.dialects.mysql import BINARY

__all__ = ["DEFAULT_PREFIX", "INNODB", "Tables"]

DEFAULT_PREFIX = "idemp_"
INNODB = {
    f"{name}_{option}": value
    for name in ("mysql", "mariadb")
    for option, value in {"engine": "InnoDB", "charset": "utf8mb4", "collate": "utf8mb4_bin"}.items()
}
"""Options of tables on MySQL and MariaDB, whose default collations take a name in capitals for the same one."""
NAME = 255  # characters of consumers, types, queues and ids


class Tables:
    """The tables of one installation.

    Args:
        prefix: Begins the name of each table.
        schema: Schema that holds them; the default one if it is None.

    Example:
        >>> Tables("shop_").inbox.name, Tables("shop_").message.metadata is Tables("shop_").inbox.metadata
        ('shop_inbox', False)
    """

    def __init__(self, prefix: str = DEFAULT_PREFIX, schema: str | None = None) -> None:
        self.prefix = prefix
        self.metadata, self.queue_metadata = MetaData(schema=schema), MetaData(schema=schema)
        self.version_table = f"{prefix}version"
        self.schema = schema
        big = BigInteger().with_variant(Integer(), "sqlite")
        name, blob = String(NAME), LargeBinary(2**24)
        moment: Double[float] = Double()
        digest = LargeBinary(16).with_variant(BINARY(16), "mysql", "mariadb")
        key = digest.with_variant(Uuid(), "postgresql")
        output_id = String(36).with_variant(Uuid(as_uuid=False), "postgresql")

        self.name = Table(
            f"{prefix}name",
            self.metadata,
            Column("id", Integer, primary_key=True, autoincrement=False),
            Column("kind", String(10), nullable=False),
            Column("name", name, nullable=False),
        )
        self.inbox = Table(
            f"{prefix}inbox",
            self.metadata,
            Column("consumer_id", Integer, primary_key=True, autoincrement=False),
            Column("message_key", key, primary_key=True),
            Column("type_id", Integer, nullable=False),
            Column("original_id", LargeBinary(4096), nullable=False),
            Column("fingerprint", digest),
            Column("claimed_at", moment, nullable=False),
            Column("worker", String(80), nullable=False),
            Index(f"{prefix}inbox_claimed", "consumer_id", "type_id", "claimed_at"),
            sqlite_with_rowid=False,
        )
        self.output = Table(
            f"{prefix}output",
            self.metadata,
            Column("consumer_id", Integer, primary_key=True, autoincrement=False),
            Column("message_key", key, primary_key=True),
            Column("ordinal", Integer, primary_key=True, autoincrement=False),
            Column("output_id", output_id, nullable=False),
            Column("kind", String(10), nullable=False),
            Column("exchange", name, nullable=False),
            Column("routing_key", name, nullable=False),
            Column("mandatory", Boolean, nullable=False),
            Column("delay", moment),
            Column("headers", blob, nullable=False),
            Column("body", blob, nullable=False),
            sqlite_with_rowid=False,
        )
        self.pending = Table(
            f"{prefix}pending",
            self.metadata,
            Column("output_id", output_id, primary_key=True),
            Column("consumer_id", Integer, nullable=False),
            Column("message_key", key, nullable=False),
            Column("ordinal", Integer, nullable=False),
            Column("due_at", moment, nullable=False),
            Column("attempts", SmallInteger, nullable=False, server_default="0"),
            Column("refusals", SmallInteger, nullable=False, server_default="0"),
            Column("quarantined_at", moment),
            Column("counts_at", moment),
            Column("reason", LargeBinary(4096)),
            Index(f"{prefix}pending_due", "due_at"),
            sqlite_with_rowid=False,
        )
        self.identity = Table(
            f"{prefix}identity",
            self.metadata,
            Column("consumer", name, primary_key=True),
            Column("type", name, primary_key=True),
            Column("descriptor", LargeBinary(4096), nullable=False),
            Column("retention", moment, nullable=False),
            Column("covers", LargeBinary(4096)),
            Column("covers_since", moment),
            Column("purged_before", moment),
        )
        self.branch = Table(
            f"{prefix}branch",
            self.metadata,
            Column("xid", String(64), primary_key=True),
            Column("name", name, nullable=False),
            Column("decided_at", moment, nullable=False),
            sqlite_with_rowid=False,
        )
        self.commit = Table(
            f"{prefix}commit",
            self.metadata,
            Column("stream", name, primary_key=True),
            Column("number", Integer, primary_key=True, autoincrement=False),
            Column("consumer_id", Integer, nullable=False),
            Column("message_key", key, nullable=False),
            sqlite_with_rowid=False,
        )
        self.snapshot = Table(
            f"{prefix}snapshot",
            self.metadata,
            Column("stream", name, primary_key=True),
            Column("fold", name, primary_key=True),
            Column("number", Integer, nullable=False),
            Column("state", blob, nullable=False),
            sqlite_with_rowid=False,
        )
        self.message = Table(
            f"{prefix}message",
            self.queue_metadata,
            Column("id", big, primary_key=True, autoincrement=True),
            Column("queue", name, nullable=False),
            Column("due_at", moment),
            Column("delay", moment),
            Column("holder", String(80)),
            Column("deliveries", Integer, nullable=False, server_default="0"),
            Column("attempts", SmallInteger, nullable=False, server_default="0"),
            Column("deaths", SmallInteger, nullable=False, server_default="0"),
            Column("digest", digest, unique=True),
            Column("headers", blob, nullable=False),
            Column("body", blob, nullable=False),
            Column("history", blob),
            Index(f"{prefix}message_due", "queue", "due_at", "id"),
            sqlite_autoincrement=True,
        )
        self.queue = Table(f"{prefix}queue", self.queue_metadata, Column("name", name, primary_key=True))
        self.binding = Table(
            f"{prefix}binding",
            self.queue_metadata,
            Column("exchange", name, primary_key=True),
            Column("pattern", name, primary_key=True),
            Column("queue", name, primary_key=True),
        )
        self.worker = Table(
            f"{prefix}worker",
            self.queue_metadata,
            Column("name", String(80), primary_key=True),
            Column("role", String(10), nullable=False),
            Column("seen_at", moment, nullable=False),
            Column("stopping", Boolean, nullable=False),
        )
        self.all = [table for metadata in (self.metadata, self.queue_metadata) for table in metadata.sorted_tables]
        fewer: dict[Table, tuple[str, ...]] = dict.fromkeys(
            (self.name, self.queue, self.binding, self.commit), ("SELECT", "INSERT")
        )
        fewer |= dict.fromkeys((self.output, self.branch), ("SELECT", "INSERT", "DELETE"))
        fewer |= dict.fromkeys((self.identity, self.snapshot), ("SELECT", "INSERT", "UPDATE"))
        self.rights = {table: fewer.get(table, ("SELECT", "INSERT", "UPDATE", "DELETE")) for table in self.all}
        """What a worker does to each table; rows are locked by a right to UPDATE."""
