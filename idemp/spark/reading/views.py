"""What can be read of an inbox: columns by the names that Spark sees, and the statement for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Literal

from sqlalchemy import LargeBinary, Text, and_, cast, exists, false, func, literal_column, select, type_coerce

from idemp.errors import ConfigurationError
from idemp.findings import nearest
from idemp.inbox.sql.claiming import only

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement, FromClause, Select, Table

    from idemp.inbox.sql.names import NameKind
    from idemp.inbox.sql.tables import Part, Tables

_UUID_GROUPS: Final = ((1, 8), (9, 4), (13, 4), (17, 4), (21, 12))

Names = Mapping["NameKind", Mapping[int, str]]
"""The names behind interned numbers, by their kind."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Which rows are wanted; what is `None` restricts nothing.

    Attributes:
        consumers: of these consumers.
        types: of messages of these types.
        since: claimed at this moment or later.
        before: claimed before this one.
        pages: of a table of PostgreSQL's, from the first of these pages to before the second, which may be open.
    """

    consumers: tuple[str, ...] | None = None
    types: tuple[str, ...] | None = None
    since: datetime | None = None
    before: datetime | None = None
    pages: tuple[int, int | None] | None = None


@dataclass(frozen=True, slots=True)
class _Place:
    """The tables that a statement is about: those of all rows, or of one part; and how this database writes bytes."""

    tables: Tables | Part
    row: Table
    postgresql: bool


_Value = Callable[[_Place], "ColumnElement[Any]"]


@dataclass(frozen=True, slots=True)
class _Field:
    """A column.

    Attributes:
        type: as Spark writes it.
        value: its expression.
        joins: the table beside the row's own that it comes from.
        names: what kind of name the number stands for that `value` gives.
    """

    type: str
    value: _Value
    joins: Literal["inbox", "pending"] | None = None
    names: NameKind | None = None


@dataclass(frozen=True)
class View:
    """A table as Spark sees it.

    Attributes:
        name: as in the option `table`.
        about: what a row is, for people.
        fields: its columns, in order.
    """

    name: Literal["inbox", "output", "pending", "history", "unfinished"]
    about: str
    fields: Mapping[str, _Field] = field(repr=False)

    @property
    def schema(self) -> str:
        """Its columns, as Spark writes them.

        Example:
            >>> view_of("unfinished").schema
            'consumer STRING, message_key BINARY, starts INT, first_at TIMESTAMP, last_at TIMESTAMP, worker STRING'
        """
        return ", ".join(f"{name} {each.type}" for name, each in self.fields.items())

    @property
    def has_parts(self) -> bool:
        """Whether days have tables of their own for it."""
        return self.name in {"inbox", "output", "history"}

    def names(self, columns: Sequence[str], rows: Rows) -> set[NameKind]:
        """Which kinds of names one has to know to read these columns of these rows.

        Raises:
            ConfigurationError: it has no such column, or none by which the rows are chosen.
        """
        wanted = (rows.consumers is not None and "consumer", rows.types is not None and "type")
        bounds = (rows.since or rows.before) is not None and "claimed_at"
        needed = [*columns, *(name for name in (*wanted, bounds) if name)]
        for name in needed:
            if name not in self.fields:
                raise ConfigurationError(
                    f"The table {self.name!r} has no column {name!r}.", fix=nearest(name, self.fields)
                )
        return {kind for name in needed if (kind := self.fields[name].names) is not None}

    def statement(
        self,
        tables: Tables,
        part: str | None,
        columns: Sequence[str],
        rows: Rows,
        names: Names,
        *,
        postgresql: bool,
        alone: bool = False,
    ) -> Select[Any]:
        """The SELECT of these columns; names are still numbers in it.

        Args:
            tables: idemp's.
            part: the part that is read, `None` for the plain tables.
            columns: at least one.
            rows: which ones.
            names: of the kinds that `names` says.
            postgresql: whether it is for PostgreSQL.
            alone: leave out the parts of the plain tables.
        """
        of = tables if part is None else tables.part(part)
        place = _Place(of, self._row(tables, of), postgresql)
        wanted = [self.fields[name].value(place).label(name) for name in columns]
        conditions = [*self._conditions(place, rows, names)]
        used = {*columns, *(["claimed_at"] if rows.since or rows.before else []), *(["type"] if rows.types else [])}
        joins = sorted({join for name in used if (join := self.fields[name].joins) is not None})
        statement = select(*wanted).select_from(_joined(place, joins)).where(*conditions)
        if alone and self.has_parts:
            statement = only(statement, place.row)
            return only(statement, place.tables.inbox) if "inbox" in joins else statement
        return statement

    def _row(self, tables: Tables, of: Tables | Part) -> Table:
        table: Table = getattr(of if self.has_parts else tables, self.name)
        return table

    def _conditions(self, place: _Place, rows: Rows, names: Names) -> list[ColumnElement[bool]]:
        found: list[ColumnElement[bool]] = []
        for name, texts in (("consumer", rows.consumers), ("type", rows.types)):
            if texts is not None:
                each = self.fields[name]
                known = names[each.names or "consumer"]
                numbers = [number for number, text in known.items() if text in texts]
                found.append(each.value(place).in_(numbers) if numbers else false())
        if rows.since is not None:
            found.append(self.fields["claimed_at"].value(place) >= rows.since)
        if rows.before is not None:
            found.append(self.fields["claimed_at"].value(place) < rows.before)
        if rows.pages is not None:
            first, end = rows.pages
            place_of_row: ColumnElement[Any] = literal_column(f"{place.row.name}.ctid")
            found.append(place_of_row >= literal_column(f"CAST('({int(first)},0)' AS tid)"))
            if end is not None:
                found.append(place_of_row < literal_column(f"CAST('({int(end)},0)' AS tid)"))
        return found


def _joined(place: _Place, joins: Sequence[str]) -> FromClause:
    row = place.row
    found: FromClause = row
    for name in joins:
        other: Table = getattr(place.tables, name)
        if name == "pending":
            found = found.outerjoin(other, other.c.output_id == row.c.output_id)
        else:
            same = and_(other.c.consumer_id == row.c.consumer_id, other.c.message_key == row.c.message_key)
            found = found.outerjoin(other, same)
    return found


def _plain(name: str) -> _Value:
    return lambda place: place.row.c[name]


def _of_claim(name: str) -> _Value:
    return lambda place: place.tables.inbox.c[name]


def _of_pending(name: str) -> _Value:
    return lambda place: place.tables.pending.c[name]


def _key(name: str) -> _Value:
    def value(place: _Place) -> ColumnElement[Any]:
        column = place.row.c[name]
        return func.uuid_send(column, type_=LargeBinary) if place.postgresql else type_coerce(column, LargeBinary)

    return value


def _original_id(place: _Place) -> ColumnElement[Any]:
    """What a person would call the id: where it is not kept, the key's own text."""
    key = place.row.c.message_key
    if place.postgresql:
        return func.coalesce(place.row.c.original_id, cast(key, Text))
    digits = func.lower(func.hex(type_coerce(key, LargeBinary)), type_=Text)
    first, *others = (func.substr(digits, at, size, type_=Text) for at, size in _UUID_GROUPS)
    text: ColumnElement[Any] = first
    for group in others:
        text = text + "-" + group
    return func.coalesce(place.row.c.original_id, text)


def _waits(place: _Place) -> ColumnElement[Any]:
    inbox, pending = place.row.c, place.tables.pending.c
    return exists().where(pending.consumer_id == inbox.consumer_id, pending.message_key == inbox.message_key)


_CONSUMER: Final = _Field("STRING", _plain("consumer_id"), names="consumer")
_KEY: Final = _Field("BINARY", _key("message_key"))
_WORKER: Final = _Field("STRING", _plain("worker_id"), names="worker")

_VIEWS: Final[Mapping[str, View]] = {
    "inbox": View(
        "inbox",
        "a claim: one message that one consumer handled",
        {
            "consumer": _CONSUMER,
            "message_key": _KEY,
            "original_id": _Field("STRING", _original_id),
            "type": _Field("STRING", _plain("type_id"), names="message_type"),
            "claimed_at": _Field("TIMESTAMP", _plain("claimed_at")),
            "fingerprint": _Field("BINARY", _plain("fingerprint")),
            "source_position": _Field("STRING", _plain("source_position")),
            "worker": _WORKER,
            "pending": _Field("BOOLEAN", _waits),
        },
    ),
    "outputs": View(
        "output",
        "a message that a handling produced",
        {
            "consumer": _CONSUMER,
            "message_key": _KEY,
            "output_id": _Field("BINARY", _key("output_id")),
            "ordinal": _Field("INT", _plain("ordinal")),
            "kind": _Field("STRING", _plain("kind")),
            "exchange": _Field("STRING", _plain("exchange")),
            "routing_key": _Field("STRING", _plain("routing_key")),
            "envelope": _Field("STRING", _plain("envelope")),
            "body": _Field("BINARY", _plain("body")),
            "type": _Field("STRING", _of_claim("type_id"), joins="inbox", names="message_type"),
            "claimed_at": _Field("TIMESTAMP", _of_claim("claimed_at"), joins="inbox"),
            "pending": _Field("BOOLEAN", lambda at: at.tables.pending.c.output_id.is_not(None), joins="pending"),
            "quarantined": _Field("BOOLEAN", lambda at: at.tables.pending.c.quarantined_at.is_not(None), joins="pending"),
            "reason": _Field("STRING", _of_pending("reason"), joins="pending"),
        },
    ),
    "pending": View(
        "pending",
        "an output without a confirm; one that was given up has the time when it was quarantined; effects are due a million "
        "days later here than they are",
        {
            "consumer": _CONSUMER,
            "message_key": _KEY,
            "output_id": _Field("BINARY", _key("output_id")),
            "ordinal": _Field("INT", _plain("ordinal")),
            "attempts": _Field("INT", _plain("attempts")),
            "refusals": _Field("INT", _plain("refusals")),
            "due_at": _Field("TIMESTAMP", _plain("due_at")),
            "quarantined_at": _Field("TIMESTAMP", _plain("quarantined_at")),
            "reason": _Field("STRING", _plain("reason")),
        },
    ),
    "history": View(
        "history",
        "what one worker recorded about a handling at one time: outputs confirmed, redeliveries seen",
        {
            "consumer": _CONSUMER,
            "message_key": _KEY,
            "at": _Field("TIMESTAMP", _plain("at")),
            "confirmed": _Field("INT", _plain("confirmed")),
            "redelivered": _Field("INT", _plain("redelivered")),
            "worker": _WORKER,
        },
    ),
    "unfinished": View(
        "unfinished",
        "a handler that was started and did not end, of a message that was redelivered",
        {
            "consumer": _CONSUMER,
            "message_key": _KEY,
            "starts": _Field("INT", _plain("starts")),
            "first_at": _Field("TIMESTAMP", _plain("first_at")),
            "last_at": _Field("TIMESTAMP", _plain("last_at")),
            "worker": _WORKER,
        },
    ),
}  # fmt: skip


def view_of(name: str) -> View:
    """A table by the name that users give it.

    Raises:
        ConfigurationError: there is none of that name.

    Example:
        >>> view_of("outputs").about
        'a message that a handling produced'
    """
    if name not in _VIEWS:
        raise ConfigurationError(f"There is no table {name!r} to read.", fix=nearest(name, _VIEWS))
    return _VIEWS[name]


def markdown() -> str:
    """The tables of the reference page, from what is above.

    Example:
        >>> print(markdown().splitlines()[0])
        **`inbox`**: a claim: one message that one consumer handled
    """
    parts = []
    for name, view in _VIEWS.items():
        lines = [f"| `{column}` | {each.type.lower()} |" for column, each in view.fields.items()]
        parts.append("\n".join([f"**`{name}`**: {view.about}", "", "| column | type |", "|---|---|", *lines]))
    return "\n\n".join(parts) + "\n"
