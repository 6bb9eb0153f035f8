"""`python -m benchmarks bulk`: what a chunk costs on PostgreSQL, beside the statements that do the same writes there.

The floor has the messages in a table of its own already, analysed, with the same kind of key, and says INSERT … SELECT
into the same tables, without JIT as idemp does: it reads no file, parses no JSON but what the effect takes from it, and
knows no duplicate but by the key. Blocks are interleaved in random order, each with ids of its own; duplicates are of ids
that came in earlier rounds. Ratios are of the same round. In the end rows are counted: a run that lost or repeated anything
has no figures.

    claim      floor: claims alone                        adopt: the same from an Arrow table, bodies left out
    work       floor: claim, effect, output, pending row   set: the same by `SqlSet`; function: by `ArrowSet`;
                                                           rows: by a handler of single messages
    replay     set: the same chunks again, all of them replays
    one by one a transaction for each message, as a worker's without batches
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import uuid
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from sqlalchemy import Engine, text

from benchmarks import telling
from benchmarks.figures import paired
from benchmarks.servers import Servers
from idemp import App, Context, Idempotent, Settings
from idemp.broker.memory import InMemoryBroker
from idemp.bulk import ArrowSet, Bulk, Came, Report, Row, SqlSet, setwise
from idemp.inbox.sql import Tables, create_engine_safely
from idemp.inbox.sql.schema import upgrade

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from idemp.context import BatchContext

TYPE: Final = "shop.Pay"
TARGETS: Final = {
    "adopt / floor of claims": 0.6, "set / floor of work": 0.5, "replay / floor of work": 0.5,
}  # fmt: skip
OTHERS: Final = ("function / floor of work", "rows / floor of work", "set / one by one", "rows / one by one")
DESIGNS: Final = {"2,500 rows at once": 2_500, "the chunk at once": sys.maxsize}
"""Pieces of a chunk, beside those that idemp takes; the next piece is decoded while the server claims one."""
TABLES: Final = """
    CREATE TABLE payment (id text PRIMARY KEY, amount integer NOT NULL);
    CREATE UNLOGGED TABLE given (key uuid, id text, position text, fingerprint bytea, body bytea);
"""
FLOOR_OF_CLAIMS: Final = """
    INSERT INTO idemp_inbox
        (message_key, consumer_id, type_id, worker_id, claimed_at, fingerprint, original_id, source_position)
    SELECT key, 1, 1, 1, now(), {fingerprint}, NULL, position FROM given ORDER BY key
    ON CONFLICT (consumer_id, message_key) DO NOTHING
"""
FLOOR_OF_WORK: Final = """
    WITH fresh AS ({claims} RETURNING message_key),
    paid AS (
        INSERT INTO payment SELECT id, (convert_from(body, 'UTF8')::jsonb ->> 'amount')::int
        FROM given JOIN fresh ON key = message_key
    ), sent AS (
        INSERT INTO idemp_output
            (output_id, message_key, consumer_id, ordinal, kind, exchange, routing_key, envelope, body)
        SELECT gen_random_uuid(), message_key, 1, 0, 'publish', 'idemp', 'shop.Paid', '{envelope}',
            convert_to(jsonb_build_object('id', id)::text, 'UTF8')
        FROM given JOIN fresh ON key = message_key RETURNING output_id, message_key
    )
    INSERT INTO idemp_pending (output_id, ordinal, consumer_id, message_key, attempts, due_at)
    SELECT output_id, 0, 1, message_key, 0, now() FROM sent
"""
ENVELOPE: Final = json.dumps({
    "type": "shop.Paid", "content_type": "application/json", "correlation_id": str(uuid.UUID(int=0)),
    "headers": {"idemp-causation-id": str(uuid.UUID(int=0)), "idemp-hops": 1}, "mandatory": True, "delay": 0.0,
})  # fmt: skip
PAY: Final = SqlSet(
    effects=["INSERT INTO payment (id, amount) SELECT id, (payload ->> 'amount')::int FROM {fresh}"],
    outputs="SELECT place, 'shop.Paid' AS type, jsonb_build_object('id', id) AS body FROM {fresh}",
)


def pay(table: pa.Table, ctx: BatchContext) -> pa.Table:
    """What `PAY` does, as a function."""
    ids = table.column("id").to_pylist()
    amounts = [json.loads(body)["amount"] for body in table.column("body").to_pylist()]
    driver: Any = ctx.connection.connection.driver_connection
    with driver.cursor() as cursor, cursor.copy("COPY payment FROM STDIN") as copy:
        copy.write("".join(f"{each}\t{amount}\n" for each, amount in zip(ids, amounts, strict=True)))
    bodies = [json.dumps({"id": each}) for each in ids]
    return pa.table({"place": table.column("place"), "type": ["shop.Paid"] * len(ids), "body": bodies})


class Place:
    """One database, and the ways to get messages into it.

    Args:
        url: of a new one.
        share: of duplicates among messages.
    """

    def __init__(self, url: str, share: float) -> None:
        self.engine = create_engine_safely(url)
        upgrade(self.engine, Tables())
        with self.engine.begin() as connection:
            connection.exec_driver_sql(TABLES)
        self._share = share
        self.app = app_on(self.engine)
        self.adopting, self.by_set = Bulk(self.app, adopt=True), Bulk(self.app, sets={TYPE: PAY})
        self.by_rows, self.by_function = Bulk(self.app), Bulk(self.app, sets={TYPE: ArrowSet(pay)})
        self.by_rows.start()
        self._known: list[str] = []
        self._handled: list[str] = []

    def close(self) -> None:
        """Close what is open."""
        self.app.close()
        self.engine.dispose()

    def rows(self, count: int) -> list[Row]:
        """A chunk: new ids, and some that came in an earlier round."""
        fresh = [str(uuid.uuid4()) for _ in range(count)]
        number = min(len(self._known), round(count * self._share))
        ids = [*random.sample(self._known, number), *fresh[number:]]
        random.shuffle(ids)
        self._handled += fresh[number:]
        note = "x" * 150
        return [
            Row(id=each, type=TYPE, position=f"pay-2026-11/{number % 8}#{number}",
                body=json.dumps({"amount": int(each[:6], 16), "customer": f"c-{each[:3]}", "note": note}).encode())
            for number, each in enumerate(ids)
        ]  # fmt: skip

    def end_round(self) -> None:
        """What was handled in it may come again."""
        self._known += self._handled
        self._handled.clear()

    def check(self) -> None:
        """See that each id was claimed, and what was not only claimed had one effect and one output.

        Raises:
            RuntimeError: it is not so.
        """
        with self.engine.connect() as connection:
            claims, *done = [
                connection.scalar(text(f"SELECT count(*) FROM {table}"))
                for table in ("idemp_inbox", "payment", "idemp_output", "idemp_pending")
            ]
        if claims != len(self._known) or len(set(done)) != 1:
            raise RuntimeError(f"the figures are void: {len(self._known)} ids came to {claims} claims and {done}")

    def floor(self, rows: Sequence[Row], *, work: bool) -> Callable[[], object]:
        """What is to be timed: the messages are there."""
        with self.engine.begin() as connection:
            connection.exec_driver_sql("TRUNCATE given")
            driver: Any = connection.connection.driver_connection
            with driver.cursor() as cursor, cursor.copy("COPY given FROM STDIN") as copy:
                for row in rows:
                    copy.write_row((row.id, row.id, row.position, bytes(19), row.body if work else None))
            connection.exec_driver_sql("ANALYZE given")
        claims = FLOOR_OF_CLAIMS.format(fingerprint="fingerprint" if work else "NULL")
        statement = FLOOR_OF_WORK.format(claims=claims, envelope=ENVELOPE) if work else claims

        def run() -> None:
            with self.engine.begin() as connection:
                connection.exec_driver_sql("SET LOCAL jit = off")
                connection.exec_driver_sql(statement, execution_options={"no_parameters": True})

        return run

    def one_by_one(self, rows: Sequence[Row]) -> Callable[[], object]:
        """A transaction for each message."""
        return lambda: [self.by_rows.run([row]) for row in rows]


def app_on(engine: Engine) -> App:
    """The consumer."""
    app = App("pay", database=engine, broker=InMemoryBroker(), settings=Settings())

    def pay(message: dict[str, Any], ctx: Context) -> None:
        ctx.connection.execute(
            text("INSERT INTO payment (id, amount) VALUES (:id, :amount)"),
            {"id": ctx.message_id, "amount": message["amount"]},
        )
        ctx.publish({"id": ctx.message_id}, type="shop.Paid")

    app.handler(dict, type=TYPE, policy=Idempotent())(pay)
    return app


def table_of(rows: Sequence[Row], *, bodies: bool) -> pa.Table:
    """A chunk as Spark hands it over."""
    names = ["id", "type", "position", *(["body"] if bodies else [])]
    return pa.table({name: [getattr(row, name) for row in rows] for name in names})


def timed(work: Callable[[], object], rows: int) -> float:
    """Seconds for each row."""
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) / rows


@contextmanager
def pieces(rows: int) -> Iterator[None]:
    """Chunks taken apart in other pieces than idemp's own."""
    own = setwise.PIECE, setwise.ADOPTED
    setwise.PIECE = setwise.ADOPTED = rows
    try:
        yield
    finally:
        setwise.PIECE, setwise.ADOPTED = own


def ways_of(place: Place, chunks: Mapping[str, Sequence[Row]], tables: Mapping[str, pa.Table]) -> dict[str, Any]:
    """What prepares each way, and answers what is to be timed."""
    by_table = {"adopt": place.adopting, "set": place.by_set, "function": place.by_function}

    def taken(name: str) -> Callable[[], object]:
        way, _, design = name.partition(", ")

        def run() -> None:
            with pieces(DESIGNS[design]) if design else nullcontext():
                by_table[way].run(tables[name])

        return run

    return {
        "floor of claims": lambda: place.floor(chunks["floor of claims"], work=False),
        "floor of work": lambda: place.floor(chunks["floor of work"], work=True),
        "rows": lambda: lambda: place.by_rows.run(chunks["rows"]),
        "one by one": lambda: place.one_by_one(chunks["one by one"]),
        **{name: partial(taken, name) for name in tables},
    }


def one_round(place: Place, sizes: Mapping[str, int]) -> dict[str, float]:
    """Each way once, in random order."""
    chunks = {name: place.rows(size) for name, size in sizes.items()}
    tables = {
        name: table_of(rows, bodies=not name.startswith("adopt"))
        for name, rows in chunks.items()
        if name.startswith(("adopt", "set", "function"))
    }
    ways = ways_of(place, chunks, tables)
    found = {}
    for name in random.sample(list(ways), len(ways)):
        prepared: Any = ways[name]()
        found[name] = timed(prepared, sizes[name])
    reports: list[Report] = []
    found["replay"] = timed(lambda: reports.append(place.by_set.run(tables["set"])), sizes["set"])
    if set(reports[0].counts) - {Came.REPLAY, Came.DUPLICATE}:
        raise RuntimeError(f"the figures are void: run again, a chunk came to {reports[0].counts}")
    place.end_round()
    return found


def ratios(rounds: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Of the same rounds, with what they are to reach."""
    designs = [
        f"{name} / floor of {'claims' if name.startswith('adopt') else 'work'}"
        for name in sorted(rounds[0])
        if ", " in name
    ]
    found = {}
    for pair in (*TARGETS, *OTHERS, *designs):
        above, _, below = pair.partition(" / ")
        values = paired([each[below] for each in rounds], [each[above] for each in rounds])
        found[pair] = telling.goal(values, TARGETS.get(pair))
    return found


def run(servers: Servers, options: argparse.Namespace) -> dict[str, Any]:
    """All rounds, and one before them that does not count."""
    sizes = dict.fromkeys(("floor of claims", "floor of work", "adopt", "set", "function"), options.chunk)
    if options.designs:
        sizes |= {f"{way}, {design}": options.chunk for way in ("adopt", "set") for design in DESIGNS}
    sizes |= {"rows": options.by_rows, "one by one": options.alone}
    with closing(Place(servers.database("postgresql"), options.duplicates)) as place:
        one_round(place, sizes)
        rounds = [one_round(place, sizes) for _ in range(options.rounds)]
        place.check()
    where = f"Chunks of {options.chunk:,} with {options.duplicates:.0%} duplicates, {options.rounds} rounds"
    rates = {name: telling.figure([1 / each[name] for each in rounds], "messages/s") for name in sorted(rounds[0])}
    return telling.found(where, rates, ratios(rounds))


def main(arguments: Sequence[str]) -> int:
    """Run it; print a line each, or JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks bulk", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chunk", type=int, default=50_000)
    parser.add_argument("--duplicates", type=float, default=0.2)
    parser.add_argument("--rounds", type=int, default=9, help="twenty handle a million messages a way")
    parser.add_argument("--alone", type=int, default=1000, help="messages in a transaction each, per round")
    parser.add_argument("--by-rows", type=int, default=5000, help="messages to a handler of single ones, per round")
    parser.add_argument("--designs", action="store_true", help="other designs in the same rounds")
    telling.add_options(parser)
    options = parser.parse_args(arguments)
    with Servers() as servers:
        found = run(servers, options)
    return telling.tell("bulk", found, options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
