"""Handlers that look before they insert: what two workers would do that handle two messages at the same time.

Two messages that differ in nothing but what they are counted by are handled one after the other, and each alone. What the
second one does not insert once the first is there, it decided by looking. Then the first is handled, and what the second one
writes when it is alone is sent after it: as if both had looked before either wrote. A unique constraint stops that, so do
an UPDATE that does not find its row any more and a row that is locked while one looks.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import column, exc, insert, select, table

from idemp.broker.port import Delivery
from idemp.errors import MessageError
from idemp.testing.observing import Watch
from idemp.testing.variations import varied
from idemp.work import decode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Connection, TableClause

    from idemp.messages import Message
    from idemp.testing.harness import Harness
    from idemp.testing.observing import Seen
    from idemp.work import Work

_STEPS: Final = (1_000_003, 1, -1)
_LITERALS: Final = re.compile(r"'(?:[^']|'')*'|\b\d+(?:\.\d+)?\b")
_INSERT: Final = re.compile(r"""\s*INSERT\s+(?:\w+\s+)*?INTO\s+([\w."`]+)\s*\(([\w\s,"`]*)\)""", re.IGNORECASE)
_QUERY: Final = re.compile(r"\bSELECT\b", re.IGNORECASE)
_QUOTES: Final = ' "`\n\t'


@dataclass(frozen=True)
class _Write:
    """A statement that changes something.

    Attributes:
        rows: what it inserted, to be inserted again as it is; empty where the statement itself is sent again.
    """

    text: str
    values: Any
    matched: int
    rows: tuple[dict[str, Any], ...] = ()

    @property
    def inserts(self) -> bool:
        return self.text.lstrip().upper().startswith("INSERT")

    @property
    def form(self) -> str:
        """Its text, whatever values stand in it: a driver's own connection shows them."""
        return _LITERALS.sub("?", self.text)

    @property
    def target(self) -> TableClause | None:
        """The table and columns of an INSERT that takes its rows from a query, and so decides by itself."""
        found = _INSERT.match(self.text)
        if found is None or not _QUERY.search(self.text):
            return None
        *schema, name = (part.strip(_QUOTES) for part in found[1].split("."))
        names = [each.strip(_QUOTES) for each in found[2].split(",")]
        return table(name, *map(column, names), schema=schema[0] if schema else None)


def unguarded(harness: Harness, message: Message) -> str | None:
    """The INSERT that nothing holds off when two such messages are handled at the same time; `None` if there is none.

    Everything is rolled back.
    """
    works = next(_pairs(harness, message), None)
    if works is None:
        return None
    one, other = works
    with suppress(Exception):
        before, after = map(_writes, _handled(harness, one, other))
        there = {write.form for write in after}
        missing = [write for write in before if write.inserts and write.form not in there]
        if not missing:
            missing = [write for write in before if _is_held_off(harness, write, one, other)]
        if missing:
            (alone,) = _handled(harness, other)
            writes = [_with_rows(harness, write, other) for write in _writes(alone)]
            if not alone.locked and _race(harness, one, writes):
                return missing[0].text
    return None


def _is_held_off(harness: Harness, write: _Write, one: Work, other: Work) -> bool:
    """Whether an INSERT that takes its rows from a query finds some for the first message, and none for the second."""
    if write.target is None:
        return False
    first, second = _inserted(harness, write.target, one, other)
    return bool(first) and not second


def _with_rows(harness: Harness, write: _Write, work: Work) -> _Write:
    if write.target is None:
        return write
    (rows,) = _inserted(harness, write.target, work)
    return replace(write, rows=tuple(rows))


def _inserted(harness: Harness, target: TableClause, *works: Work) -> list[list[dict[str, Any]]]:
    """What handling these messages, one after the other, adds to a table; rolled back."""
    found = []
    with harness.store.begin() as unit:
        for work in works:
            before = _rows(unit.connection, target)
            _watched(harness, unit, work)
            added = _rows(unit.connection, target)
            for row in before:
                if row in added:
                    added.remove(row)
            found.append(added)
    return found


def _rows(connection: Connection, target: TableClause) -> list[dict[str, Any]]:
    return [dict(row) for row in connection.execute(select(*target.columns)).mappings()]


def _writes(seen: Seen) -> list[_Write]:
    return [_Write(text, values, matched) for (text, values), matched in zip(seen.writes, seen.matches, strict=True)]


def _handled(harness: Harness, *works: Work) -> list[Seen]:
    """One after the other, in a transaction that is rolled back."""
    with harness.store.begin() as unit:
        return [_watched(harness, unit, work) for work in works]


def _watched(harness: Harness, unit: Any, work: Work) -> Seen:
    watch, watching, before = Watch(), harness.watching, len(harness.executions)
    if unit._session is not None:  # noqa: SLF001 - the second finds what the first wrote, not what it holds
        unit.session.expire_all()
    harness.watching = watch.watching
    try:
        harness.process().run_handler(unit, work)
    finally:
        harness.watching = watching
        del harness.executions[before:]
    return watch.seen


def _race(harness: Harness, first: Work, writes: list[_Write]) -> bool:
    """Whether everything that the other one writes gets through after the first was handled."""
    with harness.store.begin() as unit:
        _watched(harness, unit, first)
        return all(_gets_through(unit.connection, write) for write in writes)


def _gets_through(connection: Connection, write: _Write) -> bool:
    try:
        with connection.begin_nested():
            if write.target is not None and write.rows:
                connection.execute(insert(write.target), list(write.rows))
                return True
            result = connection.exec_driver_sql(write.text, write.values)
    except exc.IntegrityError as error:
        # A foreign key to a row that was rolled back, under an id that the database counted up: no guard.
        return "foreign key" in str(error.orig).lower()
    return write.inserts or write.matched <= 0 or result.rowcount != 0


# Messages that differ in what they are counted by --------------------------------------------------------------------


def _pairs(harness: Harness, message: Message) -> Iterator[tuple[Work, Work]]:
    """A message and one that is counted by another id, but is about the same otherwise."""
    work = _decoded(harness, message)
    for copy in _copies(harness, message):
        other = _decoded(harness, copy)
        if work is not None and other is not None and work.effective != other.effective:
            yield work, other


def _decoded(harness: Harness, message: Message) -> Work | None:
    try:
        return decode(harness.process().consumer, Delivery(message=message, queue=""))
    except MessageError:
        return None


def _copies(harness: Harness, message: Message) -> Iterator[Message]:
    copy = replace(message, message_id=f"{message.message_id}-copy")
    yield copy
    for path in harness.registry.find(message).policy.key.fields:
        for step in _STEPS:
            with suppress(ValueError, LookupError, TypeError):
                body = json.loads(message.body)
                *parents, last = path.split(".")
                within = body
                for name in parents:
                    within = within[name]
                within[last] = varied(within[last], step)
                yield replace(copy, body=json.dumps(body).encode())
