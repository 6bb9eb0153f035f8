"""What a reconciliation found: as DataFrames, as Parquet, as JSON and as a page."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import Window
from pyspark.sql import functions as f

from idemp.errors import ConfigurationError
from idemp.spark.reconcile.judging import DETAIL, by_message, collapsed, judged
from idemp.spark.reconcile.keys import key_text
from idemp.spark.reconcile.summary import Counts, Finding, HourCounts, Summary, TypeCounts
from idemp.spark.reconcile.terms import Fate, Kind, Terms

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Self

    from pydantic import BaseModel
    from pyspark.sql import Column, DataFrame, Row

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_TIMES: Final = frozenset({"hour", "sent_at", "claimed_at"})
_MOST_ROWS: Final = 10_000
"""Message types, and hours: more than a year of them; `counts` has all."""
_ALL, _TYPE, _HOUR = 0b111, 0b001, 0b110
"""What `grouping_id` says of a set: a digit for each of consumer, type and hour that it is without."""
DEFAULT_EXAMPLES: Final = 20


class Reconciliation:
    """What was found; nothing is computed before it is asked for, and then once. Close it, or use it in a `with` block.

    Attributes:
        terms: by which it was judged.
    """

    def __init__(self, sent: DataFrame, inbox: DataFrame, outputs: DataFrame, terms: Terms) -> None:
        self.terms = terms
        self._found = collapsed(judged(by_message(sent, inbox, outputs), terms)).persist()

    @property
    def findings(self) -> DataFrame:
        """One row for each message and kind of finding; the columns are the fields of `Finding`."""
        detail = [f.col(f"detail.{name}").alias(name) for name in DETAIL]
        flat = self._found.where(f.col("detail").isNotNull()).select(
            f.explode("kinds").alias("kind"), "consumer", "type", *detail
        )
        key = f.when(f.col("fault").isNull(), key_text(f.col("key")))
        others = [name for name in Finding.model_fields if name not in {"kind", "consumer", "type", "id", "key"}]
        return flat.select("kind", "consumer", "type", f.coalesce("text", key).alias("id"), key.alias("key"), *others)

    @property
    def counts(self) -> DataFrame:
        """By consumer, type and hour; beside them, the columns are the fields of `Counts`."""
        return self._found.groupBy("consumer", "type", "hour").agg(*_sums())

    def summary(self, examples: int = DEFAULT_EXAMPLES) -> Summary:
        """The counts by type and by hour, and some findings of each kind."""
        # One job for all three; of the last two, as many as one can look at.
        sets = [[], ["consumer", "type"], ["hour"]]
        counted = self._found.groupingSets(sets, "consumer", "type", "hour").agg(f.grouping_id().alias("set"), *_sums())
        place = f.row_number().over(
            Window.partitionBy("set").orderBy(f.desc_nulls_first("hour"), f.desc("messages"), "type")
        )
        rows = _plain(counted.withColumn("place", place).where(f.col("place") <= _MOST_ROWS), "hour").collect()
        totals, types, hours = ([_told(row) for row in rows if row.set == number] for number in (_ALL, _TYPE, _HOUR))
        return Summary.of(
            self.terms,
            totals=Counts(**_only(totals[0], Counts)) if totals else Counts(),
            types=[TypeCounts(**_only(each, TypeCounts)) for each in sorted(types, key=_most_first)],
            hours=[HourCounts(**_only(each, HourCounts)) for each in sorted(hours, key=_oldest_first)],
            findings=self._examples(examples),
        )

    def save(self, folder: Path, examples: int = DEFAULT_EXAMPLES) -> Summary:
        """Write `findings/` and `counts/` (Parquet), `summary.json` and `index.html` into a folder, over what was there.

        The page comes last: where it is new, so is all else.

        Raises:
            ConfigurationError: matplotlib is missing, which draws the plots.
            OSError: the folder can't be written to.
        """
        page = _page()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "index.html").unlink(missing_ok=True)
        for name, frame in (("findings", self.findings), ("counts", self.counts)):
            frame.write.mode("overwrite").parquet((folder / name).absolute().as_uri())
        summary = self.summary(examples)
        (folder / "summary.json").write_text(summary.model_dump_json(indent=2), encoding="utf-8")
        (folder / "index.html").write_text(page(summary), encoding="utf-8")
        return summary

    def close(self) -> None:
        """Let go of what Spark keeps of it."""
        self._found.unpersist()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _examples(self, most: int) -> list[Finding]:
        oldest = Window.partitionBy("kind").orderBy("sent_at", "claimed_at", "id")
        rows = self.findings.withColumn("place", f.row_number().over(oldest)).where(f.col("place") <= most)
        found = [_told(row) for row in _plain(rows, "sent_at", "claimed_at").collect()]
        kinds = list(Kind)
        found.sort(key=lambda each: (kinds.index(Kind(each["kind"])), each["place"]))
        return [Finding(**_only(each, Finding)) for each in found]


def _page() -> Callable[[Summary], str]:
    try:
        from idemp.spark.reconcile.page import page
    except ImportError as error:
        raise ConfigurationError(
            f"The page needs {error.name}.", fix="Install it: pip install 'idemp[spark]'. Nothing was read."
        ) from error
    return page


def _sums() -> list[Column]:
    """The fields of `Counts`. What is both a fate and a kind is counted as a fate."""
    fates, kinds = {fate.value for fate in Fate}, {kind.value for kind in Kind}
    numbers = {}
    for name in Counts.model_fields:
        if name in fates:
            numbers[name] = f.when(f.col("fate") == name, f.col("messages"))
        elif name in kinds:
            numbers[name] = f.when(f.array_contains("kinds", name), f.col("messages"))
        else:
            numbers[name] = f.col(name)
    return [f.coalesce(f.sum(number), f.lit(0)).alias(name) for name, number in numbers.items()]


def _plain(frame: DataFrame, *times: str) -> DataFrame:
    """With times as numbers: as times, Python would get them in its own zone, and without it."""
    return frame.withColumns({name: f.unix_micros(name) for name in times})


def _told(row: Row) -> dict[str, Any]:
    """A row of `_plain` with its times."""
    told: dict[str, Any] = row.asDict()
    for name in _TIMES & told.keys():
        if told[name] is not None:
            told[name] = _EPOCH + timedelta(microseconds=told[name])
    return told


def _only(told: dict[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    return {name: told[name] for name in model.model_fields}


def _most_first(told: dict[str, Any]) -> tuple[int, str, str]:
    return -told["messages"], told["consumer"], told["type"]


def _oldest_first(told: dict[str, Any]) -> tuple[bool, datetime]:
    return told["hour"] is None, told["hour"] or _EPOCH
