"""`python -m benchmarks cpu`: the protocol alone, by CPU time relative to a bare handler, as ratios with quartiles.

SQLite (synchronous=OFF: the disk takes no part) or PostgreSQL, and a broker in memory, one thread. Variants run in
interleaved blocks in random order; a ratio pairs blocks of one round. After all rounds the database is counted: effects,
claims and outputs must be what was done, or the figures are void.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from sqlalchemy import Column, Integer, MetaData, String, Table, event, func, insert, select

from benchmarks.figures import machine, paired, spread, versions
from benchmarks.results import save
from benchmarks.servers import Servers
from benchmarks.shows import verdicts
from benchmarks.variants import Block
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
LEAST = 0.75
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

    def run(self, variant: str, messages: int) -> Block:
        """What a message took."""
        body: Callable[[Message], object] = self.bare
        work = [self._message() for _ in range(messages)]
        if variant == "duplicates":
            body, work = self.protocols["early"].process, random.choices(self.known, k=messages)
        elif variant != "bare":
            body = self.protocols[variant].process
        started, cpu_started = time.perf_counter(), time.process_time()
        for message in work:
            body(message)
        cpu_seconds, seconds = time.process_time() - cpu_started, time.perf_counter() - started
        self.handled[variant] += messages
        return Block(seconds / messages, cpu_seconds / messages)

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


def measure(bench: Bench, rounds: int, messages: int) -> dict[str, dict[str, Any]]:
    """CPU time relative to bare, per variant, by paired blocks; and microseconds per message."""
    blocks: dict[str, list[Block]] = {variant: [] for variant in VARIANTS}
    for variant in VARIANTS:
        bench.run(variant, messages)  # warm up
    for _ in range(rounds):
        for variant in random.sample(VARIANTS, len(VARIANTS)):
            blocks[variant].append(bench.run(variant, messages))
    bare = [each.cpu_seconds for each in blocks["bare"]]
    return {
        variant: {
            **spread(paired(bare, [each.cpu_seconds for each in own])),
            "cpu_microseconds": round(statistics.median(each.cpu_seconds for each in own) * 1e6, 1),
            "microseconds": round(statistics.median(each.seconds for each in own) * 1e6, 1),
        }
        for variant, own in blocks.items()
    }


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    """What is asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks cpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--databases", default="sqlite,postgresql")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--messages", type=int, default=200, help="per block")
    parser.add_argument("--save", action="store_true", help="below docs/benchmarks, for `report`")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(arguments)


def run(servers: Servers, options: argparse.Namespace) -> dict[str, Any]:
    """One database after the other."""
    found = {}
    for name in options.databases.split(","):
        bench = Bench(_fast(create_engine_safely(servers.database(name))))
        figures = measure(bench, options.rounds, options.messages)
        if not bench.conserved():
            raise RuntimeError(f"{name}: the database does not hold what was done; the figures are void")
        if name == "sqlite":
            goal = {"target": LEAST}
            figures["early"].update({**goal, **verdicts(figures["early"], goal, at_least=True)})
        found[name] = figures
        bench.engine.dispose()
    how = {"rounds": options.rounds, "messages": options.messages}
    return {"machine": machine(), "versions": versions(), **how, "databases": found}


def _fast(engine: Engine) -> Engine:
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", lambda driver, _: driver.execute("PRAGMA synchronous = OFF"))
    return engine


def main(arguments: Sequence[str]) -> int:
    """Run it, print a table or JSON."""
    options = options_of(arguments)
    with Servers() as servers:
        found = run(servers, options)
    if options.save:
        save("cpu", found)
    if options.json:
        print(json.dumps(found, indent=2))
        return 0
    print("CPU time of a bare handler, relative to that of a variant (median of paired blocks, quartiles)")
    for name, figures in found["databases"].items():
        for variant, figure in figures.items():
            quartiles = f"{figure['lower_quartile']:.2f}-{figure['upper_quartile']:.2f}"
            print(
                f"{name:12} {variant:14} {figure['median']:6.2f}  ({quartiles})  {figure['cpu_microseconds']:8.1f} us of CPU"
            )
    return 0
