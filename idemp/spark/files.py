"""Archives of messages: files of any format that Spark reads."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Final

from idemp.errors import ConfigurationError
from idemp.findings import nearest
from idemp.spark.columns import Columns, quoted
from idemp.spark.failures import cause_of, unlogged

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyspark.sql import DataFrame, SparkSession

_JSON_FIELD: Final = re.compile(r"[^\s.'\"\[\]\\]+(\.[^\s.'\"\[\]\\]+)*")
_LOOKED_AT: Final = 100
_CORRUPT: Final = "_corrupt_record"
_SHOWN: Final = 80


def read_messages(
    spark: SparkSession,
    paths: Sequence[str],
    format: str,
    columns: Columns,
    options: Mapping[str, str] | None = None,
) -> DataFrame:
    """The messages of files.

    Args:
        spark: the session.
        paths: files or folders, in any file system of Spark's.
        format: `json` (a message a line: columns are its fields, `a.b` for nested ones, and the body is the line itself
            unless told otherwise), `csv` (with a line of headers), or any other that Spark reads, such as `parquet`.
        columns: what is what.
        options: as for `DataFrameReader.options`.

    Raises:
        ConfigurationError: there are no such files, or no such columns in them. Only the beginning was read.
    """
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    reader = spark.read.options(**(options or {}))
    try:
        with unlogged():
            if format == "json":
                lines = reader.text(list(paths))
                return _of_json(lines, columns).of(lines)
            if format == "csv":
                return _from_csv(spark, list(paths), columns, options or {})
            if format in {"parquet", "orc"}:
                reader = reader.option("mergeSchema", "true")  # later files may have columns that earlier ones lack
            return columns.of(reader.format(format).load(list(paths)))
    except (PySparkException, Py4JError) as error:
        told = (isinstance(error, PySparkException) and error.getMessage()) or cause_of(str(error), outermost=True)
        raise ConfigurationError(
            f"{', '.join(paths)} can't be read as {format}: {told}", fix="Nothing was changed."
        ) from error


def literal(text: str) -> str:
    r"""A text as SQL.

    Example:
        >>> print(literal("shop.Order"), literal("it's"))
        'shop.Order' 'it\'s'
    """
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _of_json(lines: DataFrame, columns: Columns) -> Columns:
    """Columns over lines of text. A line that is no JSON stays whole, as the body of a message that will be parked."""
    given: dict[str, Any] = {name: value for name, value in asdict(columns).items() if isinstance(value, str)}
    wanted = {"id": "id", "type": "type", **given}
    fields = {name: value for name, value in wanted.items() if not _is_constant(value)}
    for value in fields.values():
        if not _JSON_FIELD.fullmatch(value):
            raise ConfigurationError(
                f"{value!r} is no field of a JSON object.", fix="Write a name, or a.b for one in another object."
            )
    _check_there(lines, fields)
    paths = {name: f"get_json_object(value, '$.{path}')" for name, path in fields.items()}
    return replace(columns, **{"body": "value", **wanted, **paths})


def _is_constant(expression: str) -> bool:
    return expression.startswith("'") or expression.upper() == "NULL"


def _check_there(lines: DataFrame, fields: Mapping[str, str]) -> None:
    """Of lines nobody knows the fields; but one that none of the first hundred has is a mistake."""
    seen = [_parsed(row[0]) for row in lines.limit(_LOOKED_AT).collect()]
    objects = [each for each in seen if isinstance(each, dict)]
    missing = {name: path for name, path in fields.items() if objects and not any(_has(each, path) for each in objects)}
    if missing:
        present = sorted({str(name) for each in objects for name in each})
        named = ", ".join(f"no {name} as {path!r}" for name, path in missing.items())
        raise ConfigurationError(
            f"The input has {named}, as far as its first {len(seen)} lines tell. Its fields: {', '.join(present)}.",
            fix=" ".join(
                [nearest(path, present) for path in missing.values()]
                + ["Name fields; 'NULL' where there is none. Nothing was changed."]
            ),
        )


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):  # a line that will be parked
        return None


def _has(value: Any, path: str) -> bool:
    for name in path.split("."):
        if not isinstance(value, dict) or name not in value:
            return False
        value = value[name]
    return True


def _from_csv(spark: SparkSession, paths: list[str], columns: Columns, options: Mapping[str, str]) -> DataFrame:
    """Texts by the names in the first line. A row with too many or too few of them is the body of a message to be parked."""
    from pyspark.sql import types as t

    told = {"header": "true", "escape": '"', **options}  # of itself, Spark leaves "" in a cell as it stands
    if not {"multiline", "quote"} & {name.lower() for name in options}:
        _check_quotes(spark, paths, options)
    names = spark.read.options(**told).csv(paths).columns
    if not names:
        raise ConfigurationError(f"{', '.join(paths)} has no line with names of columns.", fix="Nothing was changed.")
    schema = t.StructType([t.StructField(name, t.StringType()) for name in (*names, _CORRUPT)])
    checked = {**told, "enforceSchema": "false", "columnNameOfCorruptRecord": _CORRUPT}
    rows = spark.read.options(**checked).schema(schema).csv(paths)
    whole = f"to_json(struct({', '.join(f'`{name}`' for name in names)}))"
    given = _in_csv("body", columns, names)
    body = f"CAST({given} AS STRING)" if given is not None else whole
    others = filter(None, (_in_csv(name, columns, names) for name in ("id", "headers")))
    read = [body, *(f"CAST({each} AS STRING)" for each in others)]
    # What is not in the files' encoding is lost before anybody sees it: two ids would be one.
    lost = f"WHEN contains(concat_ws(' ', {', '.join(read)}), '\ufffd') THEN concat('\ufffd', {body})"
    told_body = f"CASE WHEN {_CORRUPT} IS NOT NULL THEN {_CORRUPT} {lost} ELSE {body} END"
    return replace(columns, body=told_body, original=given is not None).of(rows)


def _in_csv(part: str, columns: Columns, names: Sequence[str]) -> str | None:
    """The expression for a part of messages, where there is one."""
    given: str | None = getattr(columns, part)
    return quoted(given, names) if given is not None else f"`{part}`" if part in names else None


def _check_quotes(spark: SparkSession, paths: list[str], options: Mapping[str, str]) -> None:
    """See that no cell goes on in the next line: Spark would take the message for whole, without the rest."""
    from pyspark.sql import functions as f

    value = f.col("value")
    odd = f.length(f.regexp_replace(value, '[^"]', "")) % 2 == 1
    found = spark.read.options(**options).text(paths).where(odd).select(value, f.col("_metadata.file_path")).head()
    if found is not None:
        raise ConfigurationError(
            f"A line of {found[1]} has a quotation mark without its other half: {found[0][:_SHOWN]!r}.",
            fix="Say --option multiLine=true if cells have line breaks; if marks are missing, mend the file, or say "
            "--option multiLine=false to have it read line by line as it is. Nothing was changed.",
        )
