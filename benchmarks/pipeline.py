"""Messages through Spark into PostgreSQL: `python -m benchmarks pipeline --rows 1000000 --rounds 5`.

A fifth of the messages are duplicates. The floor is PostgreSQL by itself: binary COPYs that were prepared before, into the same
temporary table, and the same statements as those of `idemp.bulk`, a piece a transaction on one connection (`two floors`: on two);
no Python a row, no file, no duplicate. Compared with it in each round, in random order and with empty tables: `adopt` (Spark reads
Parquet of ids, and claims), `adopt with bodies` (and compares them), `sets` (effect and output of each message in SQL), and `one by
one` (a transaction for each of a few messages, without Spark).
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
from pydantic import BaseModel
from sqlalchemy import text

from benchmarks.place import plain
from benchmarks.servers import Durable
from idemp import App, Context, Idempotent, Settings
from idemp.bulk import Bulk, Row, SqlSet
from idemp.bulk import sets as set_path
from idemp.bulk.rows import deliveries
from idemp.process import Process
from idemp.spark import session, sink
from idemp.sql.engine import Database
from idemp.sql.schema import upgrade
from idemp.sql.store import HEAD_START, SqlStore

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

APP = "benchmarks.pipeline:app"
ORDER = "bench.Order"
EFFECT = "INSERT INTO bench_effect (sku, amount) SELECT body ->> 'sku', (body ->> 'amount')::int FROM {fresh}"
SET = SqlSet(effects=[EFFECT], outputs="SELECT place, 'bench.Reserved' AS type, body FROM {fresh}")
GOALS = {  # ratios to others; 0 for no goal
    "adopt": {"floor of claims": 0.6},
    "adopt with bodies": {"floor of claims": 0.0},
    "sets": {"floor of effects": 0.8, "two floors": 0.0, "one by one": 50.0},
}
IDS = """
SELECT n, concat_ws('-', substr(stamp, 1, 8), substr(stamp, 9, 4), '7' || substr(own, 1, 3), '8' || substr(own, 4, 3),
    substr(own, 7, 12)) AS id, '{type}' AS type, concat('{{"sku": "sku-', n % 1000, '", "amount": ', n, '}}') AS body
FROM (SELECT id, id % {distinct} AS n, lpad(lower(hex(1767225600000 + (id % {distinct}) div 10)), 12, '0') AS stamp,
    md5(cast(id % {distinct} AS string)) AS own FROM range({rows}))
"""


class Order(BaseModel):
    __message_type__ = ORDER
    sku: str
    amount: int


app = App("bench")


@app.handler(Order, policy=Idempotent(retention="365d", late="handle"))
def reserve(message: Order, ctx: Context) -> Order:
    """Has the effect of the set, for `one by one`."""
    ctx.connection.execute(text("INSERT INTO bench_effect (sku, amount) VALUES (:sku, :amount)"), message.model_dump())
    return message


class Place:
    """A database, and a folder of messages."""

    def __init__(self, url: str, rows: int, folder: Path) -> None:
        self.url, self.rows, self.distinct, self.folder = url, rows, rows * 4 // 5, folder
        self.database = Database(url)
        upgrade(self.database)
        self.run("CREATE TABLE bench_effect (sku text, amount int)")
        app.process = Process(app.engine, Settings(database_url=url))
        self.store = SqlStore(self.database, "floor", HEAD_START)
        app.register(self.store)

    def run(self, statement: str) -> Any:
        with psycopg.connect(plain(self.url), autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchone() if cursor.description else None

    def empty(self) -> None:
        self.run("TRUNCATE idemp_inbox, idemp_output, idemp_pending, bench_effect")
        self.run("CHECKPOINT")

    def check(self, *, effects: bool) -> None:
        """Raise if a message was lost or doubled."""
        counts = self.run(
            "SELECT (SELECT count(*) FROM idemp_inbox), (SELECT count(*) FROM bench_effect), (SELECT count(*) FROM idemp_output)"
        )
        assert counts == (self.distinct, *([self.distinct] * 2 if effects else [0, 0])), f"the figures are void: {counts}"

    def messages(self, spark: SparkSession) -> DataFrame:
        """Write the messages once, and return them."""
        made = spark.sql(IDS.format(distinct=self.distinct, rows=self.rows, type=ORDER)).drop("n")
        made.write.mode("overwrite").parquet(str(self.folder / "log"))
        return spark.read.parquet(str(self.folder / "log"))


class Floor:
    """Prepared COPYs and statements."""

    def __init__(self, place: Place, messages: DataFrame, *, effects: bool) -> None:
        self.place, self.effects = place, effects
        handler = app.handlers[ORDER]
        self.statements = set_path.Statements(place.store, handler)
        found = {row.id: row for row in messages.collect()}
        rows = [Row(row.body.encode(), id, ORDER) for id, row in sorted(found.items())]
        size = set_path.PIECE if effects else set_path.ADOPTED
        self.pieces = []
        for start in range(0, len(rows), size):
            staged = [
                (number, each, handler.identify(each))
                for number, each in enumerate(deliveries("bench", rows[start : start + size]))
            ]
            self.pieces.append(set_path._packed(staged, SET if effects else None))  # type: ignore[arg-type]

    def run(self, connections: int) -> None:
        parts = [self.pieces[number::connections] for number in range(connections)]
        threads = [threading.Thread(target=self._run, args=(part,)) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _run(self, pieces: list[bytes]) -> None:
        assert SET.outputs is not None
        outputs = self.statements.store(SET.outputs.replace("{fresh}", set_path.STAGE), HEAD_START, queues=False)
        with psycopg.connect(plain(self.place.url)) as connection:
            for piece in pieces:
                connection.execute(self.statements.begin.encode())
                with connection.cursor().copy(self.statements.copy.encode()) as copy:
                    copy.write(piece)
                connection.execute(self.statements.claim.encode())
                if self.effects:
                    connection.execute(EFFECT.replace("{fresh}", set_path.STAGE).encode())
                    connection.execute(outputs.encode())
                connection.commit()


def one_by_one(place: Place, count: int) -> float:
    """Return seconds for all messages, extrapolated from those for some."""
    rows = [Row(b'{"sku": "sku-1", "amount": %d}' % number, f"alone-{number}", ORDER) for number in range(count)]
    with Bulk(app) as bulk:
        bulk.run(rows[:1])
        start = time.perf_counter()
        for row in rows[1:]:
            bulk.run([row])
        return (time.perf_counter() - start) / (count - 1) * place.rows


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks pipeline", description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", help="names of ways, by comma")
    parser.add_argument("--disk", type=Path, default=Path("/var/tmp"), help="folder that PostgreSQL and Spark write to")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.disk) as base, Durable(_folder(base)) as server, session("benchmark") as spark:
        taken = measure(
            spark, server.url, options.rows, options.rounds, Path(base), (options.only or "").split(",") if options.only else None
        )
    for name, seconds in taken.items():
        line = f"{name:18} {options.rows / statistics.median(seconds):9.0f} a second"
        for beside, wanted in GOALS.get(name, {}).items():
            if beside in taken:
                ratios = sorted(one / other for one, other in zip(taken[beside], seconds, strict=True))
                low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
                line += f"   / {beside} {middle:.2f} [{low:.2f}–{high:.2f}]" + (f", goal {wanted}" if wanted else "")
        print(line)


def _folder(base: str) -> Path:
    Path(base).chmod(0o755)
    return Path(base) / "postgresql"


def measure(
    spark: SparkSession, url: str, rows: int, rounds: int, folder: Path, only: list[str] | None
) -> dict[str, list[float]]:
    """Return seconds of each way and round."""
    place = Place(url, rows, folder)
    messages = place.messages(spark)
    parked = str(folder / "parked")
    ways: dict[str, tuple[bool | None, Callable[[], Any]]] = {
        "adopt": (
            False,
            lambda: sink(APP, parked=parked, adopt=True).run(messages.selectExpr("id", "type", "cast(NULL AS binary) body")),
        ),
        "adopt with bodies": (False, lambda: sink(APP, parked=parked, adopt=True).run(messages)),
        "sets": (True, lambda: sink(APP, parked=parked, sets={ORDER: SET}).run(messages)),
    }
    if only is None:
        claims, effects = (Floor(place, messages, effects=each) for each in (False, True))
        ways |= {
            "floor of claims": (False, lambda: claims.run(1)),
            "floor of effects": (True, lambda: effects.run(1)),
            "two floors": (True, lambda: effects.run(2)),
            "one by one": (None, lambda: one_by_one(place, 1_000)),
        }
    names = [name for name in ways if only is None or name in only]
    taken: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):  # the first one fills caches
        for name in random.sample(names, len(names)):
            counted, way = ways[name]
            place.empty()
            start = time.perf_counter()
            said = way()
            seconds = said if counted is None else time.perf_counter() - start
            if counted is not None:
                place.check(effects=counted)
            if number or rounds == 0:
                taken[name].append(seconds)
            print(f"round {number} of {rounds}: {name} {seconds:.1f} s", file=sys.stderr)
    place.database.close()
    return taken
