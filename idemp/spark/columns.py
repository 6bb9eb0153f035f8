"""From any DataFrame to messages: the columns of a chunk (`idemp.bulk`), and where each row stands in its source."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from idemp.errors import ConfigurationError
from idemp.findings import nearest
from idemp.messages import UNSTORED_HEADER
from idemp.spark.failures import unlogged

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType

MESSAGE: Final = "id STRING, type STRING, body BINARY, headers STRING, time TIMESTAMP, position STRING"
"""The schema of messages, as Spark writes it."""

BY_CONTENT: Final = "#~"
"""In a position: what follows is a digest of the row, the same for rows that are equal."""

PARTS: Final = tuple(column.split()[0] for column in MESSAGE.split(", "))
_REQUIRED: Final = ("id", "type")
_OF_KAFKA: Final = frozenset({"topic", "partition", "offset"})
_TO_THE_END: Final = 2**31 - 1
_PLAIN: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Where a DataFrame has what messages are made of.

    Each is a SQL expression, as for `DataFrame.selectExpr`; the name of a column is one. What is not given is the column of
    that name, where there is one.

    Attributes:
        id: the message id: text or its bytes, a whole or decimal number, a date. Has to be there; `"NULL"` says that
            messages have none: their types' keys are in their bodies.
        type: the message type, such as `"'shop.Order'"` for that of all. Has to be there; `"NULL"` leaves it to the app.
        body: bytes or text, taken as they are; or a struct, map or array, written as JSON. Without it, and without a column
            `body`, all columns as one JSON object. JSON that is written anew has no fingerprint: it conflicts with nothing.
        headers: a JSON object as text, or a struct or map.
        time: when the producer made the message: a timestamp, or text in ISO 8601 (in the session's time zone, if it
            names none); what can't be read is unknown.
        original: whether a body of bytes or text is what the producer wrote. If it was written anew, it has no fingerprint.
        position: `source#place`, the same whenever the source is read again. Without it: topic, partition and offset where
            there are such columns; of files the path with the number of the row (Parquet), or with a digest of the row.
            `"NULL"` says that it is unknown: a message that our own retry meets again then counts as duplicate.

    Example:
        >>> Columns(id="order_id", type="'shop.Order'", body="payload").body
        'payload'
    """

    id: str | None = None
    type: str | None = None
    body: str | None = None
    headers: str | None = None
    time: str | None = None
    position: str | None = None
    original: bool = True

    def of(self, frame: DataFrame) -> DataFrame:
        """The messages of a DataFrame, a stream's as well.

        Raises:
            ConfigurationError: columns are missing, or of types that can't be what they are for. Nothing was read.
        """
        from pyspark.sql import functions as f

        found = self._resolved(frame)
        body, as_it_was = _body(found.get("body"))
        headers = _headers(found.get("headers"))
        message = {
            "id": f.expr(found["id"][0]).cast("string"),
            "type": f.expr(found["type"][0]).cast("string"),
            "body": body,
            "headers": headers if as_it_was and self.original else _marked(headers),
            "time": f.expr(f"try_cast({found['time'][0]} AS TIMESTAMP)") if "time" in found else f.lit(None),
        }
        place = f.expr(found["position"][0]) if "position" in found else _place(frame, list(message.values()))
        message |= {"time": message["time"].cast("timestamp"), "position": place.cast("string")}
        return frame.select(*(column.alias(name) for name, column in message.items()))

    def _resolved(self, frame: DataFrame) -> dict[str, tuple[str, DataType]]:
        """Expressions that are given, or that are columns by their name, with their types."""
        present = {name.lower() for name in frame.columns}
        found: dict[str, tuple[str, DataType]] = {}
        wrong: list[str] = []
        for name in PARTS:
            given: str | None = getattr(self, name)
            if given is None and name not in present:
                wrong += [f"no {name}"] if name in _REQUIRED else []
                continue
            expression = quoted(given, frame.columns) if given is not None else f"`{name}`"
            kind = _type_of(frame, expression)
            if kind is None:
                wrong.append(f"no {name} as {expression!r}")
            elif not _fits(name, kind):
                wrong.append(f"{name} as {expression!r} is of type {kind.simpleString()}")
            else:
                found[name] = expression, kind
        if wrong:
            raise ConfigurationError(
                f"The input has {', '.join(wrong)}. Its columns: {', '.join(frame.columns)}.",
                fix=" ".join(
                    [*_hints(self, frame), "Name columns, or SQL expressions of them; 'NULL' where there is none."]
                ),
            )
        return found


def quoted(given: str, names: Sequence[str]) -> str:
    """An expression; the name of a column that SQL would read otherwise, as SQL writes it.

    Example:
        >>> quoted("order no.", ["order no."]), quoted("order.no", ["order"]), quoted("NULL", ["id"])
        ('`order no.`', 'order.no', 'NULL')
    """
    return f"`{given.replace('`', '``')}`" if given in names and not _PLAIN.fullmatch(given) else given


def _type_of(frame: DataFrame, expression: str) -> DataType | None:
    from pyspark.errors import AnalysisException

    with unlogged():
        try:
            return frame.selectExpr(expression).schema[0].dataType
        except AnalysisException:
            return None


def _fits(name: str, kind: DataType) -> bool:
    """Whether a column of this type can be that part of a message; `NULL` can be any."""
    from pyspark.sql import types as t

    texts = (t.StringType, t.NullType)
    structures = (t.StructType, t.MapType)
    fitting: dict[str, tuple[Any, ...]] = {
        "body": (*texts, *structures, t.BinaryType, t.ArrayType, t.VariantType),
        "headers": (*texts, *structures),
        "time": (*texts, t.TimestampType, t.TimestampNTZType, t.DateType),
        "position": texts,
    }
    if name in fitting:
        return isinstance(kind, fitting[name])
    # As text, a number with a floating point reads otherwise than online (1.0E7), and a time by the session's zone.
    return isinstance(kind, (*texts, t.BinaryType, t.IntegralType, t.DecimalType, t.DateType))


def _hints(columns: Columns, frame: DataFrame) -> Iterator[str]:
    names = frame.columns
    for name in PARTS:
        given: str | None = getattr(columns, name)
        if given is not None and given.isidentifier() and given not in names and names:
            yield nearest(given, names)


def _body(found: tuple[str, DataType] | None) -> tuple[Column, bool]:
    """The bytes of the body, and whether they are those that the producer wrote."""
    from pyspark.sql import functions as f
    from pyspark.sql import types as t

    if found is None:
        return f.to_json(f.struct("*")).cast("binary"), False
    expression, kind = found
    if isinstance(kind, t.StringType | t.BinaryType | t.NullType):
        return f.expr(expression).cast("binary"), True
    return f.to_json(f.expr(expression)).cast("binary"), False


def _headers(found: tuple[str, DataType] | None) -> Column:
    from pyspark.sql import functions as f
    from pyspark.sql import types as t

    if found is None:
        return f.lit(None).cast("string")
    expression, kind = found
    if isinstance(kind, t.StringType | t.NullType):
        return f.expr(expression).cast("string")
    return f.to_json(f.expr(expression))


def _marked(headers: Column) -> Column:
    """Headers that say of a body that it may be worded otherwise than the original. What is no JSON object stays so."""
    from pyspark.sql import functions as f

    mark = f'{{"{UNSTORED_HEADER}": 1'
    text = f.trim(headers)
    rest = f.ltrim(f.substring(text, 2, _TO_THE_END))
    return (
        f.when(headers.isNull(), f.lit(f"{mark}}}"))
        .when(~text.startswith("{"), headers)
        .when(rest.startswith("}"), f.concat(f.lit(mark), rest))
        .otherwise(f.concat(f.lit(f"{mark}, "), rest))
    )


def _place(frame: DataFrame, message: list[Column]) -> Column:
    """Where rows stand in their source, as far as one can see."""
    from pyspark.sql import functions as f
    from pyspark.sql import types as t

    path = f.col("_metadata.file_path")
    if set(frame.columns) >= _OF_KAFKA:
        return f.concat("topic", f.lit("/"), "partition", f.lit("#"), "offset")
    known = _type_of(frame, "_metadata")  # asked as a whole: Spark logs a missing field as an error
    if isinstance(known, t.StructType) and "row_index" in known.names:
        return f.concat(path, f.lit("#"), f.col("_metadata.row_index"))
    if isinstance(known, t.StructType) and "file_path" in known.names:
        # A line of text has no number that would stay the same when the file is split otherwise. Its content does;
        # rows that are equal are numbered where they meet (`idemp.spark.chunks`).
        return f.concat(path, f.lit(BY_CONTENT), f.hex(f.xxhash64(*message)))
    return f.lit(None)
