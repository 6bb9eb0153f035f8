"""`python -m benchmarks growth`: what a message costs in an inbox of ten million, beside one that is empty.

PostgreSQL, one thread, a broker in memory. For each kind of id there are two databases: one is filled with handlings of
the past days, each with its output and its confirm. Blocks in both are interleaved in random order, each after a
CHECKPOINT: so each page that a block touches first goes into the log as a whole, and what is counted of the log is the
worst case.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import func, insert, select, text

from benchmarks.figures import machine, paired, spread, versions
from benchmarks.filling import MAKE_ID, bytes_of, fill, settle
from benchmarks.results import save
from benchmarks.servers import Servers
from benchmarks.shows import verdicts
from benchmarks.work import DONE, ORDER, SETTINGS, Done, Order, effects_of
from idemp import App, Context, Idempotent, Message
from idemp.broker.memory import InMemoryBroker
from idemp.broker.port import Topology
from idemp.inbox.sql import Tables, create_engine_safely
from idemp.inbox.sql.schema import upgrade

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sqlalchemy import Engine

DAYS: Final = 10
MOST: Final = 1.05
LEAST: Final = 0.9

#: How the tables are laid out: what is done to them before the first row.
LAYOUTS: Final[dict[str, Callable[[Engine], None]]] = {"plain": lambda _: None}


@dataclass(frozen=True)
class Block:
    """What one message of a block took."""

    seconds: float
    wal_bytes: float


class Inbox:
    """A consumer with a database of its own.

    Args:
        database: URL.
        keys: the kind of ids that arrive.
        layout: of the tables.
    """

    def __init__(self, database: str, keys: str, layout: str) -> None:
        self.engine = create_engine_safely(database)
        upgrade(self.engine, Tables())
        LAYOUTS[layout](self.engine)
        effects = effects_of("growth")
        effects.metadata.create_all(self.engine)
        self._effects, self._keys, self._handled, self._filled = effects, keys, 0, 0
        broker = InMemoryBroker()
        broker.declare(Topology(exchange="idemp", queues=("out",)))
        self._app = App("growth", database=self.engine, broker=broker, settings=SETTINGS)
        statement = insert(effects)

        @self._app.handler(Order, type=ORDER, policy=Idempotent())
        def handle(order: Order, ctx: Context) -> None:
            ctx.connection.execute(statement, {"order_id": order.order_id})
            ctx.send(Done(order_id=order.order_id, note="y" * 40), to="out", type=DONE)

        self._app.start()
        self._protocol = self._app.protocol(broker.publisher())
        self.run(100)  # so that statements are prepared, and a row is there to be copied

    def fill(self, rows: int) -> None:
        """With the handlings of the past days, up to now."""
        period = timedelta(days=DAYS)
        fill(self.engine, self._keys, rows, first=datetime.now(UTC) - period, step=period / rows)
        self._filled = rows

    def run(self, messages: int) -> Block:
        """Handle so many, and record their confirms."""
        made = [self._message() for _ in range(messages)]
        with self.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text("CHECKPOINT"))
            before = connection.scalars(text("SELECT pg_current_wal_insert_lsn()")).one()
            began = time.perf_counter()
            for message in made:
                self._protocol.process(message)
            self._protocol.dispatcher.flush()
            seconds = time.perf_counter() - began
            written = text("SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), CAST(:before AS pg_lsn))")
            wal_bytes = connection.scalars(written, {"before": before}).one()
        self._handled += messages
        return Block(seconds / messages, float(wal_bytes) / messages)

    def conserved(self) -> str:
        """What is wrong; empty if each message has its effect and its claim."""
        with self.engine.connect() as connection:
            effects = connection.scalars(select(func.count()).select_from(self._effects)).one()
            claims = connection.scalars(select(func.count()).select_from(Tables().inbox)).one()
            pending = connection.scalars(select(func.count()).select_from(Tables().pending)).one()
        if (effects, claims, pending) == (self._handled, self._handled + self._filled, 0):
            return ""
        return f"{self._keys}: {self._handled} handled, {effects} effects, {claims} claims, {pending} pending"

    def close(self) -> None:
        """Close what is open."""
        self._app.close()
        self.engine.dispose()

    def _message(self) -> Message:
        order_id = str(MAKE_ID[self._keys]())
        order = Order(order_id=order_id, sku="A-1", quantity=2, note="x" * 150)
        return Message(body=order.model_dump_json().encode(), type=ORDER, message_id=order_id)


def measure(servers: Servers, keys: str, layout: str, options: argparse.Namespace) -> dict[str, Any]:
    """One kind of ids, in one layout."""
    with ExitStack() as stack:
        inboxes = {
            name: stack.enter_context(closing(Inbox(servers.database("postgresql"), keys, layout)))
            for name in ("empty", "full")
        }
        inboxes["full"].fill(options.rows)
        size = bytes_of(inboxes["full"].engine)
        blocks: dict[str, list[Block]] = {name: [] for name in inboxes}
        for inbox in inboxes.values():
            settle(inbox.engine)
            inbox.run(options.messages)
        for _ in range(options.rounds):
            for name in random.sample(list(inboxes), len(inboxes)):
                blocks[name].append(inboxes[name].run(options.messages))
        if wrong := [found for inbox in inboxes.values() if (found := inbox.conserved())]:
            raise RuntimeError(f"the figures are void: {wrong}")
    return {
        "keys": keys,
        "layout": layout,
        **_ratios(blocks, has_goals=keys == "time-ordered"),
        "bytes_per_row": {table: round(each / options.rows, 1) for table, each in size.items()},
    }


def _ratios(blocks: dict[str, list[Block]], *, has_goals: bool) -> dict[str, Any]:
    throughput = spread(paired([each.seconds for each in blocks["empty"]], [each.seconds for each in blocks["full"]]))
    log = spread(paired([each.wal_bytes for each in blocks["full"]], [each.wal_bytes for each in blocks["empty"]]))
    least, most = ({"target": LEAST}, {"target": MOST}) if has_goals else ({"target": None}, {"target": None})
    return {
        "throughput": {**throughput, **least, **verdicts(throughput, least, at_least=True)},
        "wal": {**log, **most, **verdicts(log, most, at_least=False)},
        "wal_bytes": {name: round(statistics.median(each.wal_bytes for each in own)) for name, own in blocks.items()},
        "milliseconds": {
            name: round(statistics.median(each.seconds for each in own) * 1e3, 3) for name, own in blocks.items()
        },
    }


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    """What is asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks growth", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--keys", default=",".join(MAKE_ID), help="kinds of ids, with commas between")
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help="likewise")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--messages", type=int, default=1000, help="per block")
    parser.add_argument("--save", action="store_true", help="below docs/benchmarks, for `report`")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(arguments)


def run(servers: Servers, options: argparse.Namespace) -> dict[str, Any]:
    """All kinds of ids in all layouts."""
    found = [
        measure(servers, keys, layout, options)
        for layout in options.layouts.split(",")
        for keys in options.keys.split(",")
    ]
    how = {"rows": options.rows, "rounds": options.rounds, "messages": options.messages}
    return {"machine": machine(), "versions": versions(), **how, "inboxes": found}


def main(arguments: Sequence[str]) -> int:
    """Run it; print a line each, or JSON."""
    options = options_of(arguments)
    with Servers() as servers:
        found = run(servers, options)
    if options.save:
        save("growth", found)
    if options.json:
        print(json.dumps(found, indent=2))
        return 0
    print(f"{options.rows:,} rows beside none", file=sys.stderr)
    for inbox in found["inboxes"]:
        wal, rate, written = inbox["wal"], inbox["throughput"], inbox["wal_bytes"]
        print(
            f"{inbox['keys']:12} {inbox['layout']:6} throughput {rate['median']:.2f} "
            f"({rate['lower_quartile']:.2f}-{rate['upper_quartile']:.2f}), log a message {wal['median']:.2f} "
            f"({wal['lower_quartile']:.2f}-{wal['upper_quartile']:.2f}): {written['empty']} and {written['full']} bytes; "
            f"a row of the inbox {inbox['bytes_per_row']['inbox']} bytes"
        )
    return 0
