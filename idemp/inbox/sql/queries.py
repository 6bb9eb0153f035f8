"""What people ask about the inbox: lists, and the story of one message."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from sqlalchemy import Select, bindparam, exists, func, select

from idemp.inbox.sql.claiming import timed
from idemp.inbox.sql.due import told
from idemp.inbox.sql.erasing import DISCARDED, ERASED
from idemp.inbox.sql.liveness import FAR_PAST
from idemp.inbox.sql.short import Short

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from datetime import datetime
    from uuid import UUID

    from sqlalchemy import Connection, Engine

    from idemp.inbox.sql.tables import Tables

OutputState = Literal["confirmed", "pending", "quarantined", "discarded"]


@dataclass(frozen=True, slots=True)
class InboxRow:
    """A claim in a list. `original_id` is what a person would call the id."""

    consumer: str
    key: UUID
    original_id: str
    message_type: str
    claimed_at: datetime
    worker: str | None


@dataclass(frozen=True, slots=True)
class PendingRow:
    """An output without a confirm, in a list. `attempts` are those that are known to have been made."""

    output_id: UUID
    consumer: str
    key: UUID
    original_id: str
    message_type: str | None
    destination: str
    attempts: int
    due_at: datetime
    reason: str | None
    quarantined_at: datetime | None


@dataclass(frozen=True, slots=True)
class StoryOutput:
    """An output in the story of its input."""

    id: UUID
    ordinal: int
    kind: str
    destination: str
    message_type: str | None
    size: int
    erased: bool
    state: OutputState
    attempts: int = 0
    due_at: datetime | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """What one worker recorded about a handling at one time: outputs confirmed, redeliveries seen."""

    at: datetime
    confirmed: int
    redelivered: int
    worker: str | None


@dataclass(frozen=True, slots=True)
class Story:
    """All that the inbox knows about one message at one consumer."""

    claim: InboxRow
    outputs: tuple[StoryOutput, ...]
    history: tuple[HistoryEntry, ...]


class Queries:
    """Reads the inbox for people; nothing here is on a delivery's way.

    Example:
        >>> from idemp.inbox.sql.engine import create_engine_safely
        >>> from idemp.inbox.sql.schema import upgrade
        >>> from idemp.inbox.sql.tables import Tables
        >>> engine, tables = create_engine_safely("sqlite://"), Tables()
        >>> upgrade(engine, tables)
        >>> queries = Queries(engine, tables)
        >>> queries.list_inbox(limit=10), queries.list_pending()
        ([], [])
    """

    def __init__(self, engine: Engine, tables: Tables) -> None:
        self._short = Short(engine)
        self._tables = tables
        inbox, output, pending, history = tables.inbox, tables.output, tables.pending, tables.history
        consumer, kind, worker = tables.consumer, tables.message_type, tables.worker
        claims = (
            select(
                consumer.c.name.label("consumer"),
                inbox.c.message_key,
                inbox.c.original_id,
                kind.c.name.label("message_type"),
                inbox.c.claimed_at,
                worker.c.name.label("worker"),
                inbox.c.consumer_id,
            )
            .select_from(inbox)
            .join(consumer, consumer.c.id == inbox.c.consumer_id)
            .outerjoin(kind, kind.c.id == inbox.c.type_id)
            .outerjoin(worker, worker.c.id == inbox.c.worker_id)
        )
        newest = claims.order_by(inbox.c.claimed_at.desc()).limit(bindparam("limit"))
        self._pairs = (
            select(consumer.c.id, consumer.c.name, kind.c.id, kind.c.name)
            .select_from(
                consumer.join(
                    kind,
                    exists().where(inbox.c.consumer_id == consumer.c.id, inbox.c.type_id == kind.c.id, timed(inbox)),
                )
            )
            .order_by(consumer.c.id, kind.c.id)
        )
        self._newest = newest.where(
            inbox.c.consumer_id == bindparam("consumer"),
            inbox.c.type_id == bindparam("type"),
            inbox.c.claimed_at >= bindparam("since"),
        )
        waits = exists().where(
            pending.c.consumer_id == inbox.c.consumer_id, pending.c.message_key == inbox.c.message_key
        )
        self._newest_pending = self._newest.where(waits)
        self._by_keys = claims.where(inbox.c.message_key.in_(bindparam("keys", expanding=True))).order_by(
            inbox.c.claimed_at, consumer.c.name
        )
        # Through the names, so that the primary key (consumer first) is used where only the id is known.
        self._consumers = select(consumer.c.id, consumer.c.name)
        self._by_keys = self._by_keys.where(inbox.c.consumer_id.in_(bindparam("consumers", expanding=True)))
        self._outputs = (
            select(
                output.c.output_id,
                output.c.ordinal,
                output.c.kind,
                output.c.exchange,
                output.c.routing_key,
                output.c.envelope,
                func.length(output.c.body).label("size"),
                pending.c.output_id.label("waiting"),
                pending.c.attempts,
                pending.c.due_at,
                pending.c.reason,
                pending.c.quarantined_at,
            )
            .select_from(output.outerjoin(pending, pending.c.output_id == output.c.output_id))
            .where(output.c.consumer_id == bindparam("consumer"), output.c.message_key == bindparam("key"))
            .order_by(output.c.ordinal)
        )
        self._history = (
            select(history.c.at, history.c.confirmed, history.c.redelivered, worker.c.name.label("worker"))
            .select_from(history.outerjoin(worker, worker.c.id == history.c.worker_id))
            .where(history.c.consumer_id == bindparam("consumer"), history.c.message_key == bindparam("key"))
            .order_by(history.c.at)
        )
        waiting = (
            select(
                pending.c.output_id,
                consumer.c.name.label("consumer"),
                pending.c.message_key,
                inbox.c.original_id,
                kind.c.name.label("message_type"),
                output.c.exchange,
                output.c.routing_key,
                pending.c.attempts,
                pending.c.due_at,
                pending.c.reason,
                pending.c.quarantined_at,
            )
            .select_from(pending)
            .join(consumer, consumer.c.id == pending.c.consumer_id)
            .outerjoin(
                output,
                (output.c.consumer_id == pending.c.consumer_id)
                & (output.c.message_key == pending.c.message_key)
                & (output.c.ordinal == pending.c.ordinal),
            )
            .outerjoin(
                inbox, (inbox.c.consumer_id == pending.c.consumer_id) & (inbox.c.message_key == pending.c.message_key)
            )
            .outerjoin(kind, kind.c.id == inbox.c.type_id)
            .order_by(pending.c.due_at, pending.c.consumer_id, pending.c.message_key, pending.c.ordinal)
            .limit(bindparam("limit"))
        )
        named = consumer.c.name == bindparam("consumer")
        quarantined = pending.c.quarantined_at.is_not(None)
        self._waiting: dict[tuple[bool, bool], Select[Any]] = {
            (False, False): waiting,
            (True, False): waiting.where(named),
            (False, True): waiting.where(quarantined),
            (True, True): waiting.where(named, quarantined),
        }

    def list_inbox(
        self,
        consumer: str | None = None,
        message_type: str | None = None,
        *,
        limit: int = 50,
        since: datetime | None = None,
        pending_only: bool = False,
    ) -> list[InboxRow]:
        """The newest claims first; `pending_only` those with an output that waits for its confirm."""
        statement = self._newest_pending if pending_only else self._newest
        oldest = since or FAR_PAST

        def work(connection: Connection) -> list[Any]:
            rows: list[Any] = []
            for consumer_id, consumer_name, type_id, type_name in connection.execute(self._pairs).all():
                if consumer in {None, consumer_name} and message_type in {None, type_name}:
                    values = {"consumer": consumer_id, "type": type_id, "since": oldest, "limit": limit}
                    rows += connection.execute(statement, values).all()
            return rows

        rows = sorted(self._short.run(work), key=lambda row: row.claimed_at, reverse=True)
        return [_inbox_row(row) for row in rows[:limit]]

    def list_pending(
        self, consumer: str | None = None, *, quarantined_only: bool = False, limit: int = 50
    ) -> list[PendingRow]:
        """Outputs without a confirm, those that are due first, quarantined ones last."""
        statement = self._waiting[consumer is not None, quarantined_only]
        values = {"limit": limit, **({"consumer": consumer} if consumer is not None else {})}
        rows = self._short.run(lambda connection: connection.execute(statement, values).all())
        return [
            PendingRow(
                output_id=row.output_id,
                consumer=row.consumer,
                key=row.message_key,
                original_id=row.original_id or str(row.message_key),
                message_type=row.message_type,
                destination=_destination(row),
                attempts=_attempts(row),
                due_at=told(row.due_at),
                reason=row.reason,
                quarantined_at=row.quarantined_at,
            )
            for row in rows
        ]

    def stories(self, keys: Sequence[UUID], consumer: str | None = None) -> list[Story]:
        """What is known about these ids, at one consumer or at all; nothing about an id is known by no story."""

        def work(connection: Connection) -> list[Story]:
            consumers = [id_ for id_, name in connection.execute(self._consumers) if consumer in {None, name}]
            if not consumers or not keys:
                return []
            claims = connection.execute(self._by_keys, {"keys": list(keys), "consumers": consumers}).all()
            return [self._story(connection, claim) for claim in claims]

        return self._short.run(work)

    def _story(self, connection: Connection, claim: Any) -> Story:
        values = {"consumer": claim.consumer_id, "key": claim.message_key}
        history: Iterable[Any] = connection.execute(self._history, values)
        return Story(
            claim=_inbox_row(claim),
            outputs=tuple(_story_output(row) for row in connection.execute(self._outputs, values)),
            history=tuple(HistoryEntry(row.at, row.confirmed, row.redelivered, row.worker) for row in history),
        )


def _inbox_row(row: Any) -> InboxRow:
    return InboxRow(
        consumer=row.consumer,
        key=row.message_key,
        original_id=row.original_id or str(row.message_key),
        message_type=row.message_type,
        claimed_at=row.claimed_at,
        worker=row.worker,
    )


def _story_output(row: Any) -> StoryOutput:
    envelope = json.loads(row.envelope)
    state: OutputState = "discarded" if envelope.get(DISCARDED) else "confirmed"
    if row.waiting is not None:
        state = "pending" if row.quarantined_at is None else "quarantined"
    return StoryOutput(
        id=row.output_id,
        ordinal=row.ordinal,
        kind=row.kind,
        destination=_destination(row),
        message_type=envelope.get("type"),
        size=row.size,
        erased=bool(envelope.get(ERASED)),
        state=state,
        attempts=_attempts(row),
        due_at=told(row.due_at) if row.due_at is not None else None,
        reason=row.reason,
    )


def _attempts(row: Any) -> int:
    """Return how many attempts are known: the first one is counted when an output is stored, before it is sent."""
    return 0 if row.attempts is None or (row.attempts == 1 and row.reason is None) else int(row.attempts)


def _destination(row: Any) -> str:
    """The queue, or exchange and routing key."""
    return f"{row.exchange}/{row.routing_key}" if row.exchange else str(row.routing_key)
