"""Rows of any DataFrame as messages: `id`, `type`, `time`, `headers` and `body`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from idemp.context import FINGERPRINT
from idemp.errors import ConfigurationError
from idemp.messages import check_list

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = ["MESSAGE", "PARTS", "Columns"]

PARTS: Final = ("id", "type", "time", "headers", "body")
MESSAGE: Final = "id string, type string, time double, headers string, body binary"
KAFKA: Final = frozenset({"key", "value", "topic", "partition", "offset", "timestamp"})


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The places of ids, types, times, headers and bodies: SQL expressions over the columns of a DataFrame.

    A part that is not given is the column of that name. A DataFrame in the shape of Spark's Kafka source is recognized: the
    value is the body, the timestamp the time, and id and type are the headers `message_id` and `type` (with `includeHeaders`).

    Args:
        id: Text, whole numbers, or bytes in UTF-8.
        type: Text; a message without one is of the default type of the app.
        time: A timestamp, a date, or seconds since 1970.
        headers: A map, an array of keys and values, or a JSON object as text. Values of maps are text.
        body: Text or bytes, or a structure. Without one, the whole row. A structure is serialized to JSON here, so it is compared with
            nothing.
        of_type: Type of all messages, in place of `type`.

    Example:
        >>> Columns(id="order_id", time="created_at", of_type="shop.PlaceOrder").body is None
        True
    """

    id: str | None = None
    type: str | None = None
    time: str | None = None
    headers: str | None = None
    body: str | None = None
    of_type: str | None = None

    def of(self, frame: DataFrame, *, keep: Sequence[str] = ()) -> DataFrame:
        """Return the messages of a DataFrame, or of a stream.

        Args:
            frame: A DataFrame with any columns.
            keep: Columns that are kept in addition to those of the messages.

        Raises:
            ConfigurationError: A column is missing, or its type does not fit the part. Nothing was read.
        """
        from pyspark.sql import functions as f

        check_list(keep, "keep")
        columns = {name: self._find(name, frame) for name in PARTS}
        if self.of_type is not None:
            columns["type"] = f.lit(self.of_type)
        parts = {name: f.lit(None) if column is None else column for name, column in columns.items()}
        body, original = _body(columns["body"], frame)
        headers = _headers(parts["headers"], frame)
        if not original:
            mark = f.create_map(f.lit(FINGERPRINT), f.lit("none"))
            others = f.map_filter(f.from_json(headers, "map<string,string>"), lambda name, _: name != FINGERPRINT)
            marked = f.to_json(f.map_concat(others, mark))
            headers = f.coalesce(marked, headers, f.to_json(mark))  # headers that are not JSON stay, and their row is parked
        fields = {
            "id": _text(parts["id"]),
            "type": _text(parts["type"]),
            "time": _seconds(parts["time"], frame),
            "headers": headers,
        }
        return frame.select(*(column.alias(name) for name, column in (fields | {"body": body}).items()), *keep)

    def _find(self, name: str, frame: DataFrame) -> Column | None:
        """Return the expression of a part; None if the DataFrame does not have it."""
        from pyspark.sql import functions as f

        given: str | None = getattr(self, name)
        if given is None and set(frame.columns) >= KAFKA:
            given = _of_kafka(name, frame)
        if given is None:
            given = name if name in frame.columns else None
        if given is None:
            return None
        column = f.expr(f"`{given}`" if given in frame.columns else given)
        kind = _kind(frame, column)
        if kind is None:
            raise ConfigurationError(f"{name}: there is no {given}: the input has {', '.join(frame.columns)}; nothing was read")
        if not _fits(name, kind):
            raise ConfigurationError(f"{name}: {given} is {kind}, which cannot be used for it; nothing was read")
        return column


def _of_kafka(name: str, frame: DataFrame) -> str | None:
    if name in ("id", "type"):
        key = "message_id" if name == "id" else "type"
        last = f"try_element_at(filter(headers, each -> each.key = '{key}'), -1).value"  # a key may occur twice
        return last if "headers" in frame.columns else None
    return {"time": "timestamp", "body": "value"}.get(name)


def _kind(frame: DataFrame, column: Column) -> str | None:
    """Return the type of an expression; None if there is no such column."""
    from pyspark.errors import AnalysisException

    logs = [logging.getLogger(name) for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger")]
    levels = [logger.level for logger in logs]
    for logger in logs:  # they print a stack of 10 KB
        logger.setLevel(logging.CRITICAL)
    try:
        return str(frame.select(column).schema[0].dataType.simpleString())
    except AnalysisException:
        return None
    finally:
        for logger, level in zip(logs, levels, strict=True):
            logger.setLevel(level)


def _fits(name: str, kind: str) -> bool:
    """Return whether a column of a type fits a part of messages. An id reads as it does online, so fractions and times are refused."""
    plain = kind.partition("(")[0]
    if name in ("id", "type"):
        return plain in ("string", "binary", "void", "tinyint", "smallint", "int", "bigint") or kind.endswith(",0)")
    if name == "time":
        return plain in ("timestamp", "timestamp_ntz", "date", "double", "float", "int", "bigint", "decimal", "string", "void")
    return kind.startswith(("map<", "array<struct<key:", "string", "void")) if name == "headers" else True


def _text(column: Column) -> Column:
    from pyspark.sql import functions as f

    return f.make_valid_utf8(column.cast("string"))  # invalid UTF-8 becomes U+FFFD, which is refused in an id


def _seconds(column: Column, frame: DataFrame) -> Column:
    from pyspark.sql import functions as f

    kind = _kind(frame, column) or ""
    if kind == "string":  # of JSON and CSV
        moment = f.unix_micros(column.try_cast("timestamp")).cast("double") / 1e6
        return f.coalesce(column.try_cast("double"), moment)
    if kind.startswith(("timestamp", "date")):
        return f.unix_micros(column.cast("timestamp")).cast("double") / 1e6
    return column.cast("double")


def _headers(column: Column, frame: DataFrame) -> Column:
    """Return headers as JSON text, because a map costs a task five times as much as everything else."""
    from pyspark.sql import functions as f

    kind = _kind(frame, column) or ""
    if kind in ("string", "void"):
        return _text(column)
    if kind.startswith("array"):  # of a key that occurs twice, the last one counts
        column = _last_of_each(column)
    return _text(f.to_json(column.cast("map<string,string>")))


def _last_of_each(column: Column) -> Column:
    """Return an array of keys and values as a map; a key that occurs twice would end the task."""
    from pyspark.sql import functions as f

    named = f.filter(column, lambda each: each["key"].isNotNull())
    keys = f.array_distinct(f.transform(named, lambda each: each["key"]))
    values = f.transform(keys, lambda key: f.try_element_at(f.filter(named, lambda each: each["key"] == key), f.lit(-1))["value"])
    return f.map_from_arrays(keys, values)


def _body(column: Column | None, frame: DataFrame) -> tuple[Column, bool]:
    """Return the bytes of the body, and whether these are the producer's own bytes."""
    from pyspark.sql import functions as f

    kind = "struct" if column is None else _kind(frame, column)
    if column is not None and kind in ("string", "binary", "void"):
        return column.cast("binary"), True
    whole: Any = f.struct("*") if column is None else column
    return f.to_json(whole).cast("binary"), False
