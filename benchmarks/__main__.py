"""Consumers side by side: `python -m benchmarks [NAME …] --rounds 16 --messages 200`.

Each consumer runs in processes of its own with its own queue and table. In each round all of them handle as many messages one
after another, in random order; a ratio is that of two consumers in one round, so that a slow minute slows both.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.seats import Consumers
from benchmarks.servers import running


@dataclass(frozen=True)
class Way:
    """A consumer to measure.

    Attributes:
        consume: `module:function` or `module:function:argument` in `benchmarks.consumers`.
        goal: Target of the ratio to the consumer `beside`; 0 for none.
        again: Whether the consumer gets messages that it has handled.
        far: Whether the database is 2 ms away.
        classic: Whether the consumer declares its queue itself.
    """

    consume: str
    goal: float = 0.0
    beside: str = "bare"
    processes: int = 1
    again: bool = False
    far: bool = False
    classic: bool = False


WAYS = {
    "bare": Way("plain:bare"),
    "naive": Way("plain:naive"),
    "single": Way("own:single"),
    "groups": Way("own:groups", 1.6),
    "groups, Core": Way("own:core"),
    "two databases": Way("own:second", beside="groups"),
    "batch of 50": Way("own:batches", 3.5),
    "lists of 200": Way("own:lists", 8.0),
    "duplicates": Way("own:groups", 2.0, again=True),
    "four bare": Way("plain:bare", processes=4),
    "four groups": Way("own:groups", 1.2, "four bare", processes=4),
    "bare asyncio": Way("aio:bare"),
    "bare asyncio, psycopg": Way("aio:bare:psycopg"),  # by SQLAlchemy, like handlers of idemp
    "bare asyncio, asyncpg": Way("aio:bare:asyncpg"),
    "asyncio, psycopg": Way("aio:own:psycopg", 1.0, "bare asyncio, psycopg"),
    "asyncio, asyncpg": Way("aio:own:asyncpg", 0.85, "bare asyncio, asyncpg"),
    "far bare": Way("plain:bare", far=True),
    "far groups": Way("own:groups", 1.2, "far bare", far=True),
    "far batch of 50": Way("own:batches", 3.0, "far bare", far=True),
    "far asyncio, psycopg": Way("aio:own:psycopg", 5.0, "far bare", far=True),
    "far asyncio, asyncpg": Way("aio:own:asyncpg", 5.0, "far bare", far=True),
}
PEERS = {
    "Powertools": Way("powertools:consume", 2.0),
    "FastStream": Way("stream:consume", 3.0),
    "event-forge": Way("forge:consume", 3.0, classic=True),
    "DBOS": Way("durable:consume", 6.0),
}
"""Consumers of other projects; their goals are ratios of `groups` to them."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=", ".join([*WAYS, *PEERS]))
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--messages", type=int, default=200)
    parser.add_argument("--peers", action="store_true", help="with other frameworks, which have to be installed")
    parser.add_argument("--disk", type=Path, default=Path("/var/tmp"), help="folder that PostgreSQL writes to")
    options = parser.parse_args()
    ways = WAYS | PEERS
    asked = options.names or [*WAYS, *(PEERS if options.peers else ())]
    besides = [ways[name].beside for name in asked]
    besides = [*(ways[name].beside for name in besides), *besides, *(["groups"] if set(asked) & set(PEERS) else [])]
    names = list(dict.fromkeys([*besides, *asked]))
    taken, cpu = measure({name: ways[name] for name in names}, options.rounds, options.messages, options.disk)
    width = max(map(len, names))
    print(f"\n{'':{width}} {'a second':>9} {'CPU, µs':>8}   ratio [quartiles]")
    for name in names:
        rate = options.messages / statistics.median(taken[name])
        line = f"{name:{width}} {rate:9.0f} {statistics.median(cpu[name]) / options.messages * 1e6:8.0f}   "
        if name in PEERS:
            line += f"groups / {name} {_ratio(taken[name], taken['groups'])}, goal {ways[name].goal}"
        elif name != ways[name].beside:
            line += f"/ {ways[name].beside} {_ratio(taken[ways[name].beside], taken[name])}"
            line += f", goal {ways[name].goal}" if ways[name].goal else ""
        print(line)


def measure(
    ways: dict[str, Way], rounds: int, messages: int, disk: Path
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return seconds, and seconds of CPU, of each consumer and round."""
    with ExitStack() as stack:
        servers = stack.enter_context(running(disk, redis="Powertools" in ways))
        consumers = {}
        for name, way in ways.items():
            database = servers.far if way.far else servers.database
            label = name.replace(" ", "-").replace(",", "").lower()
            consumers[name] = Consumers(
                label, way.consume, database, servers.broker, redis=servers.redis, processes=way.processes, classic=way.classic
            )
            stack.callback(consumers[name].close)
        for each in consumers.values():  # caches are filled, and the duplicates' messages are handled
            each.run(messages)
        taken: dict[str, list[float]] = {name: [] for name in ways}
        cpu: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(rounds):
            for name in random.sample(list(ways), len(ways)):
                seconds, busy = consumers[name].run(messages, again=ways[name].again)
                taken[name].append(seconds)
                cpu[name].append(busy)
            print(f"round {number + 1} of {rounds}", file=sys.stderr)
        for each in consumers.values():
            each.place.check()
    return taken, cpu


def _ratio(slow: list[float], fast: list[float]) -> str:
    ratios = [one / other for one, other in zip(slow, fast, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.2f} [{low:.2f}–{high:.2f}]"


if __name__ == "__main__":
    if sys.argv[1:2] == ["pipeline"]:
        from benchmarks import pipeline

        pipeline.main(sys.argv[2:])
    else:
        main()
