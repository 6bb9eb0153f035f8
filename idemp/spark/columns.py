"""Rows of any DataFrame as messages: their ids, types, times, headers, bodies and other properties."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from idemp.bulk.lines import PARTS
from idemp.cloudevents import STRUCTURED
from idemp.context import FINGERPRINT
from idemp.errors import ConfigurationError
from idemp.messages import check_list

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = ["EVENT", "MESSAGE", "PARTS", "Columns"]

MESSAGE: Final = (
    "id string, type string, time double, content_type string, correlation_id string, reply_to string, "
    "headers string, body binary"
)
BESIDE_A_BODY: Final = ("content_type", "correlation_id", "reply_to")
"""Parts that no column becomes by its name where the whole row is the body: a business field `reply_to` is no queue."""
TEXTS: Final = ("id", "type", *BESIDE_A_BODY)
EVENT: Final = f"CASE WHEN specversion IS NOT NULL THEN '{STRUCTURED}' END"
"""Content type of a whole row: a row with the CloudEvents attribute `specversion` is an event."""
MARK: Final = f"{json.dumps(FINGERPRINT)}:{json.dumps('none')}"
AS_JSON: Final = {
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
    "ignoreNullFields": "false",  # a field `str | None` without a default has to be there
}
KAFKA: Final = frozenset({"key", "value", "topic", "partition", "offset", "timestamp"})


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The places of ids, types, times, headers and bodies: SQL expressions over the columns of a DataFrame.

    A part that is not given is the column of that name; `content_type`, `correlation_id` and `reply_to` only if there is a body
    besides. A DataFrame in the shape of Spark's Kafka source is recognized: the value is the body, the timestamp the time, and the
    other parts are the headers `message_id`, `type`, `content-type`, `correlation_id` and `reply_to` (with `includeHeaders`).

    Args:
        id: Text, whole numbers, or bytes in UTF-8.
        type: Text; a message without one is of the default type of the app.
        time: A timestamp, a date, or seconds since 1970.
        content_type: Text. By default, a whole row with a column `specversion` that is not NULL is a CloudEvent.
        correlation_id: Text.
        reply_to: Text: the queue for replies.
        headers: A map, an array of keys and values, or a JSON object as text. Integers and booleans stay; bytes become text.
        body: Text or bytes, or a structure. Without one, the whole row. A structure is serialized to JSON here (NULL as `null`,
            timestamps with microseconds), so it is compared with nothing.
        of_type: Type of all messages, in place of `type`.

    Example:
        >>> Columns(id="order_id", time="created_at", of_type="shop.PlaceOrder").body is None
        True
    """

    id: str | None = None
    type: str | None = None
    time: str | None = None
    content_type: str | None = None
    correlation_id: str | None = None
    reply_to: str | None = None
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
        whole = self._find("body", frame) is None
        found = {
            name: None if whole and name in BESIDE_A_BODY and not getattr(self, name) else self._find(name, frame)
            for name in PARTS
        }
        if self.of_type is not None:
            found["type"] = f.lit(self.of_type)
        if whole and found["content_type"] is None and "specversion" in frame.columns:
            found["content_type"] = f.expr(EVENT)
        parts = {name: f.lit(None) if column is None else column for name, column in found.items()}
        body, original = _body(found["body"], frame)
        headers = _headers(parts["headers"], frame)
        fields = {name: _text(parts[name]) for name in TEXTS} | {
            "time": _seconds(parts["time"], frame),
            "headers": headers if original else _marked(headers),
            "body": body,
        }
        return frame.select(*(fields[name].alias(name) for name in PARTS), *keep)

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
    if name in TEXTS:
        keys = {"id": "'message_id'", "content_type": "'content-type', 'content_type'"}.get(name, f"'{name}'")
        last = f"try_element_at(filter(headers, each -> each.key IN ({keys})), -1).value"  # a key may occur twice
        return last if "headers" in frame.columns else None
    return {"time": "timestamp", "body": "value"}.get(name)


def _kind(frame: DataFrame, column: Column) -> str | None:
    """Return the type of an expression; None if there is no such column."""
    from pyspark.errors import AnalysisException
    from pyspark.logger import PySparkLogger

    logs = [PySparkLogger.getLogger(name) for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger")]
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
    if name in TEXTS:
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
    if "binary" in kind:  # all other values keep their types: the header 7 is not the header "7"
        column = column.cast("map<string,string>")
    return _text(f.to_json(column, AS_JSON))


def _marked(headers: Column) -> Column:
    """Return headers by which the body is compared with nothing. Text that is not a JSON object stays, and its row is parked."""
    from pyspark.sql import functions as f

    names = f.json_object_keys(headers)
    end = f.when(f.size(names) == 0, f"{MARK}}}").otherwise(f",{MARK}}}")  # the last of equal keys counts
    marked = f.when(names.isNotNull(), f.regexp_replace(headers, f.lit(r"\}\s*$"), end)).otherwise(headers)
    return f.coalesce(marked, f.lit(f"{{{MARK}}}"))


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
    return f.to_json(whole, AS_JSON).cast("binary"), False
