"""`python -m benchmarks pipeline`: messages a second from Parquet through Spark into PostgreSQL, beside the floor.

The floor is PostgreSQL by itself, with the same tables, keys and rows: one statement that claims all ids of a table that is
there already (`claims alone`), and one that also writes effect, output and pending row (`claims with effects`). Against
these stand the sink that only claims (`adopt`), the one whose handlers are SQL over the new rows of a chunk (`sets`), the
same in one transaction for all messages (`atomic`), the one that runs a Python handler for each message (`handlers`), and
all of `sets` once more (`replay`), or left out ahead of the tasks (`prefilter`: but for the duplicates, which stand
elsewhere). Rounds are interleaved in random order; the tables are empty before each. A fifth of the messages are duplicates.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from pydantic import SecretStr
from sqlalchemy import text

from benchmarks import telling
from benchmarks.figures import paired
from benchmarks.servers import Servers
from idemp import App, Context, Idempotent
from idemp.bulk import SqlSet
from idemp.inbox.sql import Tables, create_engine_safely
from idemp.inbox.sql.schema import upgrade
from idemp.spark import Columns, Summary, read_messages, sink
from idemp.spark.datasource import register
from idemp.spark.reading.secret import told_by_file
from idemp.spark.session import session

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pyspark.sql import DataFrame
    from sqlalchemy import Engine

WHERE: Final = "benchmarks.pipeline:app"
ORDER: Final = "shop.Order"
DUPLICATES: Final = 0.2

app = App("shop", broker="local://unused.db")


@app.handler(dict, type=ORDER, policy=Idempotent(batch=1000))
def order(message: dict[str, Any], ctx: Context) -> None:
    """The same effect and output as the set has."""
    ctx.connection.execute(text("INSERT INTO sale (sku) VALUES (:sku)"), {"sku": message["sku"]})
    ctx.send({"sku": message["sku"]}, to="stock", type="stock.Reserve")


SETS: Final = {
    ORDER: SqlSet(
        effects=["INSERT INTO sale (sku) SELECT payload ->> 'sku' FROM {fresh}"],
        outputs="SELECT place, 'stock.Reserve' AS type, jsonb_build_object('sku', payload ->> 'sku') AS body, "
        "'stock' AS queue FROM {fresh}",
    )
}
_CLAIM: Final = """
    INSERT INTO idemp_inbox (message_key, consumer_id, type_id, claimed_at, fingerprint)
    SELECT DISTINCT ON (message_key) message_key, 1, 1, now(), fingerprint FROM arrived ORDER BY message_key
    ON CONFLICT DO NOTHING
"""
_CLAIM_WITH_EFFECTS: Final = f"""
    WITH fresh AS ({_CLAIM} RETURNING message_key),
    effect AS (INSERT INTO sale (sku) SELECT 'sku' FROM fresh),
    out AS (
        INSERT INTO idemp_output (output_id, message_key, consumer_id, ordinal, kind, exchange, routing_key, envelope, body)
        SELECT message_key, message_key, 1, 0, 'send', '', 'stock', '{{"type": "stock.Reserve"}}', '\\x7b7d' FROM fresh
    )
    INSERT INTO idemp_pending (output_id, message_key, consumer_id, ordinal, attempts, due_at)
    SELECT message_key, message_key, 1, 0, 0, now() FROM fresh
"""


class Place:
    """The database, and the archive as a table in it."""

    def __init__(self, url: str, rows: int) -> None:
        self.url = url
        self.engine: Engine = create_engine_safely(url)
        upgrade(self.engine, Tables())
        with self.engine.begin() as connection:
            connection.execute(text("CREATE TABLE sale (id bigint GENERATED ALWAYS AS IDENTITY, sku text NOT NULL)"))
            connection.execute(text("CREATE UNLOGGED TABLE arrived (message_key uuid NOT NULL, fingerprint bytea)"))
        self.ids = archived(rows)
        with self.engine.connect() as connection, connection.connection.cursor() as cursor:
            with cursor.copy("COPY arrived FROM STDIN") as copy:
                for each in self.ids:
                    copy.write_row((each, b"\0" * 32))
            connection.connection.commit()

    def empty(self) -> None:
        """As before the first message."""
        with self.engine.begin() as connection:
            connection.execute(text("TRUNCATE idemp_inbox, idemp_output, idemp_pending, sale"))
        with self.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text("CHECKPOINT"))

    def run(self, statement: str) -> None:
        """One statement, committed."""
        with self.engine.begin() as connection:
            connection.execute(text(statement))

    def counts(self) -> tuple[int, int]:
        """Claims and effects."""
        with self.engine.connect() as connection:
            claims, effects = (
                connection.scalars(text(f"SELECT count(*) FROM {table}")).one() for table in ("idemp_inbox", "sale")
            )
        return claims, effects


def archived(rows: int) -> list[UUID]:
    """Random ids, a fifth of them for the second time."""
    dice = random.Random(7)
    first = [UUID(int=dice.getrandbits(128), version=4) for _ in range(round(rows * (1 - DUPLICATES)))]
    ids = first + dice.choices(first, k=rows - len(first))
    dice.shuffle(ids)
    return ids


def variants(place: Place, messages: DataFrame, folder: Path) -> dict[str, Callable[[], Summary | None]]:
    """What is measured."""

    def through(**options: Any) -> Callable[[], Summary]:
        told = {"parked": str(folder / "parked"), "run_name": "run", "database": SecretStr(place.url), **options}
        return lambda: sink(WHERE, **told).run(messages)

    def atomic() -> None:
        with told_by_file(place.url) as url_file:
            told = {"parked": str(folder / "parked"), "sets": "benchmarks.pipeline:SETS", "url_file": str(url_file)}
            messages.write.format("idemp").mode("append").options(app=WHERE, **told).save()

    return {
        "claims alone": lambda: place.run(_CLAIM),
        "claims with effects": lambda: place.run(_CLAIM_WITH_EFFECTS),
        "adopt": through(adopt=True),
        "sets": through(sets=SETS),
        "atomic": atomic,
        "handlers": through(),
        "prefilter": through(sets=SETS, prefilter=True),
    }


RATIOS: Final = (
    ("adopt", "claims alone", 0.6),
    ("sets", "claims with effects", 0.5),
    ("atomic", "sets", 0.75),
    ("replay", "claims alone", 0.5),
    ("prefilter", "replay", 1.0),
)


def measure(place: Place, messages: DataFrame, options: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    """Seconds of each variant, by round."""
    found = variants(place, messages, folder)
    chosen = ["claims alone", "claims with effects", "adopt", "sets", *(["handlers"] if options.handlers else [])]
    seconds: dict[str, list[float]] = {name: [] for name in (*chosen, "replay", "prefilter")}
    for warm in range(options.rounds + 1):
        for name in random.sample(chosen, len(chosen)):
            place.empty()
            took = {name: _timed(found[name])}
            _check(name, place)
            if name == "sets":
                for again, run in (("replay", found[name]), ("prefilter", found["prefilter"])):
                    took[again] = _timed(run)
                    _check(name, place)
            if warm:  # the first round warms Spark up
                for measured, each in took.items():
                    seconds[measured].append(each)
    return seconds


def _timed(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _check(name: str, place: Place) -> None:
    distinct = len(set(place.ids))
    effects = 0 if name in {"adopt", "claims alone"} else distinct
    if place.counts() != (distinct, effects):
        raise RuntimeError(
            f"the figures are void: {name} left {place.counts()} claims and effects, not {distinct}, {effects}"
        )


def main(arguments: Sequence[str]) -> int:
    """Run it; print a line each, or JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks pipeline", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--handlers", action="store_true", help="measure a Python handler for each message, too")
    telling.add_options(parser)
    options = parser.parse_args(arguments)
    with Servers() as servers, tempfile.TemporaryDirectory() as scratch, session("benchmark") as spark:
        folder = Path(scratch)
        place = Place(servers.database("postgresql"), options.rows)
        rows = [(str(each), ORDER, '{"sku": "sku"}') for each in place.ids]
        spark.createDataFrame(rows, "id STRING, type STRING, body STRING").write.parquet(str(folder / "archive"))
        register(spark)
        messages = read_messages(spark, [str(folder / "archive")], "parquet", Columns())
        seconds = measure(place, messages, options, folder)
    rates = {name: telling.figure([options.rows / each for each in own], "messages/s") for name, own in seconds.items()}
    ratios = {
        f"{name} / {floor}": telling.goal(paired(seconds[floor], seconds[name]), target)
        for name, floor, target in RATIOS
    }
    where = f"{options.rows:,} messages in Parquet with {DUPLICATES:.0%} duplicates, {options.rounds} rounds"
    return telling.tell("pipeline", telling.found(where, rates, ratios), options)
