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
of messages a transaction, and of tasks, into the rounds.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import uuid
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import SecretStr

from benchmarks import telling
from benchmarks.archived import CLAIMS, CLAIMS_WITH_EFFECTS, DUPLICATES, ORDER, SETS, WHERE, Place, order, timed
from benchmarks.figures import paired
from benchmarks.servers import Servers
from benchmarks.usage import Usage, watched
from idemp import App, Idempotent, Settings
from idemp.broker.memory import InMemoryBroker
from idemp.bulk import Bulk, Row
from idemp.spark import Summary, sink
from idemp.spark.datasource import register
from idemp.spark.reading.secret import told_by_file
from idemp.spark.session import session

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pyspark.sql import DataFrame


def variants(place: Place, messages: DataFrame, folder: Path) -> dict[str, Callable[[], Summary | None]]:
    """What is measured."""
    from pyspark.sql.functions import lit

    def through(of: DataFrame = messages, **options: Any) -> Callable[[], Summary]:
        told = {"parked": str(folder / "parked"), "run_name": "run", "database": SecretStr(place.url), **options}
        return lambda: sink(WHERE, **told).run(of)

    def atomic() -> None:
        with told_by_file(place.url) as url_file:
            told = {"parked": str(folder / "parked"), "sets": "benchmarks.archived:SETS", "url_file": str(url_file)}
            messages.write.format("idemp").mode("append").options(app=WHERE, **told).save()

    return {
        "claims alone": lambda: place.run(CLAIMS),
        "claims with effects": lambda: place.run(CLAIMS_WITH_EFFECTS),
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
ONLY_CLAIMS: Final = {"claims alone", "claims again", "adopt", "adopt with bodies"}
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
        seconds = timed(lambda: [bulk.run([row]) for row in rows])
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
                took = {name: timed(found[name])}
                _check(name, place)
            for again, run in AGAIN.get(name, {}).items():
                took[again] = timed(found[run])
                _check(name, place)
            if warm:  # the first round warms Spark up
                for measured, each in took.items():
                    seconds[measured].append(each)
    return seconds


def _check(name: str, place: Place) -> None:
    place.check(only_claims=name in ONLY_CLAIMS)


def used(place: Place, messages: DataFrame, folder: Path, name: str) -> tuple[float, Usage]:
    """Seconds of a variant, once, and what that used."""
    again = {name: run for runs in AGAIN.values() for name, run in runs.items()}
    if name not in again:
        place.empty()
    run = variants(place, messages, folder)[again.get(name, name)]
    with watched(place.server()) as usage:
        seconds = timed(run)
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
