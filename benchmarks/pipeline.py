"""`python -m benchmarks pipeline`: messages a second from Parquet through Spark into PostgreSQL, beside the floor.

The floor is PostgreSQL by itself, with the same tables, keys and rows: one statement that claims all ids of a table that is
there already (`claims alone`), the same once more (`claims again`), and one that also writes effect, output and pending row,
as long as those of idemp (`claims with effects`). They read no file, and know no duplicate but by the key. Against these
stand the sink that only claims ids (`adopt`), the same with the fingerprints of bodies (`adopt with bodies`), the one whose
handlers are SQL over the new rows of a chunk (`sets`), the same in one transaction for all messages (`atomic`), the one that
runs a Python handler for each message (`handlers`), a transaction for each of a few messages, as a worker's without batches
(`one by one`), all of `sets` once more (`replay`), or left out ahead of the tasks (`prefilter`: but for the duplicates,
which stand elsewhere). Rounds are interleaved in random order; the tables are empty before each. A fifth of the messages are
duplicates.

In the end each runs once more, and the CPU time of JVM, Python processes and server is told. `--designs` takes other numbers
of messages a transaction, and of tasks, into the rounds. `--far 10000000` also sends so many through `sets`, once, and tells
what a message cost beside one of `--rows`, and the most memory that the JVM (driver and executor in one) and all Python
processes took.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
import uuid
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil
from pydantic import SecretStr
from sqlalchemy import text

from benchmarks import telling
from benchmarks.figures import paired
from benchmarks.servers import Servers
from benchmarks.usage import OURS, Usage, watched
from idemp import App, Context, Idempotent, Settings
from idemp.broker.memory import InMemoryBroker
from idemp.bulk import Bulk, Row, SqlSet
from idemp.inbox.sql import Tables, create_engine_safely
from idemp.inbox.sql.schema import upgrade
from idemp.spark import Columns, Summary, read_messages, sink
from idemp.spark.datasource import register
from idemp.spark.reading.secret import told_by_file
from idemp.spark.session import session

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
    INSERT INTO idemp_inbox
        (message_key, consumer_id, type_id, worker_id, claimed_at, fingerprint, original_id, source_position)
    SELECT key, 1, 1, 1, now(), {fingerprint}, NULL, position FROM first ORDER BY key
    ON CONFLICT (consumer_id, message_key) DO NOTHING
"""
_FIRST: Final = (
    "first AS (SELECT DISTINCT ON (key) key, position, fingerprint, body FROM arrived ORDER BY key, position)"
)
_CLAIMS: Final = f"WITH {_FIRST} {_CLAIM.format(fingerprint='NULL')}"
_CLAIMS_WITH_EFFECTS: Final = f"""
    WITH {_FIRST}, fresh AS ({_CLAIM.format(fingerprint="fingerprint")} RETURNING message_key),
    effect AS (
        INSERT INTO sale (sku) SELECT convert_from(body, 'UTF8')::jsonb ->> 'sku' FROM first JOIN fresh ON key = message_key
    ), sent AS (
        INSERT INTO idemp_output
            (output_id, message_key, consumer_id, ordinal, kind, exchange, routing_key, envelope, body)
        SELECT gen_random_uuid(), message_key, 1, 0, 'send', '', 'stock', '{{envelope}}',
            convert_to(jsonb_build_object('sku', convert_from(body, 'UTF8')::jsonb ->> 'sku')::text, 'UTF8')
        FROM first JOIN fresh ON key = message_key RETURNING output_id, message_key
    )
    INSERT INTO idemp_pending (output_id, ordinal, consumer_id, message_key, attempts, due_at)
    SELECT output_id, 0, 1, message_key, 0, now() FROM sent
"""
_ENVELOPE: Final = json.dumps({
    "type": "stock.Reserve", "content_type": "application/json", "correlation_id": str(uuid.UUID(int=0)),
    "headers": {"idemp-causation-id": str(uuid.UUID(int=0)), "idemp-hops": 1}, "mandatory": True, "delay": 0.0,
})  # fmt: skip


# The same ids in both places: a fifth of the numbers have one that another has.
_NUMBER_OF: Final = "CASE WHEN number < {first} THEN number ELSE (number * 7919) % {first} END"
_IDS: Final = """
    INSERT INTO arrived
    SELECT overlay(md5(CAST({number} AS text)) PLACING '4' FROM 13)::uuid,
        'part-00000-00000000-0000-0000-0000-000000000000-c000.snappy.parquet#' || number,
        decode(repeat('00', 19), 'hex'), convert_to('{{"sku": "sku"}}', 'UTF8')
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
        self.run("CREATE UNLOGGED TABLE arrived (key uuid NOT NULL, position text, fingerprint bytea, body bytea)")
        self.run(_IDS.format(number=_number(rows), last=rows - 1))
        with self.engine.connect() as connection:
            self.distinct = connection.scalars(text("SELECT count(DISTINCT key) FROM arrived")).one()

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
        """One statement, committed; without JIT, as idemp works."""
        with self.engine.begin() as connection:
            connection.exec_driver_sql("SET LOCAL jit = off")
            connection.exec_driver_sql(statement, execution_options={"no_parameters": True})

    def server(self) -> int:
        """The number of the server's first process."""
        with self.engine.connect() as connection:
            own = connection.scalars(text("SELECT pg_backend_pid()")).one()
        return psutil.Process(own).ppid()

    def counts(self) -> tuple[int, int]:
        """Claims and effects."""
        with self.engine.connect() as connection:
            claims, effects = (
                connection.scalars(text(f"SELECT count(*) FROM {table}")).one() for table in ("idemp_inbox", "sale")
            )
        return claims, effects


def _number(rows: int) -> str:
    return _NUMBER_OF.format(first=round(rows * (1 - DUPLICATES)))


def variants(place: Place, messages: DataFrame, folder: Path) -> dict[str, Callable[[], Summary | None]]:
    """What is measured."""
    from pyspark.sql.functions import lit

    def through(of: DataFrame = messages, **options: Any) -> Callable[[], Summary]:
        told = {"parked": str(folder / "parked"), "run_name": "run", "database": SecretStr(place.url), **options}
        return lambda: sink(WHERE, **told).run(of)

    def atomic() -> None:
        with told_by_file(place.url) as url_file:
            told = {"parked": str(folder / "parked"), "sets": "benchmarks.pipeline:SETS", "url_file": str(url_file)}
            messages.write.format("idemp").mode("append").options(app=WHERE, **told).save()

    return {
        "claims alone": lambda: place.run(_CLAIMS),
        "claims with effects": lambda: place.run(_CLAIMS_WITH_EFFECTS.replace("{envelope}", _ENVELOPE)),
        "adopt": through(adopt=True, of=messages.withColumn("body", lit(None).cast("binary"))),
        "adopt with bodies": through(adopt=True),
        "sets": through(sets=SETS),
        "atomic": atomic,
        "handlers": through(),
        "prefilter": through(sets=SETS, prefilter=True),
        **{f"sets, {name}": through(sets=SETS, **options) for name, options in DESIGNS.items()},
    }


DESIGNS: Final = {
    "10,000 a transaction": {"rows": 10_000},
    "250,000 a transaction": {"rows": 250_000},
    "one task": {"partitions": 1},
    "four tasks": {"partitions": 4},
}
"""Beside what is taken: 50,000 messages a transaction at most, and as many tasks as cores."""
ALONE: Final = "one by one"
AGAIN: Final = {"claims alone": {"claims again": "claims alone"}, "sets": {"replay": "sets", "prefilter": "prefilter"}}
"""What is measured right after something else, in the tables as that left them, and which of the variants it is."""
PROFILED: Final = (
    "claims alone",
    "claims again",
    "claims with effects",
    "adopt",
    "adopt with bodies",
    "atomic",
    "sets",
    "replay",
)
RATIOS: Final = (
    ("adopt", "claims alone", 0.6),
    ("sets", "claims with effects", 0.5),
    ("atomic", "claims with effects", 0.4),
    ("replay", "claims again", 0.5),
    ("sets", ALONE, 50.0),
    ("prefilter", "replay", 1.0),
)


def one_by_one(place: Place, count: int) -> float:
    """Seconds that all messages would take with a transaction for each, by those that so many take."""
    rows = [
        Row(id=str(uuid.uuid4()), type=ORDER, position=f"alone#{number}", body=b'{"sku": "sku"}')
        for number in range(count)
    ]
    with closing(App("shop", database=place.engine, broker=InMemoryBroker(), settings=Settings())) as own:
        own.handler(dict, type=ORDER, policy=Idempotent())(order)
        bulk = Bulk(own)
        bulk.start()
        seconds = _timed(lambda: [bulk.run([row]) for row in rows])
    if place.counts() != (count, count):
        raise RuntimeError(f"the figures are void: {count} messages came to {place.counts()} claims and effects")
    return seconds / count * place.rows


def measure(place: Place, messages: DataFrame, options: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    """Seconds of each variant, by round."""
    found = variants(place, messages, folder)
    chosen = [
        "claims alone",
        "claims with effects",
        "adopt",
        "adopt with bodies",
        "sets",
        "atomic",
        ALONE,
        *(["handlers"] if options.handlers else []),
        *(f"sets, {name}" for name in (DESIGNS if options.designs else ())),
    ]
    seconds: dict[str, list[float]] = {
        name: [] for name in (*chosen, *(name for runs in AGAIN.values() for name in runs))
    }
    for warm in range(options.rounds + 1):
        for name in random.sample(chosen, len(chosen)):
            place.empty()
            if name == ALONE:
                took = {name: one_by_one(place, options.alone)}
            else:
                took = {name: _timed(found[name])}
                _check(name, place)
            for again, run in AGAIN.get(name, {}).items():
                took[again] = _timed(found[run])
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
    effects = 0 if name.startswith(("adopt", "claims a")) else place.distinct
    if place.counts() != (place.distinct, effects):
        raise RuntimeError(
            f"the figures are void: {name} left {place.counts()} claims and effects, not {place.distinct}, {effects}"
        )


def used(place: Place, messages: DataFrame, folder: Path, name: str) -> tuple[float, Usage]:
    """Seconds of a variant, once, and what that used."""
    again = {name: run for runs in AGAIN.values() for name, run in runs.items()}
    if name not in again:
        place.empty()
    run = variants(place, messages, folder)[again.get(name, name)]
    with watched(place.server()) as usage:
        seconds = _timed(run)
    _check(name, place)
    return seconds, usage


def main(arguments: Sequence[str]) -> int:
    """Run it; print a line each, or JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks pipeline", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--alone", type=int, default=3000, help="messages in a transaction each, per round")
    parser.add_argument("--handlers", action="store_true", help="measure a Python handler for each message, too")
    parser.add_argument("--designs", action="store_true", help="measure `sets` with other transactions and tasks, too")
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
        for name in PROFILED:
            usage = used(place, messages, folder, name)[1]
            for whose, own in usage.seconds.items():
                figures[f"CPU of {name}, {whose}"] = telling.figure([own / place.rows * 1e6], "µs a message")
        if options.far:
            near = used(place, messages, folder, "sets")[1]
            place.empty()
            further = Place(servers.database("postgresql"), options.far)
            took, usage = used(further, further.archived(spark, str(folder / "far")), folder, "sets")
            each = took / options.far / (statistics.median(seconds["sets"]) / options.rows)
            goals[f"a message of {options.far:,} / one of {options.rows:,}"] = telling.goal([each], 1.2, at_most=True)
            for kind in OURS:
                for rows, size in ((options.rows, near), (options.far, usage)):
                    figures[f"memory at {rows:,}, {kind}"] = telling.figure([size.memory[kind]], "MiB")
    where = f"{options.rows:,} messages in Parquet with {DUPLICATES:.0%} duplicates, {options.rounds} rounds"
    return telling.tell("pipeline", telling.found(where, figures, goals), options)


def told(place: Place, seconds: dict[str, list[float]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Rates and ratios."""
    rates = {name: telling.figure([place.rows / each for each in own], "messages/s") for name, own in seconds.items()}
    designs = [(name, "claims with effects", None) for name in seconds if name.startswith("sets, ")]
    ratios = {
        f"{name} / {floor}": telling.goal(paired(seconds[floor], seconds[name]), target)
        for name, floor, target in (*RATIOS, *designs)
    }
    return rates, ratios
