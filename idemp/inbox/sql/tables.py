"""The tables, as one `Tables` object per schema and prefix.

```
consumer, message_type, worker      names interned as small integers
broker                              the same for brokers, and which broker has the name
queue      (name, consumer)         which queues each consumer has, to refuse that another one takes over in silence
inbox      (consumer, message key)          the claim: written once, never updated; its key *is* the deduplication
output     (consumer, key, ordinal) what the handling produced: written once, in emission order
pending    (output)                 one row for each output without a confirm: inserted with it, deleted by the confirm
unfinished (consumer, message key)  handler starts without an end, of redelivered messages: a process that died in one
history                             appended in batches: confirms and redeliveries of a handling, for people
activity                            when a consumer was consuming: the retention window counts only that
identity                            which key each message type had, to refuse a silent change
daily      (consumer, first day)    which consumers keep ids that carry their time in tables of a day (PostgreSQL)
arrival    (token, number)          messages on their way from tasks of Spark's to one transaction; a crash may empty it
commit     (stream, number)         what handlings appended to event streams: written once; the message id is unique, too
unconfirmed (consumer, key, output) one row for each output of a commit without a confirm
prepared   (id)                     messages that wait for the fate of local work elsewhere; see `idemp.prepared`
barrier    (id)                     the fate of local work in this database: written with it, or by the checker
coordinator                         which inbox this is, in the names of transactions that it has other databases prepare
decision   (consumer, message key)  which attempt of a handling in several databases was committed, until all have done so
```

Such a day has an inbox, an output and a history of its own, a `Part`; so have ids that come after their day was dropped.
They inherit from the tables above, so that whoever reads those reads them all. See `idemp.inbox.sql.days`.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any, Final

from sqlalchemy import (
    DDL,
    Boolean,
    Column,
    Date,
    Index,
    Integer,
    MetaData,
    PrimaryKeyConstraint,
    SmallInteger,
    String,
    Table,
    UniqueConstraint,
    event,
    text,
)

from idemp.errors import ConfigurationError
from idemp.inbox.sql.column_types import BODY, FINGERPRINT, NAME, SERIAL, TEXT, KeyType, Moment

__all__ = ["DEFAULT_PREFIX", "KeyType", "Moment", "Part", "Tables", "shared_tables"]

DEFAULT_PREFIX: Final = "idemp_"
_PREFIX_PATTERN: Final = re.compile(r"[a-z_][a-z0-9_]{0,29}")
_PART_PATTERN: Final = re.compile(r"(inbox|output|history)_[0-9]+_(late|[0-9]{8})")


class Tables:
    """idemp's tables under a schema and a prefix of the user's choice, beside the user's own.

    Args:
        schema: database schema, `None` for the connection's default.
        prefix: lower-case letters, digits and underscores, at most 30.
        home: the schema where the default was found to be (see `idemp.inbox.sql.locating`), whatever its name.

    Attributes:
        schema: the schema that statements name.
        configured_schema: the same, unless it was only found.

    Raises:
        ConfigurationError: a prefix that is no plain identifier.

    Example:
        >>> Tables(prefix="billing_").inbox.name
        'billing_inbox'
    """

    def __init__(self, schema: str | None = None, prefix: str = DEFAULT_PREFIX, home: str | None = None) -> None:
        if not _PREFIX_PATTERN.fullmatch(prefix) or (schema is not None and not _PREFIX_PATTERN.fullmatch(schema)):
            raise ConfigurationError(
                f"Schema {schema!r} or prefix {prefix!r} is no plain identifier.",
                fix="Use lower-case letters, digits and underscores, at most 30, not starting with a digit.",
            )
        self.configured_schema = schema
        self.schema = schema if schema is not None else home
        self.prefix = prefix
        self.metadata = MetaData(schema=self.schema)
        self.consumer = self._table(
            "consumer",
            Column("id", Integer, primary_key=True, autoincrement=True),
            Column("name", NAME, nullable=False),
            Column("queue", NAME, nullable=True),  # the latest: the release before `queue` knows no more
            Column("purged_before", Moment, nullable=True),  # claims from before it may be gone; null: none ever went
            unique="name",
        )
        self.queue = self._table(
            "queue",
            Column("name", NAME, nullable=False),
            Column("consumer_id", Integer, nullable=False),
            Column("used_at", Moment, nullable=False),
            PrimaryKeyConstraint("name", "consumer_id", name=f"{prefix}queue_pkey"),
        )
        self.message_type = self._table(
            "message_type",
            Column("id", Integer, primary_key=True, autoincrement=True),
            Column("name", NAME, nullable=False),
            unique="name",
        )
        self.worker = self._table(
            "worker",
            Column("id", Integer, primary_key=True, autoincrement=True),
            Column("name", NAME, nullable=False),
            Column("started_at", Moment, nullable=False),
            Column("seen_at", Moment, nullable=True),  # null: retired
            Column("relay", Boolean, nullable=False),
            Column("broker_id", Integer, nullable=True),  # whose outputs its relay ships; null: the default broker's
            unique="name",
        )
        self.broker = self._table(
            "broker",
            Column("id", Integer, primary_key=True, autoincrement=True),
            Column("name", NAME, nullable=False),
            Column("identity", TEXT, nullable=True),  # null: no worker or relay has connected to it yet
            unique="name",
        )
        self.inbox = self._table(
            "inbox",
            Column("message_key", KeyType, nullable=False),
            Column("consumer_id", Integer, nullable=False),
            Column("type_id", Integer, nullable=False),
            Column("worker_id", Integer, nullable=True),
            Column("claimed_at", Moment, nullable=False),
            Column("fingerprint", FINGERPRINT, nullable=True),
            Column("original_id", NAME, nullable=True),  # the original id; null where it is the key's own text
            Column("source_position", NAME, nullable=True),  # of what was claimed in bulk
            PrimaryKeyConstraint("consumer_id", "message_key", name=f"{prefix}inbox_pkey"),
            # What the cleaner walks: each type has a window of its own. On PostgreSQL it is for statements about that time
            # alone: ANALYZE that meets nothing but the rows of a long transaction takes the table for empty, and then this
            # index looks as good as the primary key for finding an id.
            Index(
                f"{prefix}inbox_claimed_at",
                "consumer_id",
                "type_id",
                "claimed_at",
                postgresql_where=text("claimed_at IS NOT NULL"),
            ),
            sqlite_with_rowid=False,
        )
        self.output = self._table(
            "output",
            Column("output_id", KeyType, nullable=False),
            Column("message_key", KeyType, nullable=False),
            Column("consumer_id", Integer, nullable=False),
            Column("ordinal", Integer, nullable=False),
            Column("kind", String(8), nullable=False),
            Column("exchange", NAME, nullable=False),
            Column("routing_key", NAME, nullable=False),
            Column("envelope", TEXT, nullable=False),
            Column("body", BODY, nullable=False),
            PrimaryKeyConstraint("consumer_id", "message_key", "ordinal", name=f"{prefix}output_pkey"),
            sqlite_with_rowid=False,
        )
        self.pending = self._table(
            "pending",
            Column("output_id", KeyType, nullable=False),
            Column("message_key", KeyType, nullable=False),
            Column("consumer_id", Integer, nullable=False),
            Column("ordinal", Integer, nullable=False),
            Column("attempts", SmallInteger, nullable=False),
            Column(
                "due_at", Moment, nullable=False
            ),  # when a relay may take it (again): after the grace time, or a lease
            Column("quarantined_at", Moment, nullable=True),
            Column("reason", TEXT, nullable=True),
            # Of the attempts, those that the broker refused for the output's own sake; nobody has to fill it.
            Column("refusals", SmallInteger, nullable=False, server_default=text("0")),
            Column(
                "broker_id", Integer, nullable=True
            ),  # where it goes; null: to the default broker, or it is an effect
            PrimaryKeyConstraint("output_id", name=f"{prefix}pending_pkey"),
            Index(f"{prefix}pending_due_at", "due_at"),
            Index(f"{prefix}pending_key", "consumer_id", "message_key"),
            sqlite_with_rowid=False,
        )
        self.unfinished = self._table(
            "unfinished",
            Column("message_key", KeyType, nullable=False),
            Column("consumer_id", Integer, nullable=False),
            Column("starts", SmallInteger, nullable=False),
            Column("first_at", Moment, nullable=False),
            Column("last_at", Moment, nullable=False),
            Column("worker_id", Integer, nullable=False),  # of the last start
            PrimaryKeyConstraint("consumer_id", "message_key", name=f"{prefix}unfinished_pkey"),
            sqlite_with_rowid=False,
        )
        self.history = self._table(
            "history",
            Column("message_key", KeyType, nullable=False),
            Column("consumer_id", Integer, nullable=False),
            Column("worker_id", Integer, nullable=False),
            Column("at", Moment, nullable=False),
            Column("confirmed", Integer, nullable=False),
            Column("redelivered", Integer, nullable=False),
            PrimaryKeyConstraint("consumer_id", "message_key", "at", "worker_id", name=f"{prefix}history_pkey"),
            sqlite_with_rowid=False,
        )
        self.activity = self._table(
            "activity",
            Column("consumer_id", Integer, nullable=False),
            Column("started_at", Moment, nullable=False),
            Column("ended_at", Moment, nullable=False),
            PrimaryKeyConstraint("consumer_id", "started_at", name=f"{prefix}activity_pkey"),
        )
        self.identity = self._table(
            "identity",
            Column("id", SERIAL, primary_key=True, autoincrement=True),
            Column("consumer_id", Integer, nullable=False),
            Column("type_id", Integer, nullable=False),
            Column("descriptor", TEXT, nullable=False),
            Column("since", Moment, nullable=False),
            Column("ended_at", Moment, nullable=True),
        )
        self.daily = self._table(
            "daily",
            Column("consumer_id", Integer, nullable=False),
            Column("since", Date, nullable=False),
            Column("until", Date, nullable=False),  # this and the following end before the day that they name
            Column("dropped", Date, nullable=False),
            Column("made", Date, nullable=False),
            PrimaryKeyConstraint("consumer_id", "since", name=f"{prefix}daily_pkey"),
        )
        self.arrival = self._table(
            "arrival",
            Column("token", KeyType, nullable=False),  # of an attempt of a task
            Column("number", Integer, nullable=False),
            Column("messages", Integer, nullable=False),
            Column("arrived_at", Moment, nullable=False),
            Column("content", BODY, nullable=False),
            PrimaryKeyConstraint("token", "number", name=f"{prefix}arrival_pkey"),
        )
        self.commit = self._table(
            "commit",
            Column("stream", NAME, nullable=False),
            Column("number", Integer, nullable=False),
            Column("first_version", Integer, nullable=False),
            Column("message_key", KeyType, nullable=False),
            Column("consumer_id", Integer, nullable=False),
            Column("type_id", Integer, nullable=False),
            Column("committed_at", Moment, nullable=False),
            Column("fingerprint", FINGERPRINT, nullable=True),
            Column("original_id", NAME, nullable=True),
            Column("source_position", NAME, nullable=True),
            Column("outputs", TEXT, nullable=False),  # those that were published are the stream's events
            PrimaryKeyConstraint("stream", "number", name=f"{prefix}commit_pkey"),
            UniqueConstraint("consumer_id", "message_key", name=f"{prefix}commit_id_key"),
        )
        self.unconfirmed = self._table(
            "unconfirmed",
            Column("message_key", KeyType, nullable=False),
            Column("consumer_id", Integer, nullable=False),
            Column("output_id", KeyType, nullable=False),
            Column("committed_at", Moment, nullable=False),
            PrimaryKeyConstraint("consumer_id", "message_key", "output_id", name=f"{prefix}unconfirmed_pkey"),
            sqlite_with_rowid=False,
        )
        self.prepared = self._table(
            "prepared",
            Column("id", KeyType, nullable=False),
            Column("producer", NAME, nullable=False),
            Column("state", String(16), nullable=False),
            Column("prepared_at", Moment, nullable=False),
            Column("due_at", Moment, nullable=False),  # when a checker takes it next; in a final state, since when
            Column("checks", Integer, nullable=False),
            Column("attempts", Integer, nullable=False),
            Column("reason", TEXT, nullable=True),
            Column("fingerprint", FINGERPRINT, nullable=False),
            Column("kind", String(8), nullable=False),
            Column("exchange", NAME, nullable=False),
            Column("routing_key", NAME, nullable=False),
            Column("envelope", TEXT, nullable=False),
            Column("body", BODY, nullable=False),
            PrimaryKeyConstraint("id", name=f"{prefix}prepared_pkey"),
            Index(f"{prefix}prepared_due_at", "producer", "state", "due_at"),
        )
        self.barrier = self._table(
            "barrier",
            Column("id", KeyType, nullable=False),
            Column("reason", String(8), nullable=False),
            Column("passed_at", Moment, nullable=False),
            Column("settled_at", Moment, nullable=True),
            PrimaryKeyConstraint("id", name=f"{prefix}barrier_pkey"),
            Index(f"{prefix}barrier_settled_at", "settled_at"),
        )
        self.coordinator = self._table(
            "coordinator",
            Column("number", SmallInteger, nullable=False, autoincrement=False),  # 1: there is one
            Column("inbox", String(16), nullable=False),
            Column("since", Moment, nullable=False),
            PrimaryKeyConstraint("number", name=f"{prefix}coordinator_pkey"),
        )
        self.decision = self._table(
            "decision",
            Column("message_key", KeyType, nullable=False),
            Column("consumer_id", Integer, nullable=False),
            Column("token", String(16), nullable=False),
            Column("branches", TEXT, nullable=False),  # the databases, in the order of the branches' numbers
            Column("decided_at", Moment, nullable=False),
            PrimaryKeyConstraint("consumer_id", "message_key", name=f"{prefix}decision_pkey"),
            sqlite_with_rowid=False,
        )
        unlogged: Any = DDL("ALTER TABLE %(fullname)s SET UNLOGGED, ALTER COLUMN content SET STORAGE EXTERNAL")  # type: ignore[no-untyped-call]
        event.listen(self.arrival, "after_create", unlogged.execute_if(dialect="postgresql"))

    @property
    def version_table(self) -> str:
        """Where Alembic keeps the version of these tables, apart from the user's own migrations."""
        return f"{self.prefix}alembic_version"

    @property
    def names(self) -> frozenset[str]:
        """The names of all tables that belong to idemp, the version table included."""
        return frozenset({self.version_table, *(table.name for table in self.metadata.tables.values())})

    @property
    def interned(self) -> tuple[Table, ...]:
        """Those of names that stand for themselves elsewhere as a number: each name stands there once."""
        return self.consumer, self.message_type, self.worker, self.broker

    @property
    def unique(self) -> tuple[UniqueConstraint, ...]:
        """What is unique beside the primary keys."""
        tables = (*self.interned, self.commit)
        return tuple(key for table in tables for key in table.constraints if isinstance(key, UniqueConstraint))

    def part(self, name: str) -> Part:
        """The tables of a day, or of another part, of one consumer."""
        return Part(self, name)

    def is_ours(self, name: str) -> bool:
        """Whether a table of this name belongs to idemp, a part's included.

        Example:
            >>> Tables().is_ours("idemp_inbox_7_20261122"), Tables().is_ours("idemp_invoice")
            (True, False)
        """
        return name in self.names or _PART_PATTERN.fullmatch(name.removeprefix(self.prefix)) is not None

    def __repr__(self) -> str:
        return f"Tables(schema={self.schema!r}, prefix={self.prefix!r})"

    def _table(self, name: str, *parts: Any, unique: str | None = None, **options: Any) -> Table:
        if unique is not None:
            parts = (*parts, UniqueConstraint(unique, name=f"{self.prefix}{name}_{unique}_key"))
        options.update(
            mysql_engine="InnoDB", mariadb_engine="InnoDB", mysql_charset="utf8mb4", mariadb_charset="utf8mb4"
        )
        return Table(f"{self.prefix}{name}", self.metadata, *parts, **options)


@cache
def shared_tables(schema: str | None = None, prefix: str = DEFAULT_PREFIX, home: str | None = None) -> Tables:
    """The tables of these names, the same objects each time: an engine compiles a statement once for each of them.

    Raises:
        ConfigurationError: a prefix that is no plain identifier.

    Example:
        >>> shared_tables() is shared_tables()
        True
    """
    return Tables(schema, prefix, home)


class Part:
    """Claims, outputs and history of some of a consumer's ids, in tables of their own; what waits is with all others.

    Example:
        >>> Tables().part("7_20261122").inbox.name
        'idemp_inbox_7_20261122'
    """

    def __init__(self, tables: Tables, name: str) -> None:
        self.message_type = tables.message_type
        self.pending = tables.pending
        self.decision = tables.decision
        self.inbox, self.output, self.history = (
            table.to_metadata(MetaData(), name=f"{table.name}_{name}")
            for table in (tables.inbox, tables.output, tables.history)
        )
