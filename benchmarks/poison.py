"""`python -m benchmarks poison`: what poison messages in the queue cost the healthy ones.

A worker process on a private RabbitMQ and a private PostgreSQL handles a queue of healthy messages, with and without
poison mixed in evenly: a poison message fails at each of its attempts, waits out its delays and is parked. Blocks with
and without are interleaved (A B B A ...), a ratio pairs the blocks of one round. Time is from the first handler's
start to the last healthy handler's end. After each block queues and database are counted: outputs, effects, handler
runs and dead letters must be what was sent, or the figures are void.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from sqlalchemy import Column, Integer, MetaData, String, Table, func, insert, select

from idemp import App, Context, Idempotent, Message, Output
from idemp.broker.kombu import KombuBroker
from idemp.broker.kombu.link import Link
from idemp.broker.port import Topology
from idemp.inbox.sql import Tables, create_engine_safely
from idemp.inbox.sql.schema import upgrade
from idemp.messages import OutputKind
from idemp.settings import Settings
from idemp.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Engine

NAME = "poisoned"
TYPE = "bench.Order"
ATTEMPTS = 3
EFFECT = Table("poison_effect", MetaData(), Column("id", Integer, primary_key=True), Column("order_id", String(36)))


class Poison(Exception):
    """What poison raises."""


# The worker's process -----------------------------------------------------------------------------------------------


class Shop:
    """The app, and a count of what its handler did."""

    def __init__(self, database: str, broker: str, *, healthy: int, poison: int) -> None:
        self.app = App(NAME, database=database, broker=broker, settings=Settings(max_body_bytes=65536))
        self._left = {False: healthy, True: poison * ATTEMPTS}
        self._runs = {False: 0, True: 0}
        self._lock = threading.Lock()
        self._times: list[float] = []
        self._insert = insert(EFFECT)
        self.app.handler(dict, type=TYPE, policy=Idempotent(key="order_id", attempts=ATTEMPTS, retry_delays=["1s"]))(
            self.handle
        )

    def run(self, threads: int) -> dict[str, Any]:
        """Consume until all is done."""
        self._worker = Worker([self.app], threads=threads)
        self._worker.run()
        return {"seconds": self._times[-1] - self._times[0], "healthy": self._runs[False], "failed": self._runs[True]}

    def handle(self, message: dict[str, Any], ctx: Context) -> None:
        """One effect and one output, or an error after the effect."""
        poison = bool(message.get("poison"))
        if not self._times:
            self._times.append(time.perf_counter())
        ctx.connection.execute(self._insert, {"order_id": message["order_id"]})
        if not poison:
            ctx.send({"order_id": message["order_id"]}, to="out", type="bench.Done")
        self._count(poison=poison)
        if poison:
            raise Poison(message["order_id"])

    def _count(self, *, poison: bool) -> None:
        with self._lock:
            self._runs[poison] += 1
            self._left[poison] -= 1
            if not poison and not self._left[False]:
                self._times.append(time.perf_counter())
            if not any(self._left.values()):
                self._worker.stop()


def work(told: dict[str, Any]) -> dict[str, Any]:
    """The child: logging is set up as a service would, towards nowhere."""
    with Path("/dev/null").open("w", encoding="utf-8") as nowhere:
        logging.basicConfig(level=logging.INFO, stream=nowhere, format="%(asctime)s %(levelname)s %(name)s %(message)s")
        threads = told.pop("threads")
        return Shop(**told).run(threads)


# The measuring process ----------------------------------------------------------------------------------------------


class Bench:
    """Fills the queue, lets a worker empty it, and counts."""

    def __init__(self, database: str, broker: str, *, messages: int, share: float) -> None:
        self._urls = {"database": database, "broker": broker}
        self._messages = messages
        # Of the messages in the queue, so many are poison.
        self._poison = round(messages * share / (1 - share))
        self.engine: Engine = create_engine_safely(database)
        upgrade(self.engine, Tables())
        EFFECT.metadata.create_all(self.engine)
        self.broker = KombuBroker(broker)
        self.broker.declare(Topology(exchange="idemp", queues=(NAME, "out")))
        self._done = 0

    def block(self, *, poisoned: bool, threads: int) -> float:
        """Seconds that the healthy messages took."""
        poison = self._poison if poisoned else 0
        self._fill(poison)
        told = {**self._urls, "healthy": self._messages, "poison": poison, "threads": threads}
        command = [sys.executable, "-m", "benchmarks.poison", json.dumps(told)]
        said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout
        found = json.loads(said.splitlines()[-1])
        self._done += self._messages
        self._check(found, poison)
        return float(found["seconds"])

    def _fill(self, poison: int) -> None:
        total = self._messages + poison
        marks = [number * poison // total != (number + 1) * poison // total for number in range(total)]
        with self.broker.publisher() as publisher:
            refusals = publisher.publish([_order(poison=mark) for mark in marks], 60.0)
        if any(refusals):
            raise RuntimeError(f"not confirmed: {[each for each in refusals if each][:3]}")

    def _check(self, found: dict[str, Any], poison: int) -> None:
        with self.engine.connect() as connection:
            effects = connection.scalar(select(func.count()).select_from(EFFECT))
        counted = {
            "healthy": found["healthy"],
            "failed": found["failed"],
            "effects": effects,
            "left": self._purged(NAME),
            "outputs": self._purged("out"),
            "parked": self._purged(f"{NAME}.dead"),
        }
        wanted = {
            "healthy": self._messages,
            "failed": poison * ATTEMPTS,
            "effects": self._done,
            "left": 0,
            "outputs": self._messages,
            "parked": poison,
        }
        if counted != wanted:
            raise RuntimeError(f"the figures are void: {counted} instead of {wanted}")

    def _purged(self, queue: str) -> int:
        """How many messages were ready there; none is left."""
        link = Link.open(self._urls["broker"], connect_timeout=10.0, heartbeat=0)
        try:
            return int(link.channel.queue_purge(queue))
        finally:
            link.close()


def _order(*, poison: bool) -> Output:
    identity = uuid4()
    order = {"order_id": str(identity), "sku": "A-1", "quantity": 2, "note": "x" * 150}
    message = Message(
        body=json.dumps({**order, "poison": True} if poison else order).encode(), type=TYPE, message_id=str(identity)
    )
    return Output(id=identity, ordinal=0, kind=OutputKind.SEND, exchange="", routing_key=NAME, message=message)


def measure(bench: Bench, rounds: int, threads: int) -> dict[str, float]:
    """Throughput of the healthy with poison, relative to that without."""
    bench.block(poisoned=True, threads=threads)  # warm up, and declare what is missing
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for number in range(rounds):
        for poisoned in (False, True) if number % 2 == 0 else (True, False):
            seconds[poisoned].append(bench.block(poisoned=poisoned, threads=threads))
    ratios = [clean / mixed for clean, mixed in zip(seconds[False], seconds[True], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "ratio": round(middle, 3),
        "lower_quartile": round(low, 3),
        "upper_quartile": round(high, 3),
        "healthy_per_second": round(bench._messages / statistics.median(seconds[False]), 1),  # noqa: SLF001
        "healthy_per_second_with_poison": round(bench._messages / statistics.median(seconds[True]), 1),  # noqa: SLF001
        "rounds": rounds,
    }


@contextmanager
def servers() -> Iterator[dict[str, str]]:
    """The URLs of a private PostgreSQL and a private RabbitMQ."""
    from tests.servers.fixtures import private
    from tests.servers.postgresql import PostgreSQL
    from tests.servers.rabbitmq import RabbitMQ

    with private(PostgreSQL) as database, private(RabbitMQ) as broker:
        yield {"database": database.create_database("bench"), "broker": broker.url}


def main(arguments: list[str] | None = None) -> int:
    """Run it, print a line per number of threads, or JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks poison", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--messages", type=int, default=2000, help="healthy ones per block")
    parser.add_argument("--share", type=float, default=0.1, help="of the messages in the queue that are poison")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 4], help="consuming threads of the worker")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    with servers() as urls:
        bench = Bench(**urls, messages=options.messages, share=options.share)
        results = {str(threads): measure(bench, options.rounds, threads) for threads in options.threads}
        bench.engine.dispose()
    if options.json:
        print(json.dumps({"share": options.share, "messages": options.messages, "threads": results}, indent=2))
        return 0
    for threads, figure in results.items():
        print(
            f"{options.share:.0%} poison, {threads} thread(s): healthy throughput {figure['ratio']:.2f} "
            f"({figure['lower_quartile']:.2f}-{figure['upper_quartile']:.2f}) of that without; "
            f"{figure['healthy_per_second_with_poison']:.0f}/s against {figure['healthy_per_second']:.0f}/s"
        )
    return 0


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        print(json.dumps(work(json.loads(sys.argv[1]))))
