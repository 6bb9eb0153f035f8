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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from idemp.bulk.lines import PARTS, REASONS, edited
from idemp.errors import ConfigurationError
from idemp.spark.columns import MESSAGE
from idemp.spark.session import given_up

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["REASONS", "Attempt", "check_folder", "corrected", "read_parked"]

MANIFESTS: Final = "_manifests"
FILE: Final = "(run=[^/]*/[^/]*/[^/]*)$"
"""The end of the path of a file, with the folder of its attempt."""
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
    values = edited(number, line)
    if values["row"] is None:
        raise ConfigurationError(f"line {number} does not say its row, so it is not one of `idemp pipeline parked --json`")
    return tuple(values[name] for name in ("row", *PARTS))


def _replaced(spark: SparkSession, root: str) -> list[str]:
    """Return the files whose rows a replay has replaced."""
    from pyspark.errors import AnalysisException

    try:
        lines = spark.read.option("recursiveFileLookup", "true").text(f"{root}/{MANIFESTS}").collect()
    except AnalysisException:  # there are no manifests
        return []
    return [file for line in lines for file in json.loads(line[0]).get("replaces", ())]
