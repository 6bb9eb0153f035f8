"""The data source `idemp`, as Spark knows it."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pyspark.sql.datasource import DataSource

from idemp.spark.reading.reader import Options, Reader
from idemp.spark.reading.views import view_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

    from idemp.settings import Settings


class InboxSource(DataSource):
    """`spark.read.format("idemp")`; `register` makes it known to a session."""

    settings: ClassVar[Settings | None] = None
    """Where the database is, in a class of its own (`at`); else options and the tasks' own settings say it."""

    @classmethod
    def name(cls) -> str:
        """What `format` calls it."""
        return "idemp"

    def schema(self) -> str:
        """The columns of the table that is asked for."""
        return view_of(Options.read(self.options).table).schema

    def reader(self, schema: StructType) -> Reader:
        """Of these columns. It takes no filters from Spark: 4.3.0 would apply them to later queries on the DataFrame."""
        return Reader(Options.read(self.options), schema, self.settings)


def at(name: str, settings: Settings) -> type[InboxSource]:
    """The data source for one database, under another name.

    It is a class that no module has, so that it travels to the tasks with what it knows: no plan and no option shows it.
    """
    told = {"settings": settings, "name": classmethod(lambda _: name), "__module__": "__main__"}
    return type("InboxSourceAt", (InboxSource,), told)


def register(spark: SparkSession) -> None:
    """Make `spark.read.format("idemp")` known to a session. Repeating it is harmless."""
    spark.dataSource.register(InboxSource)
