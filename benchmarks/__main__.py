"""Consumers side by side: `python -m benchmarks [NAME …] --rounds 16 --messages 200`.

Each consumer runs in processes of its own with its own queue and table. In each round all of them handle as many messages one
after another, in random order; a ratio is that of two consumers in one round, so that a slow minute slows both.
CPU and WAL are those of one message; the CPU of the servers includes what they use when they are idle.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.charts import Run, quartiles
from benchmarks.seats import Consumers, package_of
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
        tree: Checkout whose package `idemp` the consumer uses; empty for the present one.
        variables: Environment variables of the consumer, `NAME=value` each.
    """

    consume: str
    goal: float = 0.0
    beside: str = "bare"
    processes: int = 1
    again: bool = False
    far: bool = False
    classic: bool = False
    tree: str = ""
    variables: tuple[str, ...] = ()


WAYS = {
    "bare": Way("plain:bare"),
    "naive": Way("plain:naive"),
    "single": Way("own:single"),
    "groups": Way("own:groups", 1.5),
    "groups, Core": Way("own:core"),
    "two databases": Way("own:second", beside="groups"),
    "batch of 50": Way("own:batches", 3.5),
    "lists of 200": Way("own:lists", 8.0),
    "duplicates": Way("own:groups", 1.8, again=True),
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
SLOW = {"groups": Way("own:groups", 2.4)}
"""Goals when each flush takes at least 1,000 µs longer."""
VARIANTS = """
NAME@FOLDER runs the consumer NAME with the package idemp of another checkout, NAME@FOLDER,VARIABLE=value also with environment
variables, and NAME@.,VARIABLE=value this checkout with them; it is compared with NAME, too, if that runs. Both checkouts use the
same tables, so their migrations have to be the same; the benchmark itself is that of this checkout.
"""
UNITS = ("seconds", "cpu", "postgresql", "rabbitmq", "wal")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, epilog=VARIANTS)
    parser.add_argument("names", nargs="*", metavar="NAME", help="; ".join([*WAYS, *PEERS]))
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--messages", type=int, default=200)
    parser.add_argument("--peers", action="store_true", help="with other frameworks, which have to be installed")
    parser.add_argument("--disk", type=Path, default=Path("/var/tmp"), help="folder that PostgreSQL writes to")
    slower = (
        "by which each flush of commits takes longer: commit_delay of PostgreSQL; commits that come meanwhile share the flush"
    )
    parser.add_argument("--flush", type=int, default=0, metavar="MICROSECONDS", help=slower)
    later = "begin no round later than that, except for the second one: quartiles need two"
    parser.add_argument("--seconds", type=float, default=float("inf"), help=later)
    parser.add_argument("--save", type=Path, metavar="FILE", help="write all figures, for `python -m benchmarks.charts`")
    options = parser.parse_args()
    ways = WAYS | PEERS | (SLOW if options.flush >= 1_000 else {})
    for name in options.names:
        kind, variant, settings = name.partition("@")
        if variant:
            tree, *variables = settings.split(",")
            ways[name] = replace(ways[kind], tree=tree, variables=tuple(variables))
    asked = options.names or [*WAYS, *(PEERS if options.peers else ())]
    besides = [ways[name].beside for name in asked]
    besides = [*(ways[name].beside for name in besides), *besides, *(["groups"] if set(asked) & set(PEERS) else [])]
    names = list(dict.fromkeys([*besides, *asked]))
    figures = measure({name: ways[name] for name in names}, options)
    run = Run(options.messages, options.flush, figures, {name: _compared(name, ways[name], names) for name in names})
    if options.save:
        options.save.write_text(json.dumps(asdict(run), indent=1))
    width = max(map(len, names))
    print(
        f"\n{'':{width}} {'a second':>9} {'CPU, µs':>8} {'PostgreSQL':>11} {'RabbitMQ':>9} {'WAL, bytes':>11}   ratio [quartiles]"
    )
    for name in names:
        cpus = " ".join(
            f"{run.each(name, unit) * 1e6:{size}.0f}" for unit, size in (("cpu", 8), ("postgresql", 11), ("rabbitmq", 9))
        )
        ratios = [
            f"{'' if fast == name else f'{fast} '}/ {slow} {quartiles(run.ratios(fast, slow))}"
            + (f", goal {goal}" if goal else "")
            for fast, slow, goal in run.compared[name]
        ]
        print(f"{name:{width}} {1 / run.each(name, 'seconds'):9.0f} {cpus} {run.each(name, 'wal'):11.0f}   {'; '.join(ratios)}")


def measure(ways: dict[str, Way], options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Return the figures of each consumer and round."""
    start, messages = time.monotonic(), options.messages
    with ExitStack() as stack:
        servers = stack.enter_context(running(options.disk, redis="Powertools" in ways, flush=options.flush))
        consumers = {}
        for number, (name, way) in enumerate(ways.items()):
            consumers[name] = Consumers(
                f"{number}-{re.sub('[^a-z0-9]+', '-', name.lower())[:30]}",
                way.consume,
                servers.far if way.far else servers.database,
                servers.broker,
                redis=servers.redis,
                processes=way.processes,
                classic=way.classic,
                path=stack.enter_context(package_of(way.tree)) if way.tree else "",
                variables=dict(variable.split("=", 1) for variable in way.variables),
            )
            stack.callback(consumers[name].close)
        for each in consumers.values():  # caches are filled, and the duplicates' messages are handled
            each.run(messages)
        figures: dict[str, dict[str, list[float]]] = {name: {unit: [] for unit in UNITS} for name in ways}
        for number in range(options.rounds):
            if number > 1 and time.monotonic() - start > options.seconds:
                break
            for name in random.sample(list(ways), len(ways)):
                measured = consumers[name].run(messages, again=ways[name].again, meter=servers.meter)
                for unit, figure in zip(UNITS, measured, strict=True):
                    figures[name][unit].append(figure)
            print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
        for each in consumers.values():
            each.place.check()
    return figures


def _compared(name: str, way: Way, names: list[str]) -> list[tuple[str, str, float]]:
    if name in PEERS:
        return [("groups", name, way.goal)]
    kind = name.partition("@")[0]
    others = {way.beside: way.goal} | ({kind: 0.0} if kind in names and kind != way.beside else {})
    return [(name, other, goal) for other, goal in others.items() if other != name]


if __name__ == "__main__":
    if sys.argv[1:2] == ["pipeline"]:
        from benchmarks import pipeline

        pipeline.main(sys.argv[2:])
    else:
        main()
