"""Rows that were not handled: kept for good, shown, corrected, and run again.

    PARKED/run=NAME/attempt=TOKEN/*.parquet      rows and reasons; a folder for each attempt of a run, which nobody changes or deletes
    PARKED/_manifests/run=NAME/attempt=TOKEN/    what the attempt did, and which files it replaces, as JSON

Rows stand nowhere else, so nothing is overwritten. A replay writes a folder of its own: rows that failed again, and rows that it left
alone. Its manifest says which files it replaces; until that is written, their rows stay open. A file that appears meanwhile, because
another run is about to commit its attempt, is not among them.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from idemp.errors import ConfigurationError
from idemp.spark.columns import MESSAGE, PARTS
from idemp.spark.session import given_up

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["REASONS", "Attempt", "check_folder", "corrected", "read_parked", "readable"]

REASONS: Final = ("answer", "rule", "error")
MANIFESTS: Final = "_manifests"
FILE: Final = "(run=[^/]*/[^/]*/[^/]*)$"
"""The end of the path of a file, with the folder of its attempt."""
ID: Final = ("id", "type")
GLOB: Final = re.compile(r"[\\\[\]{}*?]")


@dataclass(frozen=True)
class Attempt:
    """One attempt of a run, with a folder of its own.

    Attributes:
        root: Folder of all parked rows.
        folder: Folder of the attempt, below the root.

    Example:
        >>> Attempt.new("parked", "backfill 7").folder[:27]
        'run=backfill%207/attempt=20'
    """

    root: str
    folder: str

    @classmethod
    def new(cls, root: str, run: str) -> Attempt:
        """Return an attempt whose folder does not exist."""
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        return cls(root.rstrip("/"), f"run={quote(run, safe='')}/attempt={stamp}-{secrets.token_hex(4)}")

    def keep(self, rows: DataFrame) -> None:
        """Write the rows."""
        rows.write.parquet(f"{self.root}/{self.folder}")

    def close(self, spark: SparkSession, manifest: Mapping[str, Any]) -> None:
        """Write the manifest, so that the attempt counts as done, and the files that it `replaces` as replaced."""
        from pyspark.sql import functions as f

        text = json.dumps({"folder": self.folder, "at": time.time(), **manifest})
        spark.range(1).select(f.lit(text)).write.text(f"{self.root}/{MANIFESTS}/{self.folder}")


def read_parked(spark: SparkSession, parked: str) -> DataFrame:
    """Return the open rows of a folder of parked rows: those that no replay has replaced. Equal messages are one row.

    Args:
        spark: Spark session.
        parked: The folder that a sink got as `parked`.

    Returns:
        The columns of messages, `answer`, `rule` and `error`, `row` (which identifies the message), and `files` that have it.

    Raises:
        ConfigurationError: There are no parked rows in the folder.

    Example:
        >>> def poison(spark: "SparkSession") -> "DataFrame":
        ...     return read_parked(spark, "parked").where("rule = 'poison'")
    """
    from pyspark.sql import functions as f

    check_folder(parked)
    root = parked.rstrip("/")
    reader = spark.read.option("recursiveFileLookup", "true")
    with given_up():
        if not any(name.endswith(".parquet") for name in reader.text(root).inputFiles()):
            raise ConfigurationError(f"there are no parked rows in {parked}")
        rows = reader.option("mergeSchema", "true").parquet(root)
        for name in {*PARTS, *REASONS}.difference(rows.columns):  # of a former release
            rows = rows.withColumn(name, f.lit(None).cast("string"))
        message = f.struct(*PARTS)
        rows = rows.select(
            f.regexp_extract("_metadata.file_path", FILE, 1).alias("file"),
            f.substring(f.sha2(f.to_json(message), 256), 1, 16).alias("row"), message.alias("message"), *REASONS,
        ).where(~f.col("file").isin(_replaced(spark, root)))  # fmt: skip
        last = f.max(f.struct("file", *REASONS)).alias("last")
        together = rows.groupBy("row").agg(f.first("message").alias("message"), last, f.collect_set("file").alias("files"))
        return together.select("row", "message.*", *(f"last.{name}" for name in REASONS), "files")


def check_folder(parked: str) -> None:
    """Refuse a folder for parked rows whose name Spark would read as a pattern.

    Raises:
        ConfigurationError: The name has such a character.

    Example:
        >>> check_folder("parked[1]")
        Traceback (most recent call last):
        idemp.errors.ConfigurationError: 'parked[1]' is a pattern for Spark: name a folder without [ ] { } * ? and backslashes
    """
    if GLOB.search(parked):
        raise ConfigurationError(f"{parked!r} is a pattern for Spark: name a folder without [ ] {{ }} * ? and backslashes")


def readable(row: Mapping[str, Any]) -> dict[str, Any]:
    r"""Return an open row for a line of JSON that a person can edit: its body is text, or Base64 if it is not UTF-8.

    Example:
        >>> readable({"row": "7f", "id": "a", "body": b"{}", "files": []}), readable({"body": b"\xff"})
        ({'id': 'a', 'type': None, 'row': '7f', 'body': '{}'}, {'id': None, 'type': None, 'body_base64': '/w=='})
    """
    known = {"id": None, "type": None, **row}  # shown even if a correction has yet to name them
    shown = {name: value for name, value in known.items() if name not in ("body", "files") and (value is not None or name in ID)}
    body = row["body"]
    if body is None:
        return shown
    try:
        return shown | {"body": bytes(body).decode()}
    except UnicodeDecodeError:
        return shown | {"body_base64": b64encode(body).decode()}


def corrected(rows: DataFrame, lines: Iterable[str]) -> tuple[DataFrame, DataFrame]:
    """Return rows as lines of JSON have them now, and the other rows.

    Args:
        rows: Open rows.
        lines: Lines as `readable` writes them, edited; blank lines are skipped.

    Raises:
        ConfigurationError: A line is not such a row, or its row is not open. Nothing was run.

    Example:
        >>> def mend(rows: "DataFrame", lines: list[str]) -> "DataFrame":
        ...     return corrected(rows, lines)[0]
    """
    from pyspark.sql import functions as f

    found = [_edited(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    names = [line[0] for line in found]
    known = {row[0] for row in rows.where(f.col("row").isin(names)).select("row").collect()}
    if unknown := [name for name in names if name not in known]:
        raise ConfigurationError(
            f"row {unknown[0]} is not open, so it was replayed, or is of another folder: list the rows again"
        )
    mended = rows.sparkSession.createDataFrame(found, f"row string, {MESSAGE}")
    return mended, rows.where(~f.col("row").isin(names))


def _edited(number: int, line: str) -> tuple[Any, ...]:
    """Return the row in a line, with its parts in the order of messages."""
    try:
        row = json.loads(line)
        body = row["body"].encode() if "body" in row else None
        if "body_base64" in row:
            body = b64decode(row["body_base64"], validate=True)
        texts = {name: row.get(name) for name in ("row", *PARTS) if name not in ("time", "body")}
        if not isinstance(row["row"], str) or not all(text is None or isinstance(text, str) for text in texts.values()):
            raise TypeError("a value is not text")
        if unknown := sorted(row.keys() - {"row", "body_base64", *PARTS, *REASONS}):
            raise TypeError(f"unknown: {', '.join(unknown)}")
        moment = None if row.get("time") is None else float(row["time"])
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ConfigurationError(
            f"line {number} is not a parked row as `idemp pipeline parked --json` writes them: {error}"
        ) from None
    values = texts | {"time": moment, "body": body}
    return tuple(values[name] for name in ("row", *PARTS))


def _replaced(spark: SparkSession, root: str) -> list[str]:
    """Return the files whose rows a replay has replaced."""
    from pyspark.errors import AnalysisException

    try:
        lines = spark.read.option("recursiveFileLookup", "true").text(f"{root}/{MANIFESTS}").collect()
    except AnalysisException:  # there are no manifests
        return []
    return [file for line in lines for file in json.loads(line[0]).get("replaces", ())]
