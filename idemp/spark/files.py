"""Folders of files as messages: JSON lines, CSV, and other formats that Spark reads."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

from idemp.bulk.lines import FIELD, REPLACED, UNREADABLE_ID
from idemp.cloudevents import STRUCTURED
from idemp.errors import ConfigurationError
from idemp.spark.columns import BESIDE_A_BODY, EVENT, Columns
from idemp.spark.session import GivenUp, given_up

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

__all__ = ["read_files"]

LOOKED_AT: Final = 100
CORRUPT: Final = "_corrupt_record"
OF_FILES: Final = frozenset({"avro", "binaryfile", "csv", "json", "orc", "parquet", "text", "xml"})
"""Formats without a list of files of their own; the folder of a table of Delta or Iceberg also has files that are no longer valid."""
DEEP: Final = "recursiveFileLookup"
CONDITION: Final = re.compile(r"\[[A-Z_.]+\] .+")
NOT_BLANK: Final = r"value RLIKE '\\S'"
ID: Final = "_id"


def read_files(
    spark: SparkSession, path: str, format: str, columns: Columns | None = None, options: Mapping[str, str] | None = None
) -> DataFrame:
    """Return the messages of files.

    Args:
        spark: Spark session.
        path: A file, a folder with all its subfolders, or a glob, in any file system that Spark reads. Folders such as
            `date=2026-01-01` are columns, as Hive has them.
        format: `json` is a message a line: the line is the body, and ids, types and times are its fields, `a.b` for one in another
            object. A line with a field `specversion` is a CloudEvent. `csv` is RFC 4180 with a line of names: the row is the body,
            unless `columns` names a body, and a cell may have line breaks. Any other format is Spark's, such as `parquet`.
        columns: By default those of the names of the parts.
        options: Options of Spark's reader.

    Raises:
        ConfigurationError: There are no files, or they cannot be read as this format, or have no such columns. Nothing was handled.

    Example:
        >>> def backfill(spark: "SparkSession") -> "DataFrame":
        ...     return read_files(spark, "archive/2026", "json", Columns(id="order_id", of_type="shop.PlaceOrder"))
    """
    columns, options = columns or Columns(), dict(options or {})
    format = format.lower() if format.lower() in OF_FILES else format
    files: list[str] = []
    try:
        with given_up():
            if format in OF_FILES:
                files, options = _found(spark, path, options)
            if format == "parquet" and _exists(spark, f"{path}/_delta_log"):
                raise ConfigurationError(
                    f"{path} is a Delta table, whose files include deleted rows, so nothing was read: read it as delta, not as parquet"
                )
            if format == "json":
                return _json(spark.read.options(**options).text(path), columns)
            if format == "csv":
                return _csv(spark, path, columns, options)
            if format in ("parquet", "orc"):
                options = {"mergeSchema": "true", **options}  # later files may have further columns
            return columns.of(spark.read.format(format).options(**options).load(path))
    except (GivenUp, ConfigurationError) as error:
        from_spark = isinstance(error, GivenUp) or "PARQUET_TYPE" in str(error)
        if format == "parquet" and from_spark and (why := _in_parquet(files)):
            raise ConfigurationError(f"{why}; nothing was read") from None
        if isinstance(error, ConfigurationError):
            raise
        condition = CONDITION.search(str(error.__cause__))
        why = condition[0] if condition else str(error)
        raise ConfigurationError(f"{path} cannot be read as {format}: {why}; nothing was handled") from None


def _found(spark: SparkSession, path: str, options: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return the files below a path, and options with which Spark reads all of them."""
    files = sorted(spark.read.options(**{**options, DEEP: "true"}).text(path).inputFiles())
    if not files:
        raise ConfigurationError(
            f"{path} has no files (names that begin with _ or . do not count), so nothing was read: name a folder with files"
        )
    if options.get(DEEP, "false").lower() == "true":
        return files, options
    places = {_partition(file): file for file in reversed(files)}
    if len(places) > 1:  # Spark would omit files, or refuse them all
        one, other, *_ = sorted(places.values())
        raise ConfigurationError(
            f"{unquote(one)} and {unquote(other)} are in folders with different partition columns, so nothing was read: read one "
            f"folder after the other, or all without these columns, by the option {DEEP}=true"
        )
    plain = spark.read.options(**options).text(path).inputFiles()
    return files, options if len(plain) == len(files) else {**options, DEEP: "true"}


def _exists(spark: SparkSession, path: str) -> bool:
    from pyspark.errors import AnalysisException

    try:
        spark.read.text(path)
    except AnalysisException:
        return False
    return True


def _partition(file: str) -> tuple[str, tuple[str, ...]]:
    """Return the folder of a partitioned table and the names of its partition columns, as Spark finds them in the path of a file.

    Example:
        >>> _partition("file:///archive/year=2026/month=11/part/x.csv"), _partition("file:///archive/x.csv")
        (('file:///archive', ('year', 'month')), ('', ()))
    """
    table, _, _ = file.rpartition("/")
    while table and "=" not in table.rpartition("/")[2]:
        table, _, _ = table.rpartition("/")
    names: list[str] = []
    while "=" in (folder := table.rpartition("/")[2]):
        table, names = table.rpartition("/")[0], [folder.partition("=")[0], *names]
    return table, tuple(names)


def _in_parquet(files: list[str]) -> str | None:
    """Return why Spark cannot read files of Parquet, with file and column, as far as PyArrow can read them from here."""
    import pyarrow as pa
    from pyarrow import fs
    from pyarrow import parquet as pq

    types: dict[str, tuple[str, str]] = {}
    for file in files:
        try:
            where, place = fs.FileSystem.from_uri(file)
            schema = pq.read_schema(place, filesystem=where)
        except (pa.ArrowException, OSError):
            continue
        for field in schema:
            name, kind = unquote(file), str(field.type)
            if "timestamp[ns" in kind:
                return f"{name}: {field.name} has times in nanoseconds: write it in microseconds (pandas: coerce_timestamps='us')"
            other, before = types.setdefault(field.name, (name, kind))
            if before != kind:
                return f"{field.name} is {before} in {other} and {kind} in {name}: read one after the other, or write one type"
    return None


def _json(lines: DataFrame, columns: Columns) -> DataFrame:
    """Return lines as bodies. A line that is not JSON stays whole, as the body of a message that will be parked."""
    from pyspark.sql import functions as f

    lines = lines.where(NOT_BLANK)  # a blank line holds nothing
    if columns.body is not None or columns.headers is not None:
        raise ConfigurationError(
            "in JSON lines, the line is the body, and there are no headers: name only fields for the other parts; nothing was read"
        )
    given = {name: field for name in ("id", "type", "time", *BESIDE_A_BODY) if (field := getattr(columns, name)) is not None}
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
    defaults = {name: name for name in ("id", "type", "time")}
    read = {name: f"get_json_object(value, '$.{field}')" for name, field in (defaults | given).items()}
    lines = lines.withColumn(ID, f.expr(read["id"]))  # a column, so that Spark reads the line for it only once
    read["id"] = _checked_id(ID, given.get("id", "id"))
    event = "contains(value, '\"specversion\"') AND get_json_object(value, '$.specversion') IS NOT NULL"
    read.setdefault("content_type", f"CASE WHEN {event} THEN '{STRUCTURED}' END")
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


def _checked_id(text: str, field: str) -> str:
    """Return an expression that makes an id unusable if it was neither text nor a whole number; its text does not say which."""
    doubtful = f"(substr({text}, 1, 1) IN ('[', '{{', '\"') OR {text} IN ('true', 'false') OR {text} RLIKE '^-?[0-9]+[.eE]')"
    kind = f"schema_of_variant(try_variant_get(try_parse_json(value), '$.{field}', 'variant'))"
    refused = f"concat('{REPLACED}', {text}, ' {UNREADABLE_ID}')"
    return f"CASE WHEN {doubtful} AND coalesce({kind}, '') != 'STRING' THEN {refused} ELSE {text} END"


def _csv(spark: SparkSession, path: str, columns: Columns, options: dict[str, str]) -> DataFrame:
    """Return rows with cells as text. A file with another order of columns, or with fewer of them, is read by its own names."""
    from pyspark.sql import functions as f

    options = {name.lower(): value for name, value in options.items()}  # Spark reads them in any case
    # By default, Spark keeps doubled quotes and cuts cells at line breaks.
    options = {"header": "true", "quote": '"', "escape": options.get("quote", '"'), "multiline": "true", **options}
    partitions, by_line = _files_by_first_line(spark, path, options)
    names = {files[0]: _names(spark, files[0], options, partitions) for files in by_line.values()}
    most = max(names, key=lambda file: len(names[file]))
    for file, own in names.items():
        if not set(own) <= set(names[most]):
            raise ConfigurationError(
                f"{unquote(file)} has the columns {', '.join(own)}, and {unquote(most)} has {', '.join(names[most])}, so nothing was "
                "read: read one after the other, or begin both with a line of the same names"
            )
    messages = []
    for line, files in by_line.items():
        # Spark checks each first line, and refuses an empty name. The lines are equal, unless a name has a line break.
        checks = {"enforceschema": str(line.count(options["quote"] or '"') % 2 == 0).lower()}
        schema = ", ".join(f"`{name.replace('`', '``')}` string" for name in (*names[files[0]], CORRUPT))
        rows = spark.read.options(**{**checks, **options}, columnNameOfCorruptRecord=CORRUPT).schema(schema).csv(path)
        if len(by_line) > 1:
            rows = rows.where(f.col("_metadata.file_path").isin(files))
        messages.append(_of_rows(rows, names[files[0]], columns))
    return reduce(lambda one, other: one.union(other), messages)


def _files_by_first_line(spark: SparkSession, path: str, options: Mapping[str, str]) -> tuple[list[str], dict[str, list[str]]]:
    """Return the partition columns of files, and the files by their first lines. Files without any line have no rows, either.

    An unbalanced quotation mark is refused: a cell would swallow all rows up to the next mark or the end.
    """
    from pyspark.sql import functions as f

    lines = _lines(spark, path, options)
    begins = (f.col("_metadata.file_block_start") == 0) & f.expr(NOT_BLANK)
    first = lines.where(begins).select("value").head()
    if first is None:
        raise ConfigurationError(
            f"{path} has only empty files, so nothing was read: the first line of CSV has the names of columns"
        )
    number, marks = f.when(begins, f.monotonically_increasing_id()), _marks(options)
    rows = lines.select(
        f.col("_metadata.file_path").alias("file"), marks.alias("marks"), number.alias("number"),
        f.when(f.col("value") == first[0], number).alias("same"),
    )  # fmt: skip
    odd = f.sum("marks") % 2 if options["multiline"].lower() == "true" else f.max(f.col("marks") % 2)
    by_line: dict[str, list[str]] = {}
    for file, is_odd, number_of_first, same in rows.groupBy("file").agg(odd, f.min("number"), f.min("same")).collect():
        if number_of_first is None:
            continue
        line = first[0] if same == number_of_first else _lines(spark, _escaped(file), options).where(NOT_BLANK).head()[0]
        named = options["header"].lower() == "true"
        if named or is_odd:
            _check_text(file, line, options)
        if is_odd:
            raise ConfigurationError(
                f"{unquote(file)} has an unbalanced quotation mark, so rows would be read as one cell: correct the file; nothing "
                "was read"
            )
        # Without a line of names, all files have the names that Spark gives to columns.
        by_line.setdefault(line if named else "", []).append(file)
    return lines.columns[1:], by_line


def _lines(spark: SparkSession, path: str, options: Mapping[str, str]) -> DataFrame:
    """Return the lines of files as text, in the encoding that was named, before anything is taken for a cell."""
    if _encoding(options).upper() in ("UTF-8", "UTF8"):
        return spark.read.options(**options).text(path)
    whole = {"header": "false", "sep": "\x01", "quote": "", "comment": ""}  # a character that is not in text
    return spark.read.options(**{**options, **whole}).schema("value string").csv(path)


def _encoding(options: Mapping[str, str]) -> str:
    return options.get("encoding", options.get("charset", "UTF-8"))


def _marks(options: Mapping[str, str]) -> Column:
    """Return how many quotation marks a line has, without those behind another character that escapes them."""
    from pyspark.sql import functions as f

    quote, escape, text = options["quote"], options["escape"], f.col("value")
    for pair in () if escape in ("", quote) else (escape * 2, escape + quote):
        text = f.replace(text, f.lit(pair), f.lit(""))
    # Octets: Spark counts characters by their first octets, and in text that is not UTF-8, one would hide the marks behind it.
    return f.octet_length(f.replace(text, f.lit(quote), f.lit(f"{quote}."))) - f.octet_length(text)


def _names(spark: SparkSession, file: str, options: Mapping[str, str], partitions: list[str]) -> list[str]:
    names = spark.read.options(**options).csv(_escaped(file)).columns
    _check_text(file, "".join(names), options)
    return [*names, *(name for name in partitions if name not in names)]


def _check_text(file: str, begin: str, options: Mapping[str, str]) -> None:
    """Refuse a file that is compressed, or in another encoding: what would be said of its names and marks would be wrong."""
    if REPLACED in begin or "\0" in begin:
        raise ConfigurationError(
            f"{unquote(file)} does not begin with text in {_encoding(options)}, so nothing was read: name its encoding, such as "
            "--option encoding=UTF-16, or give a compressed file the ending of its format, such as .gz"
        )


def _escaped(file: str) -> str:
    """Return the URI of a file as a path in which no character is part of a glob."""
    return re.sub(r"([\\\[\]{}*?])", r"\\\1", unquote(file))


def _of_rows(rows: DataFrame, names: list[str], columns: Columns) -> DataFrame:
    """Return rows as messages. One with too many or too few cells becomes the body of a message that will be parked."""
    from pyspark.sql import functions as f

    quoted = [f"`{name.replace('`', '``')}`" for name in names]
    if columns.body is None:
        event = EVENT if "specversion" in names else None
        columns = replace(columns, body=f"struct({', '.join(quoted)})", content_type=columns.content_type or event)
    replaced = f.concat_ws(" ", *(f.col(name) for name in quoted)).contains(REPLACED)
    marked = rows.withColumn("_whole", f.col(CORRUPT)).withColumn("_replaced", replaced)
    result = columns.of(marked, keep=("_whole", "_replaced"))
    # A mark makes it unreadable: a line such as `7` would be JSON. Spark replaces invalid UTF-8, so two ids could become one.
    unusable = f.col("_replaced") | f.col("_whole").isNotNull()
    body = f.coalesce(f.col("_whole").cast("binary"), f.col("body"))
    marked_body = f.when(unusable, f.concat(f.lit(REPLACED).cast("binary"), body)).otherwise(body)
    return result.withColumn("body", marked_body).drop("_whole", "_replaced")
