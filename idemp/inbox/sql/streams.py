"""Event streams in the user's own database: one row for each commit, whose keys tell a duplicate from a conflict.

The primary key is the stream and the commit's number: whoever comes second at a number has to look again. The message id is
unique beside it, in all streams of a consumer: whoever comes second with an id is a duplicate, whichever stream it names.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from contextlib import contextmanager
from datetime import timedelta
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal
from uuid import UUID

from sqlalchemy import Row, and_, bindparam, delete, exc, func, insert, select

from idemp.clock import Clock, SystemClock
from idemp.errors import CommitUnknown, StoreError, StoreUnavailable
from idemp.identity import EffectiveId
from idemp.inbox.port import Claim
from idemp.inbox.sql import failures
from idemp.inbox.sql.engine import shown
from idemp.inbox.sql.locating import located, made_once
from idemp.inbox.sql.names import Names
from idemp.inbox.sql.schema import check
from idemp.inbox.sql.short import Short
from idemp.inbox.sql.tables import Tables, shared_tables
from idemp.inbox.sql.translating import DENIED_TOLD
from idemp.inbox.stream.port import AlreadyCommitted, Commit, Found, Pending, WrongVersion
from idemp.messages import Output

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from datetime import datetime

    from sqlalchemy import Connection, Engine

    from idemp.inbox.port import Mark


class _Statements:
    def __init__(self, tables: Tables) -> None:
        commit, unconfirmed = tables.commit, tables.unconfirmed
        self.load = (
            select(commit)
            .where(commit.c.stream == bindparam("stream"), commit.c.number > bindparam("after"))
            .order_by(commit.c.number)
        )
        self.last = (
            select(commit).where(commit.c.stream == bindparam("stream")).order_by(commit.c.number.desc()).limit(1)
        )
        same: dict[str, Any] = {"consumer_id": bindparam("consumer_id"), "message_key": bindparam("message_key")}
        self.find = select(commit).where(*(commit.c[name] == value for name, value in same.items()))
        self.pending_of = select(unconfirmed.c.output_id).where(
            *(unconfirmed.c[name] == value for name, value in same.items())
        )
        self.confirm = delete(unconfirmed).where(
            *(unconfirmed.c[name] == value for name, value in same.items()),
            unconfirmed.c.output_id == bindparam("output_id"),
        )
        self.overdue = (
            select(commit, unconfirmed.c.output_id)
            .join_from(unconfirmed, commit, and_(*(unconfirmed.c[name] == commit.c[name] for name in same)))
            .where(
                unconfirmed.c.consumer_id.in_(bindparam("consumers", expanding=True)),
                unconfirmed.c.committed_at <= bindparam("before"),
            )
            .order_by(unconfirmed.c.committed_at, unconfirmed.c.consumer_id, unconfirmed.c.message_key)
            .limit(bindparam("limit"))
        )
        self.pending = select(func.count(), func.min(unconfirmed.c.committed_at))


class SqlStreams:
    """Streams in one SQL database. Safe to share between threads.

    Args:
        engine: any synchronous SQLAlchemy engine on PostgreSQL (psycopg), MariaDB, MySQL or SQLite.
        tables: where idemp's tables live.
        clock: source of time, for names that are stored.

    Example:
        >>> from idemp.inbox.sql.engine import create_engine_safely
        >>> from idemp.inbox.sql.schema import upgrade
        >>> engine = create_engine_safely("sqlite://")
        >>> upgrade(engine, Tables())
        >>> SqlStreams(engine).load("order-7")
        []
    """

    def __init__(self, engine: Engine, *, tables: Tables | None = None, clock: Clock | None = None) -> None:
        self.engine = engine
        self._configured_tables = tables or shared_tables()
        self._clock = clock or SystemClock()
        self._short = Short(engine)

    @made_once
    def tables(self) -> Tables:
        """The tables, with the schema that they are in."""
        return located(self.engine, self._configured_tables)

    @made_once
    def _names(self) -> Names:
        return Names(self.engine, self.tables, self._clock)

    @made_once
    def _sql(self) -> _Statements:
        return _Statements(self.tables)

    def __repr__(self) -> str:
        return f"SqlStreams({shown(self.engine)!r})"

    def load(self, stream: str, after: int = 0) -> Sequence[Commit]:
        """The commits of a stream with higher numbers than `after`."""
        with self._reading() as connection:
            rows = connection.execute(self._sql.load, {"stream": stream, "after": after}).all()
        return [self._commit(row) for row in rows]

    def last(self, stream: str) -> Commit | None:
        """The last commit of a stream, by the primary key."""
        with self._reading() as connection:
            row = connection.execute(self._sql.last, {"stream": stream}).first()
        return self._commit(row) if row is not None else None

    def find(self, stream: str, consumer: str, key: UUID) -> Found | None:
        """The commit of this id, in whatever stream."""
        del stream
        wanted = {"consumer_id": self._names.id("consumer", consumer), "message_key": key}
        with self._reading() as connection:
            row = connection.execute(self._sql.find, wanted).first()
            if row is None:
                return None
            pending = frozenset(connection.scalars(self._sql.pending_of, wanted))
        return Found(self._commit(row), pending)

    def append(self, commit: Commit, *, pending: bool) -> None:
        """Append a commit if its number is the next one and its id is new.

        Raises:
            AlreadyCommitted: its id is there, in whatever stream.
            WrongVersion: its number is taken.
            CommitUnknown: the answer of COMMIT was lost.
        """
        row, sent = self._row(commit), False
        waiting = [
            {name: row[name] for name in ("consumer_id", "message_key", "committed_at")} | {"output_id": output.id}
            for output in (commit.outputs if pending else ())
        ]
        try:
            with DENIED_TOLD, self._short.transaction() as connection:
                connection.execute(insert(self.tables.commit), row)
                if waiting:
                    connection.execute(insert(self.tables.unconfirmed), waiting)
                sent = True
        except exc.IntegrityError as error:
            raise self._meaning(commit, error) from error
        except StoreUnavailable as error:
            if not sent:
                raise
            raise CommitUnknown(
                f"The outcome of COMMIT is unknown: it has no answer that tells more: {error.message}"
            ) from error

    def confirm(self, marks: Sequence[Mark]) -> None:
        """What they say is confirmed no longer pends."""
        rows = [
            {
                "consumer_id": self._names.id("consumer", mark.claim.consumer),
                "message_key": mark.claim.id.key,
                "output_id": output,
            }
            for mark in marks
            for output in mark.confirmed
        ]
        if rows:
            rows.sort(key=itemgetter("message_key", "output_id"))  # so that no two wait for each other
            with DENIED_TOLD:
                self._short.run(lambda connection: connection.execute(self._sql.confirm, rows))

    def pending(self) -> Pending:
        """What waits for a confirm."""
        with self._reading() as connection:
            count, since = connection.execute(self._sql.pending).one()
        return Pending(count, since)

    def overdue(self, consumers: Collection[str], before: datetime, limit: int) -> Sequence[Found]:
        """Commits of whose outputs some pend, the oldest first."""
        ids = [self._names.id("consumer", consumer) for consumer in consumers]
        with self._reading() as connection:
            rows = connection.execute(self._sql.overdue, {"consumers": ids, "before": before, "limit": limit}).all()
        found: dict[tuple[int, UUID], Found] = {}
        for row in rows:
            id_ = (row.consumer_id, row.message_key)
            commit, pending = found.get(id_) or Found(self._commit(row))
            found[id_] = Found(commit, pending | {row.output_id})
        return list(found.values())

    def verify(self) -> None:
        """See that tables, keys and isolation are as the promises need them; see `idemp.inbox.sql.schema.check`."""
        check(self.engine, self.tables)

    def close(self) -> None:
        """Nothing is open; the engine is its owner's."""

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        try:
            with self.engine.connect() as connection:
                yield connection
        except exc.SQLAlchemyError as error:
            raise failures.translate(error) or failures.denied(error) or failures.refused(error) from error

    def _meaning(self, commit: Commit, error: exc.IntegrityError) -> StoreError:
        """Which of the two keys was violated. The database tells of one: a number may have been taken by this very id."""
        violated = _violated(error, self.tables)
        if violated == "number" and self.find(commit.stream, commit.claim.consumer, commit.claim.id.key) is None:
            return WrongVersion.of(commit)
        return failures.refused(error) if violated is None else AlreadyCommitted.of(commit)

    def _row(self, commit: Commit) -> dict[str, Any]:
        claim = commit.claim
        return {
            "stream": commit.stream,
            "number": commit.number,
            "first_version": commit.first_version,
            "consumer_id": self._names.id("consumer", claim.consumer),
            "type_id": self._names.id("message_type", claim.message_type),
            "message_key": claim.id.key,
            "committed_at": commit.committed_at,
            "fingerprint": claim.fingerprint,
            "original_id": None if claim.id.text == str(claim.id.key) else claim.id.text,
            "source_position": claim.position,
            "outputs": json.dumps([_encoded(output) for output in commit.outputs]),
        }

    def _commit(self, row: Row[Any]) -> Commit:
        claim = Claim(
            consumer=self._names.name("consumer", row.consumer_id),
            id=EffectiveId(row.message_key, row.original_id or str(row.message_key)),
            message_type=self._names.name("message_type", row.type_id),
            fingerprint=None if row.fingerprint is None else bytes(row.fingerprint),
            wait=timedelta(0),
            position=row.source_position,
            entity=row.stream,
        )
        return Commit(
            stream=row.stream,
            number=row.number,
            first_version=row.first_version,
            claim=claim,
            committed_at=row.committed_at,
            outputs=tuple(_decoded(ordinal, each) for ordinal, each in enumerate(json.loads(row.outputs))),
        )


def _violated(error: exc.IntegrityError, tables: Tables) -> Literal["number", "id"] | None:
    """Which key of the table of commits, as the driver tells it; `None` for another constraint."""
    commit, original = tables.commit, error.orig
    name = getattr(getattr(original, "diag", None), "constraint_name", None)  # of psycopg
    if name is None:
        # The words of MySQL's family end with the key, behind values that may be anything; SQLite's are its columns.
        words = str(original.args[-1]) if original is not None else ""
        name = words.rpartition(" for key ")[2].strip("'").rpartition(": ")[2].removeprefix(f"{commit.name}.")
    if name in {commit.primary_key.name, "PRIMARY", f"stream, {commit.name}.number"}:
        return "number"
    return "id" if name in {f"{commit.name}_id_key", f"consumer_id, {commit.name}.message_key"} else None


def _encoded(output: Output) -> dict[str, Any]:
    """An output as JSON that people can read: bodies are text where they can be."""
    try:
        body = {"body": output.message.body.decode()}
    except UnicodeDecodeError:
        body = {"base64": b64encode(output.message.body).decode()}
    place = {"id": str(output.id), "kind": output.kind.value, "exchange": output.exchange, "key": output.routing_key}
    return {**place, "envelope": json.loads(output.envelope()), **body}


def _decoded(ordinal: int, kept: dict[str, Any]) -> Output:
    body = b64decode(kept["base64"]) if "base64" in kept else kept["body"].encode()
    return Output.restored(
        UUID(kept["id"]), ordinal, kept["kind"], kept["exchange"], kept["key"], json.dumps(kept["envelope"]), body
    )
