"""Millions of claims: `python -m benchmarks.growth --claims 10000000 --expired 1000000`.

Groups of 20 with an empty inbox and with a full one, in turn; bytes of WAL a message after a checkpoint, where whole pages are logged;
and the 99th percentile of a delivery while a relay deletes expired claims, and while that relay is stopped.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg

from benchmarks.consumers.own import make_worker
from benchmarks.place import Place, plain
from benchmarks.seats import Consumers
from benchmarks.servers import Servers, running
from idemp import Settings
from idemp.identity import name_number
from idemp.process import open_adapters
from idemp.sql.engine import Database
from idemp.sql.schema import upgrade
from idemp.worker.relay import Cleaner
from tests.servers.databases import create_database

DAY = 86_400.0
FILL = """
INSERT INTO idemp_inbox (consumer_id, message_key, type_id, original_id, fingerprint, claimed_at, worker)
SELECT %(consumer)s, (lpad(to_hex(((extract(epoch FROM now()) - %(age)s) * 1000)::bigint + number / 10), 12, '0')
    || '7' || substr(md5(number::text), 1, 3) || '8' || substr(md5(number::text), 4, 15))::uuid,
    %(type)s, decode(md5(number::text), 'hex'), decode(md5(number::text), 'hex'), extract(epoch FROM now()) - %(age)s, 'worker'
FROM generate_series(1, %(count)s) AS number
"""


def fill(url: str, queue: str, count: int, age: float, type: str = "bench.Order") -> None:
    """Insert claims of some age, with time-ordered keys."""
    with psycopg.connect(plain(url), autocommit=True) as connection:
        numbers = {"consumer": name_number("consumer", queue), "type": name_number("type", type)}
        connection.execute(FILL, {**numbers, "count": count, "age": age})
        connection.execute("VACUUM ANALYZE idemp_inbox")


def ask(url: str, statement: str) -> Any:
    with psycopg.connect(plain(url), autocommit=True) as connection:
        cursor = connection.execute(statement.encode())
        return cursor.fetchone()[0] if cursor.description else None  # type: ignore[index]


def compare(servers: Servers, claims: int, rounds: int, messages: int) -> None:
    with ExitStack() as stack:
        consumers = {}
        for name in ("empty", "full"):
            url = create_database(servers.database)
            database = Database(url)
            upgrade(database)
            database.close()
            consumers[name] = Consumers(name, "own:groups", url, servers.broker)
            stack.callback(consumers[name].close)
        start = time.monotonic()
        fill(consumers["full"].place.database, consumers["full"].place.queue, claims, DAY)
        print(f"{claims:,} claims in {time.monotonic() - start:.0f} s")
        seconds: dict[str, list[float]] = {name: [] for name in consumers}
        logged: dict[str, list[float]] = {name: [] for name in consumers}
        for each in consumers.values():
            each.run(messages)
        for _ in range(rounds):
            for name, each in consumers.items():
                ask(each.place.database, "CHECKPOINT")
                before = ask(each.place.database, "SELECT pg_current_wal_insert_lsn()")
                seconds[name].append(each.run(messages)[0])
                written = ask(each.place.database, f"SELECT pg_current_wal_insert_lsn() - '{before}'::pg_lsn")
                logged[name].append(float(written) / messages)
        for each in consumers.values():
            each.place.check()
    ratios = [empty / full for empty, full in zip(seconds["empty"], seconds["full"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"throughput, full / empty: {middle:.2f} [{low:.2f}–{high:.2f}], goal 0.9")
    empty, full = statistics.median(logged["empty"]), statistics.median(logged["full"])
    print(f"WAL a message: {empty:.0f} bytes empty, {full:.0f} full: {full / empty:.3f}, goal 1.05")


def beside_purge(servers: Servers, expired: int, blocks: int, messages: int) -> None:
    place = Place("purge", servers.database, servers.broker)
    place.make()
    worker = make_worker(place)
    fill(servers.database, place.queue, expired, 8 * DAY)
    with psycopg.connect(plain(servers.database), autocommit=True) as connection:  # older ones of another type, which stay
        kept = "INSERT INTO idemp_identity (consumer, type, descriptor, retention) VALUES (%s, 'bench.Kept', 'message_id:', %s)"
        connection.execute(kept, [place.queue, 90 * DAY])
    fill(servers.database, place.queue, expired, 30 * DAY, "bench.Kept")
    command = [sys.executable, "-m", "benchmarks.growth", "--purge"]
    environment = {**os.environ, "IDEMP_DATABASE_URL": servers.database, "IDEMP_BROKER_URL": servers.broker}
    times: dict[bool, list[float]] = {False: [], True: []}
    purged_for = 0.0
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as purge:
        assert purge.stdout is not None
        purge.stdout.readline()
        for number in range(2 * blocks):
            purging = bool(number % 2)
            os.kill(purge.pid, signal.SIGCONT if purging else signal.SIGSTOP)
            place.load(messages)
            left = messages
            while left > 0:
                start = time.perf_counter()
                taken = worker.step(poll=0.5)
                left -= taken
                times[purging] += [time.perf_counter() - start] * taken
                if purging:
                    purged_for += time.perf_counter() - start
        os.kill(purge.pid, signal.SIGCONT)
        worker.protocol.complete()
        old = f"SELECT count(*) FROM idemp_inbox WHERE claimed_at < {time.time() - 7 * DAY}"
        gone = 2 * expired - ask(servers.database, old)
        purge.kill()
    worker.close()
    place.check()
    late = {purging: statistics.quantiles(each, n=100)[98] * 1000 for purging, each in times.items()}
    print(f"{gone:,} of {expired:,} claims purged among {expired:,} that stay: {gone / purged_for:,.0f} a second")
    print(
        f"p99 of a delivery: {late[False]:.1f} ms, during the purge {late[True]:.1f} ms: {late[True] / late[False]:.2f}, goal 1.5"
    )


def purge() -> None:
    """Delete expired claims as a relay does."""
    adapters = open_adapters(Settings())
    cleaner = Cleaner(adapters.scheduler, adapters.store.classify, print, every=0.0)
    print("ready", flush=True)
    cleaner.run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--claims", type=int, default=10_000_000)
    parser.add_argument("--expired", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--messages", type=int, default=600)
    parser.add_argument("--disk", type=Path, default=Path("/var/tmp"), help="folder that PostgreSQL writes to")
    parser.add_argument("--purge", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.purge:
        purge()
    with running(options.disk) as servers:
        beside_purge(servers, options.expired, options.rounds, options.messages)
        if options.claims:
            compare(servers, options.claims, options.rounds, options.messages)


if __name__ == "__main__":
    main()
