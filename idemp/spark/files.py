"""Folders of files as messages: JSON lines, CSV, and other formats that Spark reads."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from idemp.errors import ConfigurationError
from idemp.spark.columns import Columns
from idemp.spark.session import given_up

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["read_files"]

FIELD: Final = re.compile(r"[^\s.'\"\[\]\\*]+(\.[^\s.'\"\[\]\\*]+)*")
LOOKED_AT: Final = 100
CORRUPT: Final = "_corrupt_record"
REPLACED: Final = "\ufffd"


def read_files(
    spark: SparkSession, path: str, format: str, columns: Columns | None = None, options: Mapping[str, str] | None = None
) -> DataFrame:
    """Return the messages of files.

    Args:
        spark: Spark session.
        path: A file or a folder, in any file system that Spark reads.
        format: `json` is a message a line: the line is the body, and ids, types and times are its fields, `a.b` for one in another
            object. `csv` is RFC 4180 with a line of names: the row is the body, unless `columns` names a body, and a cell may have
            line breaks. Any other format is Spark's, such as `parquet`.
        columns: By default those of the names `id`, `type`, `time`, `headers` and `body`.
        options: Options of Spark's reader.

    Raises:
        ConfigurationError: There are no such files, or no such columns in them. At most the first lines were read.

    Example:
        >>> def backfill(spark: "SparkSession") -> "DataFrame":
        ...     return read_files(spark, "archive/2026", "json", Columns(id="order_id", of_type="shop.PlaceOrder"))
    """
    columns, options = columns or Columns(), dict(options or {})
    with given_up():
        if format == "json":
            return _json(spark.read.options(**options).text(path), columns)
        if format == "csv":
            return _csv(spark, path, columns, options)
        if format in ("parquet", "orc"):
            options = {"mergeSchema": "true", **options}  # later files may have further columns
        return columns.of(spark.read.format(format).options(**options).load(path))


def _json(lines: DataFrame, columns: Columns) -> DataFrame:
    """Return lines as bodies. A line that is not JSON stays whole, as the body of a message that will be parked."""
    if columns.body is not None or columns.headers is not None:
        raise ConfigurationError("in JSON lines, the line is the body, and there are no headers: name only id, type and time")
    given = {name: field for name in ("id", "type", "time") if (field := getattr(columns, name)) is not None}
    for name, field in given.items():
        if not FIELD.fullmatch(field):
            raise ConfigurationError(
                f"{name}: {field!r} is not a field of a JSON object: write a name, or a.b for one in another object"
            )
    seen = [document for row in lines.limit(LOOKED_AT).collect() if isinstance(document := _parsed(row[0]), dict)]
    for name, field in given.items():
        if seen and not any(_has(document, field) for document in seen):
            fields = ", ".join(sorted({str(each) for document in seen for each in document}))
            raise ConfigurationError(f"{name}: none of {len(seen)} lines that were read has {field!r}: they have {fields}")
    read = {name: f"get_json_object(value, '$.{given.get(name, name)}')" for name in ("id", "type", "time")}
    return replace(columns, body="value", **read).of(lines)


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _has(value: Any, path: str) -> bool:
    for name in path.split("."):
        if not isinstance(value, dict) or name not in value:
            return False
        value = value[name]
    return True


def _check_quotes(lines: DataFrame, *, whole: bool) -> None:
    """Refuse an unbalanced quotation mark: a cell would swallow all rows up to the next mark or the end."""
    from pyspark.sql import functions as f

    file, marks = f.col("_metadata.file_path").alias("file"), f.length(f.regexp_replace("value", '[^"]', "")).alias("marks")
    counted = lines.select(file, marks)
    if whole:
        counted = counted.groupBy("file").agg(f.sum("marks").alias("marks"))
    if odd := counted.where("marks % 2 = 1").head():
        raise ConfigurationError(
            f"{odd[0]} has an unbalanced quotation mark, so rows would be read as one cell: correct the file"
        )


def _csv(spark: SparkSession, path: str, columns: Columns, options: Mapping[str, str]) -> DataFrame:
    """Return rows with cells as text. A row with too many or too few of them becomes the body of a message that will be parked."""
    from pyspark.sql import functions as f
    from pyspark.sql import types as t

    # By default, Spark keeps doubled quotes, cuts cells at line breaks, and applies the names of the first file to all files.
    reader_options = {"header": "true", "escape": '"', "multiLine": "true", "enforceSchema": "false", **options}
    _check_quotes(spark.read.text(path), whole=reader_options["multiLine"].lower() == "true")
    names = spark.read.options(**reader_options).csv(path).columns
    schema = t.StructType([t.StructField(name, t.StringType()) for name in (*names, CORRUPT)])
    rows = spark.read.options(**reader_options, columnNameOfCorruptRecord=CORRUPT).schema(schema).csv(path)
    cells = [f.col(f"`{name}`") for name in names]
    messages = replace(columns, body=columns.body or f"struct({', '.join(f'`{name}`' for name in names)})")
    marked = rows.withColumn("_whole", f.col(CORRUPT)).withColumn("_replaced", f.concat_ws(" ", *cells).contains(REPLACED))
    result = messages.of(marked, keep=("_whole", "_replaced"))
    # Spark replaces invalid UTF-8 while it reads, so two ids could become one: such a row is parked.
    body = f.when(f.col("_replaced"), f.concat(f.lit(REPLACED).cast("binary"), "body")).otherwise(f.col("body"))
    whole = f.col("_whole").cast("binary")
    return result.withColumn("body", f.coalesce(whole, body)).drop("_whole", "_replaced")
