"""How an archive run reads the inbox: everything as of one moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final

from idemp.spark.datasource import register
from idemp.spark.reading.arrow import is_postgresql
from idemp.spark.reading.secret import settings_with
from idemp.spark.reading.snapshots import Snapshot

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Read = Callable[[str, str, datetime], "DataFrame"]
"""A table of one consumer, of claims from before a moment."""

_LIFETIME: Final = timedelta(hours=6)


@dataclass(frozen=True, slots=True)
class Inbox:
    """Where Spark's tasks find the inbox: as the options of the data source say it.

    Attributes:
        url_file: a file with the database's URL; by default the settings of the tasks' own processes.
        schema: database schema of idemp's tables.
        prefix: prefix of idemp's tables.
    """

    url_file: str | None = None
    schema: str | None = None
    prefix: str | None = None

    @contextmanager
    def at_one_moment(self, spark: SparkSession) -> Iterator[Read]:
        """What reads the inbox as it is now.

        Without snapshots that can be shared, each table is read as of a moment of its own. Of what has expired nothing is
        changed any more, but for outputs that become confirmed.
        """
        register(spark)
        place = {"url_file": self.url_file, "schema": self.schema, "prefix": self.prefix}
        if is_postgresql(settings_with(**place).database_url):
            with Snapshot(**place, lifetime=_LIFETIME) as moment:
                yield lambda table, consumer, before: moment.read(
                    spark, table, consumer=consumer, before=before.isoformat()
                )
            return
        given = {name: value for name, value in place.items() if value is not None}
        yield (
            lambda table, consumer, before: (
                spark.read.format("idemp")
                .options(table=table, consumer=consumer, before=before.isoformat(), **given)
                .load()
            )
        )
