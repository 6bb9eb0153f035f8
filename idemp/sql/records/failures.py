"""Retries and dead letters, by their rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final
from uuid import UUID

from sqlalchemy import ColumnElement, Delete, Update, and_, delete, select, update

from idemp.identity import name_number
from idemp.messages import read_history, read_properties
from idemp.sql.engine import Database

__all__ = ["DeadLetters", "FailedMessage", "read_failed"]

BATCH: Final = 500  # rows of one statement; databases limit its parameters


@dataclass(frozen=True)
class FailedMessage:
    """A retry or a dead letter, and why.

    Attributes:
        id: Number of its row.
        attempts: Runs that failed and count.
        times: Failures by the last rule in a row.
        due_at: When a worker takes it again, in seconds since 1970; None for a dead letter.
        holder: Worker that has it now.
        committed: Whether effects of the handler are committed although its outputs were not stored: replaying needs force.
        body: Empty where it was not asked for.

    Example:
        >>> FailedMessage(1, "billing", "shop.Pay", "7", "conflict", "Conflict: …", 0, 0, 1, 1, 5.0, False, {}, "{}", []).dead
        True
    """

    id: int
    queue: str
    type: str | None
    message_id: str | None
    rule: str
    error: str
    attempts: int
    deaths: int
    deliveries: int
    times: int
    at: float | None
    committed: bool
    properties: dict[str, Any]
    body: str
    history: list[dict[str, Any]]
    due_at: float | None = None
    holder: str | None = None

    @property
    def dead(self) -> bool:
        """Whether no worker takes it any more."""
        return self.due_at is None

    @property
    def original_ids(self) -> list[str]:
        """Ids that failed handlings read from it."""
        return [entry["id"] for entry in self.history if "id" in entry]

    @property
    def trace(self) -> str:
        """Traceback of the last failure."""
        return str(self.history[-1].get("trace", "")) if self.history else ""

    @property
    def failures(self) -> int:
        """How often it has failed, whether that counts or not."""
        return sum(entry["times"] for entry in self.history)

    @property
    def late(self) -> bool:
        """Whether claims of its age have been deleted: replaying needs force."""
        return self.rule == "late"

    def as_dict(self) -> dict[str, Any]:
        """Return all fields."""
        return asdict(self)

    def summary(self) -> dict[str, Any]:
        """Return what identifies it, and its last failure."""
        names = ("id", "queue", "type", "message_id", "due_at", "holder", "attempts", "rule", "error", "at")
        return {name: getattr(self, name) for name in (*names, "original_ids", "failures", "trace")}


class DeadLetters:
    """Dead letters of one database.

    Example:
        >>> DeadLetters(Database("sqlite:///shop.db")).database.tables.message.name
        'idemp_message'
    """

    def __init__(self, database: Database) -> None:
        self.database = database

    def find(
        self, ids: Sequence[int] = (), *, queue: str | None = None, limit: int = 100, retries: bool = False
    ) -> list[FailedMessage]:
        """Return dead letters, oldest first: those of the ids, else all of a queue or of all queues.

        Args:
            ids: Numbers of rows.
            queue: Name of a queue.
            limit: Rows at most.
            retries: Whether to return retries, too.
        """
        message = self.database.tables.message
        query = select(message).where(self._dead(ids, queue, retries=retries)).order_by(message.c.id).limit(limit)
        with self.database.queue_engine.connect() as connection:
            return [read_failed(row) for row in connection.execute(query)]

    def replay(self, letters: Sequence[FailedMessage]) -> int:
        """Make dead letters due, with fresh attempts; return how many.

        The claim of one whose handler committed is withdrawn, so its effects happen once more.
        """
        message, inbox = self.database.tables.message, self.database.tables.inbox
        letters = self._still_dead(letters)
        for letter in letters:
            if letter.committed:
                last = letter.history[-1]
                with self.database.short() as connection:
                    for consumer, key in last["claims"]:
                        ours = and_(
                            inbox.c.consumer_id == name_number("consumer", consumer),
                            inbox.c.message_key == self.database.dialect.key(UUID(key)),
                            inbox.c.worker == last["worker"],
                        )
                        connection.execute(delete(inbox).where(ours))
        with self.database.short(queues=True) as connection:
            for letter in letters:
                if letter.late:  # what an operator forces runs, however old it is
                    history = json.dumps([*letter.history[:-1], {**letter.history[-1], "forced": True}]).encode()
                    connection.execute(update(message).where(message.c.id == letter.id).values(history=history))
        fresh = {"due_at": self.database.dialect.now, "attempts": 0, "deaths": 0, "holder": None}
        return self._change(update(message).values(**fresh), letters)

    def _still_dead(self, letters: Sequence[FailedMessage]) -> list[FailedMessage]:
        """Return those that nobody has replayed since they were listed: the claim of another run must not be withdrawn."""
        message, still = self.database.tables.message, set()
        with self.database.queue_engine.connect() as connection:
            for start in range(0, len(letters), BATCH):
                dead = self._dead([letter.id for letter in letters[start : start + BATCH]], None)
                still |= {
                    (row.id, row.deliveries) for row in connection.execute(select(message.c.id, message.c.deliveries).where(dead))
                }
        return [letter for letter in letters if (letter.id, letter.deliveries) in still]

    def discard(self, letters: Sequence[FailedMessage]) -> int:
        """Delete dead letters for good; return how many."""
        return self._change(delete(self.database.tables.message), letters)

    def _change(self, statement: Update | Delete, letters: Sequence[FailedMessage]) -> int:
        changed = 0
        for start in range(0, len(letters), BATCH):
            dead = self._dead([letter.id for letter in letters[start : start + BATCH]], None)
            with self.database.short(queues=True) as connection:
                changed += connection.execute(statement.where(dead)).rowcount
        return changed

    def _dead(self, ids: Sequence[int], queue: str | None, *, retries: bool = False) -> ColumnElement[bool]:
        message = self.database.tables.message
        wanted: list[ColumnElement[bool]] = [message.c.history.is_not(None)]
        if not retries:
            wanted.append(message.c.due_at.is_(None))
        if ids:
            wanted.append(message.c.id.in_(ids))
        if queue is not None:
            wanted.append(message.c.queue == queue)
        return and_(*wanted)


def read_failed(row: Any) -> FailedMessage:
    """Return the retry or the dead letter of a row, with its body if that was selected.

    Example:
        >>> read_failed.__name__
        'read_failed'
    """
    history, properties = read_history(row.history), read_properties(row.headers)
    last: dict[str, Any] = history[-1] if history else {}
    type, message_id = (text if isinstance(text, str) else None for text in map(properties.get, ("type", "message_id")))
    return FailedMessage(
        row.id,
        row.queue,
        type,
        message_id,
        last.get("rule", "unknown"),
        last.get("error", ""),
        row.attempts,
        row.deaths,
        row.deliveries,
        last.get("times", 0),
        last.get("at"),
        bool(last.get("committed")),
        properties,
        getattr(row, "body", b"").decode("utf-8", "backslashreplace"),
        history,
        row.due_at,
        row.holder,
    )
