"""`python -m benchmarks where`: where the CPU time of a message goes, by whose code it is.

Blocks without a profiler tell the time, interleaved as ever; one more block of each variant, with a profiler in the thread
that consumes, tells the shares. What Python's own library and built-ins take counts for whoever calls them.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import pstats
import random
import statistics
import sys
import time
from collections import Counter
from contextlib import ExitStack, closing
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from benchmarks.figures import machine, versions
from benchmarks.plain import Bare, Batched
from benchmarks.results import save
from benchmarks.servers import Servers
from benchmarks.variants import Variant, place_of
from benchmarks.wrapped import Wrapped, WrappedSets
from idemp.inbox.sql import create_engine_safely

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from benchmarks.work import Place

_ROOT = Path(__file__).parent.parent
#: Of packages beside ours.
PACKAGES = {
    "sqlalchemy": "SQLAlchemy",
    "psycopg": "psycopg",
    "psycopg_binary": "psycopg",
    "amqp": "py-amqp and kombu",
    "kombu": "py-amqp and kombu",
    "vine": "py-amqp and kombu",
    "pydantic": "the handler",
    "pydantic_core": "the handler",
}
#: Of our own folders.
PARTS = {"inbox": "idemp: store", "broker": "idemp: broker", "telemetry": "idemp: telemetry"}
PROTOCOL = "idemp: protocol"
OTHERS = "others, and Python's library"

Function = tuple[str, int, str]
Taken = tuple[int, int, float, float, dict[Function, tuple[int, int, float, float]]]
"""Calls, calls without recursion, own seconds, seconds with what it calls; and the same by caller."""


class _Consuming:
    """Profiles the calling thread while it consumes."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.profile = cProfile.Profile(time.thread_time)
        super().__init__(*arguments, **options)

    def consume(self, count: int) -> float:
        with self.profile:
            seconds: float = super().consume(count)  # type: ignore[misc]
        return seconds


class _Running:
    """Profiles the thread that idemp's worker has for it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.profile = cProfile.Profile(time.thread_time)
        super().__init__(*arguments, **options)

    def _run(self) -> None:
        with self.profile:
            super()._run()  # type: ignore[misc]


class _ProfiledBare(_Consuming, Bare):
    pass


class _ProfiledBatched(_Consuming, Batched):
    pass


class _ProfiledWrapped(_Running, Wrapped):
    pass


class _ProfiledSets(_Running, WrappedSets):
    pass


#: Each as it is, and with a profiler.
VARIANTS: dict[str, tuple[Callable[[Place], Variant], Callable[[Place], Any]]] = {
    "bare": (Bare, _ProfiledBare),
    "window": (Wrapped, _ProfiledWrapped),
    "batch 50": (lambda place: Wrapped(place, batch=50), lambda place: _ProfiledWrapped(place, batch=50)),
    "batch 50 without idemp": (lambda place: Batched(place, size=50), lambda place: _ProfiledBatched(place, size=50)),
    "batch handler 200": (
        lambda place: WrappedSets(place, batch=200),
        lambda place: _ProfiledSets(place, batch=200),
    ),
}


def layer_of(path: str) -> str | None:
    """Whose code a file is; `None` for Python's own.

    Example:
        >>> layer_of("/x/site-packages/sqlalchemy/engine/base.py"), layer_of("/usr/lib/python3.11/uuid.py")
        ('SQLAlchemy', None)
    """
    parts = PurePath(path).parts
    if "site-packages" in parts:
        return PACKAGES.get(parts[parts.index("site-packages") + 1], OTHERS)
    if not PurePath(path).is_relative_to(_ROOT):
        return None
    folder, *inner = PurePath(path).relative_to(_ROOT).parts
    return PARTS.get(inner[0], PROTOCOL) if folder == "idemp" else "the handler"


def shares(stats: Mapping[Function, Taken]) -> dict[str, float]:
    """The parts of all time that each layer's code took, those that it calls in Python's library included."""
    taken: Counter[str] = Counter()
    for (path, _, _), (_, _, seconds, _, callers) in stats.items():
        layer = layer_of(path)
        if layer is not None:
            taken[layer] += seconds
            continue
        left = seconds
        for (caller, _, _), (_, _, for_it, _) in callers.items():
            taken[layer_of(caller) or OTHERS] += for_it
            left -= for_it
        taken[OTHERS] += left
    total = sum(taken.values())
    return {layer: seconds / total for layer, seconds in taken.items()}


def measure(servers: Servers, names: Sequence[str], rounds: int, messages: int) -> dict[str, dict[str, Any]]:
    """Per variant: microseconds of CPU a message, in all and by layer; and calls of functions."""
    with ExitStack() as stack:
        url, broker = servers.database("postgresql"), servers.broker("rabbitmq")

        def place(name: str) -> Place:
            engine = create_engine_safely(url)  # each has its own: idemp's listens to what handlers do
            stack.callback(engine.dispose)
            return place_of(name, engine, broker)

        cpu: dict[str, list[float]] = {name: [] for name in names}
        with ExitStack() as opened:
            plain = {name: opened.enter_context(closing(VARIANTS[name][0](place(name)))) for name in names}
            gc.collect()
            gc.freeze()
            for number in range(rounds + 1):  # the first to warm up
                for name in random.sample(list(names), len(names)):
                    for variant in plain.values():
                        variant.keep_alive()
                    block = plain[name].run(messages)
                    if number:
                        cpu[name].append(block.cpu_seconds * 1e6)
        found = {}
        for name in names:
            with closing(VARIANTS[name][1](place(f"profiled {name}"))) as variant:
                for _ in range(2):
                    variant.run(messages)
            stats: Any = pstats.Stats(variant.profile)
            own = statistics.median(cpu[name])
            found[name] = {
                "cpu_microseconds": round(own, 1),
                "calls": round(stats.total_calls / (2 * messages)),
                "layers": {layer: round(share * own, 1) for layer, share in shares(stats.stats).items()},
            }
        return found


def markdown(found: Mapping[str, Mapping[str, Any]]) -> str:
    """A table: layers by variants."""
    layers = [*dict.fromkeys([*PACKAGES.values(), *PARTS.values(), PROTOCOL, OTHERS])]
    lines = [
        f"| µs of CPU a message | {' | '.join(found)} |",
        f"|---|{'---|' * len(found)}",
        *(_line(layer, [f"{each['layers'].get(layer, 0.0):.0f}" for each in found.values()]) for layer in layers),
        _line("**all**", [f"**{each['cpu_microseconds']:.0f}**" for each in found.values()]),
        _line("calls of functions", [str(each["calls"]) for each in found.values()]),
    ]
    return "\n".join(lines) + "\n"


def _line(title: str, cells: Sequence[str]) -> str:
    return f"| {title} | {' | '.join(cells)} |"


def run(servers: Servers, options: argparse.Namespace) -> dict[str, Any]:
    """All variants."""
    variants = measure(servers, list(VARIANTS), options.rounds, options.messages)
    how = {"rounds": options.rounds, "messages": options.messages}
    return {"machine": machine(), "versions": versions(), **how, "variants": variants}


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    """What is asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks where", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--messages", type=int, default=600, help="per block")
    parser.add_argument("--save", action="store_true", help="below docs/benchmarks, for `report`")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Run it; print a table, or JSON."""
    options = options_of(arguments)
    with Servers() as servers:
        found = run(servers, options)
    if options.save:
        save("where", found)
    sys.stdout.write(f"{json.dumps(found, indent=2)}\n" if options.json else markdown(found["variants"]))
    return 0
