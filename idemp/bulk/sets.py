"""Handlers that take all new rows of a chunk at once: as SQL over a relation, or as a function of an Arrow table.

Each is an ordinary batch handler: what it does belongs to the transaction of the claims, and what it emits gets the ids
that a handler of single messages would have given it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Protocol

from idemp.errors import ConfigurationError, OutputError

if TYPE_CHECKING:
    import pyarrow as pa
    from sqlalchemy import Connection, Insert, Table

    from idemp.context import BatchContext
    from idemp.inbox.sql.sets_postgresql import SetUnit
    from idemp.work import Consumer

FRESH: Final = "{fresh}"
RELATION: Final = "idemp_rows"
SERVER_RELATION: Final = "idemp_fresh"
_NEEDED: Final = {"place", "type", "body"}
_KNOWN: Final = {*_NEEDED, "queue", "headers"}


class SetHandler(Protocol):
    """What handles all new rows of a type at once."""

    def handle(self, messages: list[Any], ctx: BatchContext) -> None:
        """Write the effects of all of them, and emit through the context of each."""
        ...


@dataclass(frozen=True, kw_only=True)
class SqlSet:
    """Effects and outputs as SQL over the new rows.

    `{fresh}` stands for a relation with a row for each new message: `place` (its number), `id`, `body` (bytes),
    `payload` (the body as JSON: `jsonb` on PostgreSQL, text elsewhere), `headers` (text) and `time`.

    Args:
        effects: statements that are run one after the other, as they stand: they are code, never made of users' input.
        outputs: a SELECT with a row for each output: `place` of the message that it follows from, its `type`, its `body` as
            JSON, and where need be `queue` (to send it there; else it is published) and `headers` (JSON). Say ORDER BY where
            a message has several: the first one is output 0.

    Raises:
        ConfigurationError: a statement does not mention `{fresh}`.

    Example:
        >>> SqlSet(
        ...     effects=["INSERT INTO stock (sku) SELECT payload ->> 'sku' FROM {fresh}"],
        ...     outputs="SELECT place, 'stock.Reserved' AS type, payload AS body FROM {fresh}",
        ... ).statements(RELATION)
        ["INSERT INTO stock (sku) SELECT payload ->> 'sku' FROM idemp_rows"]
    """

    effects: Sequence[str] = ()
    outputs: str | None = None

    def __post_init__(self) -> None:
        for statement in (*self.effects, *([self.outputs] if self.outputs else [])):
            if FRESH not in statement:
                raise ConfigurationError(
                    f"A statement does not mention {FRESH}: {statement!r}.",
                    fix="It would see no new row: select from {fresh}.",
                )

    def statements(self, relation: str) -> list[str]:
        """The effects, over a relation of that name."""
        return [statement.replace(FRESH, relation) for statement in self.effects]

    def handle(self, messages: list[Any], ctx: BatchContext) -> None:
        """Fill the relation, run the statements, emit what they select."""
        del messages
        connection = ctx.connection
        _fill(connection, ctx)
        for statement in self.statements(RELATION):
            run(connection, statement)
        if self.outputs:
            outputs = self.outputs.replace(FRESH, RELATION)
            if connection.dialect.name == "postgresql":
                outputs = as_text(outputs, names_of(connection, outputs))
            # Closed whatever comes of it: a SELECT that is left halfway keeps SQLite's tables locked after the rollback.
            with run(connection, outputs) as found:
                check_outputs(found.keys())
                emit(ctx, found.mappings())

    def handle_staged(
        self, unit: SetUnit, consumer: Consumer, due: datetime | None, fresh: Callable[[], pa.Table]
    ) -> int:
        """The same for rows that the server has: they never leave it; how many outputs were stored."""
        del fresh
        unit.run_statements(self.statements(SERVER_RELATION))
        if not self.outputs:
            return 0
        return unit.store_selected(self.outputs.replace(FRESH, SERVER_RELATION), consumer, due)

    def fits(self, unit: SetUnit) -> bool:
        """Whether what it emits can be stored without leaving the server."""
        return not self.outputs or unit.can_store(self.outputs.replace(FRESH, SERVER_RELATION))


@dataclass(frozen=True)
class ArrowSet:
    """A function of an Arrow table with the columns of `SqlSet`'s relation, but for `payload`.

    Args:
        function: gets the table and a `BatchContext`, writes effects through the latter, and answers `None` or a table of
            outputs with the columns that `SqlSet.outputs` selects. One that asks for `BatchContext.each`, or answers
            headers, has its rows made into objects for that: it is called again, with a transaction of its own.

    Example:
        >>> ArrowSet(lambda table, ctx: None).function(None, None) is None
        True
    """

    function: Callable[[pa.Table, BatchContext], pa.Table | None]

    def handle(self, messages: list[Any], ctx: BatchContext) -> None:
        """Call the function, and emit what it answers."""
        del messages
        import pyarrow as pa

        columns: dict[str, pa.DataType] = {
            "place": pa.int64(), "id": pa.string(), "body": pa.binary(), "headers": pa.string(),
            "time": pa.timestamp("us", tz="UTC"),
        }  # fmt: skip
        outputs = self.function(pa.Table.from_pylist(_rows(ctx), schema=pa.schema(list(columns.items()))), ctx)
        if outputs is not None:
            check_outputs(outputs.column_names)
            emit(ctx, outputs.to_pylist())

    def handle_staged(
        self, unit: SetUnit, consumer: Consumer, due: datetime | None, fresh: Callable[[], pa.Table]
    ) -> int:
        """The same for rows that were never anything but a table; how many outputs were stored.

        Raises:
            RowByRow: the function asks for what there is row by row only.
        """
        from idemp.bulk.emitting import SetContext, as_copy

        context = SetContext(unit)
        outputs = self.function(fresh(), context)
        context.check()
        if outputs is None:
            return 0
        check_outputs(outputs.column_names)
        unit.copy_outputs(as_copy(outputs))
        return unit.store_copied(consumer, due)

    def fits(self, unit: SetUnit) -> bool:
        """Whether what it emits can be stored so: that is seen when it has."""
        del unit
        return True


def check_outputs(names: Iterable[str]) -> None:
    """See that outputs have the columns that they need.

    Raises:
        OutputError: some are missing, or mean nothing.

    Example:
        >>> check_outputs(["place", "type", "body", "queue"])
    """
    missing, strange = sorted(_NEEDED - set(names)), sorted(set(names) - _KNOWN)
    if missing or strange:
        raise OutputError(
            f"Outputs of a set handler have the columns {', '.join(sorted(names))}.",
            fix=f"Name them: {', '.join(sorted(_NEEDED))}; and queue and headers where they are needed.",
        )


def emit(ctx: BatchContext, rows: Iterable[Mapping[str, Any]]) -> None:
    """Emit outputs, each by the context of its message.

    Raises:
        OutputError: one belongs to no message, or is none.
    """
    for row in rows:
        place = row["place"]
        if place is None or not 0 <= place < len(ctx.each):
            raise OutputError(
                f"An output belongs to the place {place}, where no message is.", fix="Select place as it is."
            )
        headers = row.get("headers")
        ctx.each[place].emit_encoded(
            _octets(row["body"]),
            type=row["type"],
            to=row.get("queue"),
            headers=json.loads(headers) if headers is not None else None,
        )


def run(connection: Connection, statement: str) -> Any:
    """Run the user's own statement as it stands: nothing in it is a parameter."""
    return connection.exec_driver_sql(statement, execution_options={"no_parameters": True})


def as_text(outputs: str, names: Iterable[str]) -> str:
    """A SELECT of outputs with these columns on PostgreSQL, whose bodies and headers are texts, whatever kind of JSON.

    Example:
        >>> as_text("SELECT 0 AS place, 'a.B' AS type, payload AS body FROM f", ["place", "type", "body"])
        "SELECT place, type, body::text AS body FROM (SELECT 0 AS place, 'a.B' AS type, payload AS body FROM f) AS output"
    """
    columns = ", ".join(f"{name}::text AS {name}" if name in {"body", "headers"} else name for name in names)
    return f"SELECT {columns} FROM ({outputs}) AS output"


def names_of(connection: Connection, outputs: str) -> list[str]:
    """The columns that a SELECT has; none of its rows is read."""
    return list(run(connection, f"SELECT * FROM ({outputs}) AS output WHERE 1 = 0").keys())


def _octets(body: Any) -> bytes:
    if isinstance(body, str):
        return body.encode()
    if isinstance(body, bytes | bytearray | memoryview):
        return bytes(body)
    raise OutputError(f"The body of an output is a {type(body).__name__}.", fix="Select it as the text of its JSON.")


def _rows(ctx: BatchContext) -> list[dict[str, Any]]:
    return [
        {
            "place": place,
            "id": each.message.message_id,
            "body": each.message.body,
            "headers": json.dumps(dict(each.headers)) if each.headers else None,
            "time": _in_utc(each.message.timestamp),
        }
        for place, each in enumerate(ctx.each)
    ]


def _in_utc(time: datetime | None) -> datetime | None:
    if time is None:
        return None
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).astimezone(UTC)


def _fill(connection: Connection, ctx: BatchContext) -> None:
    from sqlalchemy import delete
    from sqlalchemy.schema import CreateTable

    table, insertion = _relation(connection.dialect.name)
    # Once per connection, which is kept for the next chunk: see `OWN_STATEMENT` of `idemp.inbox.sql.guard`.
    connection.execute(CreateTable(table, if_not_exists=True), execution_options={"idemp_own": True})
    connection.execute(delete(table))
    connection.execute(insertion, [{**row, "payload": row["body"].decode()} for row in _rows(ctx)])


@cache
def _relation(dialect: str) -> tuple[Table, Insert]:
    """The relation as a temporary table, and what fills it."""
    from sqlalchemy import Column, DateTime, Integer, LargeBinary, MetaData, Table, Text, bindparam, cast, insert
    from sqlalchemy.dialects import mysql, postgresql

    text = Text().with_variant(mysql.LONGTEXT(collation="utf8mb4_bin"), "mysql", "mariadb")
    moment = DateTime(timezone=True).with_variant(mysql.DATETIME(fsp=6), "mysql", "mariadb")
    json_type = postgresql.JSONB() if dialect == "postgresql" else text
    table = Table(
        RELATION,
        MetaData(),
        Column("place", Integer, primary_key=True, autoincrement=False),
        Column("id", text),
        Column("body", LargeBinary().with_variant(mysql.LONGBLOB(), "mysql", "mariadb")),
        Column("payload", json_type),
        Column("headers", text),
        Column("time", moment),
        prefixes=["TEMPORARY"],
        postgresql_on_commit="DELETE ROWS",
    )
    values: dict[str, Any] = {column.name: bindparam(column.name, type_=column.type) for column in table.columns}
    if dialect == "postgresql":
        values["payload"] = cast(bindparam("payload", type_=Text()), postgresql.JSONB)
    return table, insert(table).values(values)
