"""The data source `idemp`, as Spark knows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

from idemp.spark.reading.reader import Options, Reader
from idemp.spark.reading.views import view_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType


class InboxSource(DataSource):
    """`spark.read.format("idemp")`; `register` makes it known to a session."""

    @classmethod
    def name(cls) -> str:
        """What `format` calls it."""
        return "idemp"

    def schema(self) -> str:
        """The columns of the table that is asked for."""
        return view_of(Options.read(self.options).table).schema

    def reader(self, schema: StructType) -> Reader:
        """Of these columns. It takes no filters from Spark: 4.3.0 would apply them to later queries on the DataFrame."""
        return Reader(Options.read(self.options), schema)


def register(spark: SparkSession) -> None:
    """Make `spark.read.format("idemp")` known to a session. Repeating it is harmless."""
    spark.dataSource.register(InboxSource)
