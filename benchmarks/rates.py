"""`python -m benchmarks rates`: messages per second on real servers, as ratios to the bare handler.

All variants are connected in one process, each with queues and a table of its own. They run in blocks, in random order
in each round; a ratio pairs the blocks of one round, and its median and quartiles are told. After the last round queues
and tables are counted: each order must have had one effect and one output, or the figures are void.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import statistics
import sys
from contextlib import ExitStack, closing
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from benchmarks.variants import Bare, Batched, Duplicates, Naive, Variant, Wrapped, WrappedSets
from idemp.inbox.sql import create_engine_safely
from idemp.testing import FaultProxy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sqlalchemy import Engine

VARIANTS: dict[str, Callable[[str, Engine, str], Variant]] = {
    "bare": Bare,
    "naive": Naive,
    "one confirm at a time": lambda *place: Wrapped(*place, waits=True),
    "window": Wrapped,
    "batch 50": lambda *place: Wrapped(*place, batch=50),
    "batch 50 without idemp": lambda *place: Batched(*place, size=50),
    "batch handler 200": lambda *place: WrappedSets(*place, batch=200),
    "batch handler 200 without idemp": lambda *place: Batched(*place, size=200, set_based=True),
    "not opted in": lambda *place: Wrapped(*place, idempotent=False),
    "duplicates": Duplicates,
    "duplicates pending": lambda *place: Duplicates(*place, redispatch="pending"),
    "duplicates in batches": lambda *place: Duplicates(*place, batch=50),
    "duplicates pending in batches": lambda *place: Duplicates(*place, redispatch="pending", batch=50),
}


def measure(variants: dict[str, Variant], rounds: int, messages: int) -> dict[str, list[float]]:
    """Seconds per message of each block of each variant."""
    for variant in variants.values():
        variant.run(messages)  # warm up
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name in random.sample(list(variants), len(variants)):
            seconds[name].append(variants[name].run(messages))
    return seconds


def figures(seconds: dict[str, list[float]], to: str = "bare") -> dict[str, dict[str, float]]:
    """Per variant: how many times as fast as another one, as median and quartiles; messages per second."""
    found = {}
    for name, own in seconds.items():
        ratios = [base / each for base, each in zip(seconds[to], own, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        found[name] = {
            "ratio": round(middle, 3),
            "lower_quartile": round(low, 3),
            "upper_quartile": round(high, 3),
            "messages_per_second": round(1 / statistics.median(own), 1),
        }
    return found


def main(arguments: Sequence[str]) -> int:
    """Run it; print a table, or JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks rates", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--messages", type=int, default=300, help="per block")
    parser.add_argument("--variants", help="names with commas between, default all; `bare` is always there")
    parser.add_argument("--round-trip", type=float, default=0.0, help="milliseconds that the database is farther away")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    wanted = ["bare", *(options.variants.split(",") if options.variants else VARIANTS)]
    from tests.servers.fixtures import private
    from tests.servers.postgresql import PostgreSQL
    from tests.servers.rabbitmq import RabbitMQ

    with ExitStack() as stack:
        server = stack.enter_context(private(PostgreSQL))
        url = server.create_database("bench")
        if options.round_trip:
            proxy = stack.enter_context(FaultProxy("127.0.0.1", server.port))
            proxy.slow(delay=options.round_trip / 2000)
            url = proxy.through(url)
        broker_url = stack.enter_context(private(RabbitMQ)).url
        engine = create_engine_safely(url)
        variants: dict[str, Variant] = {}
        for name in dict.fromkeys(wanted):
            place = (name.replace(" ", "_"), engine, broker_url)
            variants[name] = stack.enter_context(closing(VARIANTS[name](*place)))
        gc.collect()
        gc.freeze()  # as `idemp worker` does; for all variants alike
        seconds = measure(variants, options.rounds, options.messages)
        wrong = [found for variant in variants.values() if (found := variant.place.conserved())]
    if wrong:
        print("the figures are void:", *wrong, sep="\n", file=sys.stderr)
        return 1
    found = figures(seconds)
    if options.json:
        print(json.dumps({"versions": versions(), "figures": found}, indent=2))
        return 0
    for name, figure in found.items():
        span = f"{figure['lower_quartile']:.2f}-{figure['upper_quartile']:.2f}"
        print(f"{name:31} {figure['ratio']:6.2f}  ({span})  {figure['messages_per_second']:8.0f} messages/s")
    return 0


def versions() -> dict[str, Any]:
    """What it ran on."""
    names = ("idemp", "sqlalchemy", "psycopg", "kombu", "amqp", "pydantic")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}
