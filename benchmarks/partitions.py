"""Claims in plain and in partitioned inboxes, side by side: `python -m benchmarks.partitions --claims 10000000`.

For UUIDv7 and for random ids; the range partitions are days of the time in a UUIDv7, made by hand.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel

from benchmarks.growth import ask
from benchmarks.servers import Durable
from idemp import App, Idempotent, Inbox, Settings
from idemp.bulk import Bulk, Row
from idemp.identity import name_number, uuid7
from idemp.sql.engine import Database
from idemp.sql.partition import partition
from idemp.sql.retention import Retention
from idemp.sql.schema import upgrade
from tests.servers.databases import create_database

DAYS, DAY = 7, 86_400.0
TIMED = (
    "(lpad(to_hex((at * 1000)::bigint), 12, '0') || '7' || substr(md5(number::text), 1, 3) || '8' "
    "|| substr(md5(number::text), 4, 15))::uuid"
)
IDS: dict[str, tuple[Callable[[], str], str]] = {
    "uuid7": (uuid7, TIMED),
    "random": (lambda: str(uuid.uuid4()), "gen_random_uuid()"),
}
CONSUMER, TYPE = name_number("consumer", "bench"), name_number("type", "bench.Order")


class Order(BaseModel):
    __message_type__ = "bench.Order"


def take(message: Order) -> None:
    """Do nothing, so that only claims are measured."""


class Bench:
    """A database with an inbox."""

    def __init__(self, url: str, new_id: Callable[[], str]) -> None:
        self.database, self.url, self._new_id = Database(url), url, new_id
        self._app = App("bench", settings=Settings(database_url=url))
        policy = Idempotent(retention=f"{DAYS}d", fingerprint="none")
        self._app.handler(Order, policy=policy)(take)
        self._handle = Inbox(self.database.engine).wrap(take, message=Order, consumer="bench", policy=policy)
        self._bulk = Bulk(self._app, run="bench", adopt=True)
        self._retention = Retention(self.database)

    def adopt(self, count: int = 10_000) -> None:
        self._bulk.run([Row(b"{}", id=self._new_id(), type="bench.Order") for _ in range(count)])

    def claim(self, count: int = 200) -> None:
        for _ in range(count):
            self._handle(b"{}", {"message_id": self._new_id(), "type": "bench.Order"})

    def purge(self, count: int = 5_000) -> None:
        while count > 0:
            count -= self._retention.purge() or count


def fill(url: str, key: str, claims: int) -> None:
    """Insert claims of the last days; a tenth of them are expired. Indexes are made after that."""
    ask(url, "ALTER TABLE idemp_inbox DROP CONSTRAINT idemp_inbox_pkey")
    ask(url, "DROP INDEX idemp_inbox_claimed")
    ask(
        url,
        "INSERT INTO idemp_inbox (consumer_id, message_key, type_id, original_id, claimed_at, worker) "
        f"SELECT {CONSUMER}, {key}, {TYPE}, convert_to('s:' || gen_random_uuid()::text, 'UTF8'), at, 'worker' "
        f"FROM (SELECT number, {time.time() - DAYS * DAY * 1.1} + number * {DAYS * DAY * 1.1 / claims} AS at "
        f"FROM generate_series(1, {claims}) AS number) AS made",
    )
    ask(url, "ALTER TABLE idemp_inbox ADD PRIMARY KEY (consumer_id, message_key)")
    ask(url, "CREATE INDEX idemp_inbox_claimed ON idemp_inbox (consumer_id, type_id, claimed_at)")
    ask(url, "VACUUM ANALYZE idemp_inbox")


def partition_by_day(url: str) -> None:
    ask(url, "ALTER TABLE idemp_inbox RENAME TO idemp_inbox_old")
    ask(url, "CREATE TABLE idemp_inbox (LIKE idemp_inbox_old INCLUDING ALL) PARTITION BY RANGE (message_key)")
    today = time.time() // DAY * DAY
    for day in range(-DAYS - 1, 2):
        first, last = (f"{int((today + each * DAY) * 1000):012x}{'0' * 20}" for each in (day, day + 1))
        ask(url, f"CREATE TABLE idemp_inbox_d{day + 9} PARTITION OF idemp_inbox FOR VALUES FROM ('{first}') TO ('{last}')")
    ask(url, "CREATE TABLE idemp_inbox_rest PARTITION OF idemp_inbox DEFAULT")
    ask(url, "INSERT INTO idemp_inbox SELECT * FROM idemp_inbox_old")
    ask(url, "DROP TABLE idemp_inbox_old")
    ask(url, "ANALYZE idemp_inbox")


def compare(plain: str, name: str, claims: int, rounds: int, partitions: int) -> None:
    new_id, key = IDS[name]
    fill(plain, key, claims)
    benches = {"plain": plain, "hash": create_database(plain, plain)}
    start, database = time.monotonic(), Database(benches["hash"])
    partition(database, partitions)
    database.close()
    print(f"{name}: {claims:,} claims copied into {partitions} partitions in {time.monotonic() - start:.0f} s")
    if name == "uuid7":
        benches["range"] = create_database(plain, plain)
        partition_by_day(benches["range"])
    sizes = "SELECT sum(pg_total_relation_size(oid))::bigint FROM pg_class WHERE relkind = 'r' AND relname ~ '^idemp_inbox'"
    size = {kind: ask(url, sizes) / claims for kind, url in benches.items()}
    made = {kind: Bench(url, new_id) for kind, url in benches.items()}
    found: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds + 1):
        for kind, bench in list(made.items()) if number % 2 else list(made.items())[::-1]:
            ask(bench.url, "CHECKPOINT")
            before = ask(bench.url, "SELECT pg_current_wal_insert_lsn()")
            for step in (bench.adopt, bench.claim, bench.purge):
                start = time.perf_counter()
                step()
                if number:  # the first round fills caches
                    found.setdefault((step.__name__, kind), []).append(time.perf_counter() - start)
                if number and step == bench.adopt:
                    written = ask(bench.url, f"SELECT pg_current_wal_insert_lsn() - '{before}'::pg_lsn")
                    found.setdefault(("wal", kind), []).append(float(written))
    for kind in list(made)[1:]:
        print(f"{name}, {kind}: {size[kind]:.0f} bytes a claim, plain {size['plain']:.0f}")
        for what in ("adopt", "claim", "purge", "wal"):
            ratios = [other / own for other, own in zip(found[what, "plain"], found[what, kind], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            other = statistics.median(found[what, "plain"])
            unit = f"{other / 10_000:,.0f} bytes a claim" if what == "wal" else f"{other:.2f} s"
            print(f"{name}, {kind}: {what}, plain / {kind}: {middle:.2f} [{low:.2f}–{high:.2f}]; plain {unit}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--claims", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--partitions", type=int, default=16)
    parser.add_argument("--disk", type=Path, default=Path("/var/tmp"), help="folder that PostgreSQL writes to")
    options = parser.parse_args()
    for name in IDS:
        with tempfile.TemporaryDirectory(prefix="idemp-bench-", dir=options.disk) as folder:
            Path(folder).chmod(0o755)
            with Durable(Path(folder) / "postgresql") as server:
                for setting in ("shared_buffers = '1GB'", "max_wal_size = '8GB'", "maintenance_work_mem = '512MB'"):
                    ask(server.url, f"ALTER SYSTEM SET {setting}")
                server.restart()
                url = create_database(server.url)
                tables = Database(url)
                upgrade(tables)
                tables.close()
                compare(url, name, options.claims, options.rounds, options.partitions)


if __name__ == "__main__":
    main()
