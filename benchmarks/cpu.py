"""`python -m benchmarks cpu`: the protocol alone, relative to a bare handler, as ratios with quartiles.

Variants run in interleaved blocks in random order; a ratio pairs blocks of one round. After all rounds the database is
counted: effects, claims and outputs must be what was done, or the figures are void.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from sqlalchemy import Column, Integer, MetaData, String, Table, func, insert, select

from idemp import App, Context, Idempotent, Message, Output
from idemp.broker.memory import InMemoryBroker
from idemp.broker.port import Topology
from idemp.inbox.sql import Tables, create_engine_safely
from idemp.inbox.sql.schema import upgrade
from idemp.messages import OutputKind
from idemp.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sqlalchemy import Engine

EFFECT = Table("effect", MetaData(), Column("id", Integer, primary_key=True), Column("order_id", String(36)))
VARIANTS = ("bare", "early", "late", "not opted in", "duplicates")


class Bench:
    """One database, all variants connected."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        upgrade(engine, Tables())
        EFFECT.metadata.create_all(engine)
        self.broker = InMemoryBroker()
        self.broker.declare(Topology(exchange="idemp", queues=("out",)))
        self.publisher = self.broker.publisher()
        self.handled = dict.fromkeys(VARIANTS, 0)
        self.known = [self._message() for _ in range(200)]
        self.protocols = {
            "early": self._protocol("early", Idempotent(key="order_id")),
            "late": self._protocol("late", Idempotent(key="order_id", claim="late")),
            "not opted in": self._protocol("plain", None),
        }
        for message in self.known:
            self.protocols["early"].process(message)
        self.protocols["early"].dispatcher.flush()
        self.insert = insert(EFFECT)

    def run(self, variant: str, messages: int) -> float:
        """Seconds per message."""
        body: Callable[[Message], object] = self.bare
        work = [self._message() for _ in range(messages)]
        if variant == "duplicates":
            body, work = self.protocols["early"].process, random.choices(self.known, k=messages)
        elif variant != "bare":
            body = self.protocols[variant].process
        started = time.perf_counter()
        for message in work:
            body(message)
        seconds = time.perf_counter() - started
        self.handled[variant] += messages
        return seconds / messages

    def bare(self, message: Message) -> None:
        """What a user would write: one transaction, one confirmed publish, no deduplication."""
        order = json.loads(message.body)
        with self.engine.begin() as connection:
            connection.execute(self.insert, {"order_id": order["order_id"]})
        body = json.dumps({"order_id": order["order_id"]}).encode()
        output_id = uuid4()
        message = Message(body=body, type="bench.Done", message_id=str(output_id), correlation_id=message.message_id)
        where = {"kind": OutputKind.SEND, "exchange": "", "routing_key": "out"}
        self.publisher.publish([Output(id=output_id, ordinal=0, message=message, **where)], 10.0)

    def conserved(self) -> bool:
        """Whether the database holds what was done, no more and no less."""
        with self.engine.connect() as connection:
            effects = connection.scalar(select(func.count()).select_from(EFFECT))
            claims = connection.scalar(select(func.count()).select_from(Tables().inbox))
        done = sum(count for variant, count in self.handled.items() if variant != "duplicates") + len(self.known)
        claimed = self.handled["early"] + self.handled["late"] + len(self.known)
        return (effects, claims) == (done, claimed)

    def _protocol(self, name: str, policy: Idempotent | None) -> Any:
        app = App(name, database=self.engine, broker=self.broker, settings=Settings())

        @app.handler(dict, type=f"{name}.Order", policy=policy)
        def handle(message: dict[str, Any], ctx: Context) -> None:
            ctx.connection.execute(self.insert, {"order_id": message["order_id"]})
            ctx.send({"order_id": message["order_id"]}, to="out", type="bench.Done")

        self.insert = insert(EFFECT)
        app.registry.default_type = f"{name}.Order"
        app.start()
        return app.protocol(self.broker.publisher())

    def _message(self) -> Message:
        order = str(uuid4())
        body = json.dumps({"order_id": order, "sku": "A-1", "quantity": 2, "note": "x" * 150}).encode()
        return Message(body=body, message_id=str(uuid4()))


def measure(bench: Bench, rounds: int, messages: int) -> dict[str, dict[str, float]]:
    """Throughput relative to bare, per variant: median and quartiles of paired ratios; and microseconds per message."""
    seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for variant in VARIANTS:
        bench.run(variant, messages)  # warm up
    for _ in range(rounds):
        for variant in random.sample(VARIANTS, len(VARIANTS)):
            seconds[variant].append(bench.run(variant, messages))
    figures = {}
    for variant in VARIANTS:
        ratios = [bare / own for bare, own in zip(seconds["bare"], seconds[variant], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        figures[variant] = {
            "ratio": round(middle, 3),
            "lower_quartile": round(low, 3),
            "upper_quartile": round(high, 3),
            "microseconds": round(statistics.median(seconds[variant]) * 1e6, 1),
        }
    return figures


def main(arguments: Sequence[str]) -> int:
    """Run it, print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--messages", type=int, default=200, help="per block")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    results: dict[str, dict[str, dict[str, float]]] = {}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        urls = {"sqlite": f"sqlite:///{folder}/bench.db"}
        try:
            from tests.servers.fixtures import private
            from tests.servers.postgresql import PostgreSQL

            urls["postgresql"] = stack.enter_context(private(PostgreSQL)).create_database("bench")
        except ImportError as error:
            print(f"PostgreSQL left out: {error}; `make test` installs what it takes", file=sys.stderr)
        for name, url in urls.items():
            bench = Bench(create_engine_safely(url))
            results[name] = measure(bench, options.rounds, options.messages)
            if not bench.conserved():
                print(f"{name}: the database does not hold what was done; the figures are void", file=sys.stderr)
                return 1
            bench.engine.dispose()
    if options.json:
        print(json.dumps(results, indent=2))
        return 0
    print("throughput relative to bare (median of paired blocks, quartiles), one thread, in-memory broker")
    for name, figures in results.items():
        for variant, figure in figures.items():
            span = f"{figure['lower_quartile']:.2f}-{figure['upper_quartile']:.2f}"
            print(
                f"{name:12} {variant:14} {figure['ratio']:6.2f}  ({span})  {figure['microseconds']:8.1f} us a message"
            )
    return 0
