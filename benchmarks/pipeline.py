"""`python -m benchmarks pipeline`: messages a second from Parquet through Spark into PostgreSQL, beside the floor.

The floor is PostgreSQL by itself, with the same tables, keys and rows: one statement that claims all ids of a table that is
there already (`claims alone`), and one that also writes effect, output and pending row (`claims with effects`). Against
these stand the sink that only claims (`adopt`), the one whose handlers are SQL over the new rows of a chunk (`sets`), the
same in one transaction for all messages (`atomic`), the one that runs a Python handler for each message (`handlers`), and
all of `sets` once more (`replay`), or left out ahead of the tasks (`prefilter`: but for the duplicates, which stand
elsewhere). Rounds are interleaved in random order; the tables are empty before each. A fifth of the messages are duplicates.

`--far 10000000` also sends so many through `sets`, once, and tells what a message cost beside one of `--rows`, and the most
memory that the JVM (driver and executor in one) and all Python processes took.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil
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
    from collections.abc import Callable, Iterator, Sequence

    from pyspark.sql import DataFrame, SparkSession
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


# The same ids in both places: a fifth of the numbers have one that another has.
_NUMBER_OF: Final = "CASE WHEN number < {first} THEN number ELSE (number * 7919) % {first} END"
_IDS: Final = """
    INSERT INTO arrived
    SELECT overlay(md5(CAST({number} AS text)) PLACING '4' FROM 13)::uuid, decode(repeat('00', 32), 'hex')
    FROM generate_series(CAST(0 AS bigint), {last}) AS number ORDER BY md5(CAST(-number AS text))
"""
_ARCHIVED: Final = """
    SELECT regexp_replace(hex, '(.{{8}})(.{{4}}).(.{{3}})(.{{4}})(.*)', '$1-$2-4$3-$4-$5') AS id,
        '{type}' AS type, '{{"sku": "sku"}}' AS body
    FROM (SELECT md5(CAST({number} AS string)) AS hex, number FROM range({rows}) AS numbers (number))
    ORDER BY md5(CAST(-number AS string))
"""


class Place:
    """The database, and as many messages as a table in it.

    Args:
        url: the database.
        rows: messages, a fifth of them duplicates.
    """

    def __init__(self, url: str, rows: int) -> None:
        self.url = url
        self.rows = rows
        self.engine: Engine = create_engine_safely(url)
        upgrade(self.engine, Tables())
        self.run("CREATE TABLE sale (id bigint GENERATED ALWAYS AS IDENTITY, sku text NOT NULL)")
        self.run("CREATE UNLOGGED TABLE arrived (message_key uuid NOT NULL, fingerprint bytea)")
        self.run(_IDS.format(number=_number(rows), last=rows - 1))
        with self.engine.connect() as connection:
            self.distinct = connection.scalars(text("SELECT count(DISTINCT message_key) FROM arrived")).one()

    def archived(self, spark: SparkSession, path: str) -> DataFrame:
        """The same messages, in Parquet."""
        statement = _ARCHIVED.format(number=_number(self.rows), rows=self.rows, type=ORDER)
        spark.sql(statement).write.parquet(path)
        return read_messages(spark, [path], "parquet", Columns())

    def empty(self) -> None:
        """As before the first message."""
        self.run("TRUNCATE idemp_inbox, idemp_output, idemp_pending, sale")
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


def _number(rows: int) -> str:
    return _NUMBER_OF.format(first=round(rows * (1 - DUPLICATES)))


@dataclass
class Memory:
    """The most that was resident at one time, MiB, what processes share counted once (PSS of Linux).

    Attributes:
        jvm: of Java.
        python: of all Python processes together.
    """

    jvm: float = 0.0
    python: float = 0.0


@contextmanager
def watched(seconds: float = 0.5) -> Iterator[Memory]:
    """Looks at this process and all below it, again and again until the block ends."""
    seen, stop = Memory(), threading.Event()

    def look() -> None:
        own = psutil.Process()
        while not stop.wait(seconds):
            sizes = {"java": 0, "python": 0}
            for each in (own, *own.children(recursive=True)):
                try:
                    kind = next((kind for kind in sizes if kind in each.name()), None)
                    sizes[kind or "java"] += each.memory_full_info().pss if kind else 0
                except (psutil.NoSuchProcess, psutil.AccessDenied):
                    continue
            seen.jvm = max(seen.jvm, sizes["java"] / 2**20)
            seen.python = max(seen.python, sizes["python"] / 2**20)

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield seen
    finally:
        stop.set()
        watcher.join()


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
    ("atomic", "claims with effects", 0.4),
    ("replay", "claims alone", 0.5),
    ("prefilter", "replay", 1.0),
)


def measure(place: Place, messages: DataFrame, options: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    """Seconds of each variant, by round."""
    found = variants(place, messages, folder)
    chosen = [
        "claims alone",
        "claims with effects",
        "adopt",
        "sets",
        "atomic",
        *(["handlers"] if options.handlers else []),
    ]
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
    effects = 0 if name in {"adopt", "claims alone"} else place.distinct
    if place.counts() != (place.distinct, effects):
        raise RuntimeError(
            f"the figures are void: {name} left {place.counts()} claims and effects, not {place.distinct}, {effects}"
        )


def far(place: Place, messages: DataFrame, folder: Path) -> tuple[float, Memory]:
    """Seconds of `sets`, once, and the memory that it took."""
    place.empty()
    with watched() as memory:
        seconds = _timed(variants(place, messages, folder)["sets"])
    _check("sets", place)
    return seconds, memory


def main(arguments: Sequence[str]) -> int:
    """Run it; print a line each, or JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks pipeline", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--handlers", action="store_true", help="measure a Python handler for each message, too")
    parser.add_argument("--far", type=int, default=0, help="so many messages once, for the cost of one and the memory")
    telling.add_options(parser)
    options = parser.parse_args(arguments)
    with Servers() as servers, tempfile.TemporaryDirectory() as scratch, session("benchmark") as spark:
        folder = Path(scratch)
        register(spark)
        place = Place(servers.database("postgresql"), options.rows)
        messages = place.archived(spark, str(folder / "archive"))
        seconds = measure(place, messages, options, folder)
        figures, goals = told(place, seconds)
        if options.far:
            near_memory = far(place, messages, folder)[1]
            place.empty()
            further = Place(servers.database("postgresql"), options.far)
            took, memory = far(further, further.archived(spark, str(folder / "far")), folder)
            each = took / options.far / (statistics.median(seconds["sets"]) / options.rows)
            goals[f"a message of {options.far:,} / one of {options.rows:,}"] = telling.goal([each], 1.2, at_most=True)
            for kind in ("jvm", "python"):
                for rows, size in ((options.rows, near_memory), (options.far, memory)):
                    figures[f"memory at {rows:,}, {kind}"] = telling.figure([getattr(size, kind)], "MiB")
    where = f"{options.rows:,} messages in Parquet with {DUPLICATES:.0%} duplicates, {options.rounds} rounds"
    return telling.tell("pipeline", telling.found(where, figures, goals), options)


def told(place: Place, seconds: dict[str, list[float]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Rates and ratios."""
    rates = {name: telling.figure([place.rows / each for each in own], "messages/s") for name, own in seconds.items()}
    ratios = {
        f"{name} / {floor}": telling.goal(paired(seconds[floor], seconds[name]), target)
        for name, floor, target in RATIOS
    }
    return rates, ratios
