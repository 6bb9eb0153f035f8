"""`python -m benchmarks rates`: messages per second on real servers, as ratios to the bare handler.

All variants of a pair of database and broker are connected at once, each with queues and a table of its own. They run in
blocks, in random order in each round; a ratio pairs the blocks of one round. After the last round queues and tables are
counted: each order must have had one effect and one output, or the variant's figures are void and not told. Peers and
limits take part in the rounds of PostgreSQL with RabbitMQ.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import random
import statistics
import sys
import traceback
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

from benchmarks.catalogue import VARIANTS, Setting, names_for
from benchmarks.figures import machine, paired, spread, versions
from benchmarks.peers import PEERS
from benchmarks.results import save
from benchmarks.servers import BROKERS, DATABASES, Servers, version_of
from benchmarks.shows import told
from idemp.inbox.sql import create_engine_safely

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.variants import Block, Variant

BASE = "bare"


class Pair:
    """The variants of one database and one broker.

    Args:
        servers: the run's.
        database: kind.
        broker: kind.
        names: of the variants.
        round_trip: milliseconds that the database is farther away.
    """

    def __init__(
        self, servers: Servers, database: str, broker: str, names: Sequence[str], *, round_trip: float = 0.0
    ) -> None:
        self.title = f"{database} x {broker}"
        self.failed: dict[str, str] = {}
        self._names: dict[str, Any] = {"database": database, "broker": broker, "round_trip": round_trip}
        self._open = ExitStack()
        url = servers.database(database, round_trip=round_trip)
        engine, plain_engine = create_engine_safely(url), create_engine_safely(url)
        self._open.callback(engine.dispose)
        self._open.callback(plain_engine.dispose)
        setting = Setting(servers, url, engine, plain_engine, servers.broker(broker))
        where = {database: url, broker: setting.broker}
        self._versions = {kind: version_of(kind, at) for kind, at in where.items() if kind != "local"}
        self._variants: dict[str, Variant] = {}
        self._blocks: dict[str, list[Block]] = {}
        for name in names:
            try:
                self._variants[name] = self._open.enter_context(closing(VARIANTS[name].open(name, setting)))
            except Exception as error:  # noqa: BLE001 - one that can't take part must not end the others
                self._fail(name, error)

    def measure(self, rounds: int, messages: int) -> dict[str, Any]:
        """Run the rounds; figures per variant, what they show, and who failed."""
        gc.collect()
        gc.freeze()  # as `idemp worker` does; for all variants alike
        for name in list(self._variants):
            self._run(name, messages)  # warm up
        self._blocks = {name: [] for name in self._variants}
        for number in range(rounds):
            print(f"{self.title}: round {number + 1} of {rounds}", end="\r", file=sys.stderr, flush=True)
            for name in random.sample(list(self._variants), len(self._variants)):
                block = self._run(name, messages)
                if block is not None:
                    self._blocks[name].append(block)
        self._count()
        blocks = {name: self._blocks[name] for name in self._variants}
        is_real = (self._names["database"], self._names["broker"]) == ("postgresql", "rabbitmq")
        return {
            **self._names,
            "servers": self._versions,
            "rounds": rounds,
            "messages": messages,
            "variants": {name: _figures(own, blocks[BASE]) for name, own in blocks.items()},
            "shows": told(blocks, round_trip=self._names["round_trip"], has_goals=is_real),
            "failed": self.failed,
        }

    def close(self) -> None:
        """Close what is open."""
        self._open.close()

    def _run(self, name: str, messages: int) -> Block | None:
        for variant in self._variants.values():
            variant.keep_alive()
        try:
            return self._variants[name].run(messages)
        except Exception as error:  # noqa: BLE001 - likewise
            self._fail(name, error)
            del self._variants[name]
            return None

    def _count(self) -> None:
        """Void are the figures of those that lost or repeated something."""
        for name, variant in list(self._variants.items()):
            if wrong := variant.conserved():
                self._fail(name, RuntimeError(f"its figures are void: {wrong}"))
                del self._variants[name]

    def _fail(self, name: str, error: Exception) -> None:
        if name == BASE:
            raise error
        reason = str(error).strip().splitlines()
        print(f"{self.title}: {name} failed: {error}", file=sys.stderr)
        self.failed[name] = f"{type(error).__name__}: {reason[-1] if reason else ''}"


def _figures(own: Sequence[Block], base: Sequence[Block]) -> dict[str, Any]:
    """How many times as fast as the bare handler; messages per second; CPU microseconds a message."""
    return {
        **spread(paired([each.seconds for each in base], [each.seconds for each in own])),
        "messages_per_second": round(1 / statistics.median(each.seconds for each in own), 1),
        "cpu_microseconds": round(statistics.median(each.cpu_seconds for each in own) * 1e6, 1),
    }


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    """What is asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks rates", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--databases", default="postgresql", help=f"with commas between: {', '.join(DATABASES)}")
    parser.add_argument("--brokers", default="rabbitmq", help=f"likewise: {', '.join(BROKERS)}")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--messages", type=int, default=300, help="per block")
    parser.add_argument("--variants", help="names with semicolons between, default all; `bare` is always there")
    parser.add_argument("--round-trip", type=float, default=0.0, help="milliseconds that the database is farther away")
    parser.add_argument("--save", action="store_true", help="below docs/benchmarks, for `report`")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(arguments)


def run(servers: Servers, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All pairs that are asked for, one after the other."""
    logging.getLogger("idemp.delivery").addHandler(logging.NullHandler())  # parked on purpose
    found = []
    for database in options.databases.split(","):
        for broker in options.brokers.split(","):
            if options.variants:
                possible = names_for(database, broker, designs=True)
                asked = [name.strip() for name in options.variants.split(";")]
                names = [name for name in dict.fromkeys([BASE, *asked]) if name in possible]
            else:
                names = names_for(database, broker)
            try:
                with closing(Pair(servers, database, broker, names, round_trip=options.round_trip)) as pair:
                    found.append(pair.measure(options.rounds, options.messages))
            except Exception as error:  # noqa: BLE001 - a server that is missing must not end the others
                traceback.print_exc()
                lost = {"database": database, "broker": broker, "round_trip": options.round_trip}
                none: dict[str, Any] = {"servers": {}, "variants": {}, "shows": []}
                found.append({**lost, **none, "failed": {"all variants": f"{type(error).__name__}: {error}"}})
    return found


def results(pairs: list[dict[str, Any]]) -> dict[str, Any]:
    """The pairs, and what they were measured on."""
    peers = {
        name: {"settings": peer.settings, "promises": peer.promises, "versions": versions(*peer.packages)}
        for name, peer in PEERS.items()
    }
    servers = {kind: version for pair in pairs for kind, version in pair["servers"].items()}
    return {"machine": machine(), "versions": versions(), "servers": servers, "peers": peers, "pairs": pairs}


def main(arguments: Sequence[str]) -> int:
    """Run it; print tables, or JSON."""
    options = options_of(arguments)
    with Servers() as servers:
        pairs = run(servers, options)
    if options.save:
        save("rates", results(pairs))
    if options.json:
        print(json.dumps(results(pairs), indent=2))
    else:
        for pair in pairs:
            _print(pair)
    return 1 if any(pair["failed"] for pair in pairs) else 0


def _print(pair: dict[str, Any]) -> None:
    print(f"\n{pair['database']} x {pair['broker']}: throughput relative to bare (quartiles), paired in each round")
    for name, figure in pair["variants"].items():
        quartiles = f"{figure['lower_quartile']:.2f}-{figure['upper_quartile']:.2f}"
        rates = f"{figure['messages_per_second']:8.0f} messages/s {figure['cpu_microseconds']:7.0f} us of CPU"
        print(f"{name:36} {figure['median']:6.2f}  ({quartiles})  {rates}")
    for show in pair["shows"]:
        verdicts = ", ".join(
            f"{goal} {show[goal]:g} {show[f'{goal}_verdict']}" for goal in ("target", "prototype") if show[goal]
        )
        quartiles = f"{show['lower_quartile']:.2f}-{show['upper_quartile']:.2f}"
        print(f"  {show['name']:48} {show['median']:7.2f}  ({quartiles})  {verdicts}")
