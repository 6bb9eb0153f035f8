"""`make bench`, or `python -m benchmarks NAME …`: what idemp costs, beside what a user would write without it.

    all     every part, saved below docs/benchmarks with a page made of it (the default; about 45 minutes)
    rates   messages per second on real servers, as ratios to the bare handler; peers and limits beside them
    where   where the CPU time of a message goes, by whose code it is
    designs the design that was taken beside others, for goals that are out of reach
    cpu     CPU time of the protocol alone: SQLite or PostgreSQL, and a broker in memory
    growth  what a message costs in an inbox of ten million
    bulk    what a chunk of 50,000 rows costs, beside the server's own statements that write the same
    purge   how long deliveries take while a day of a million expired claims is deleted
    poison  what poison in a queue costs the healthy messages
    pipeline  messages a second from Parquet through Spark into PostgreSQL, beside PostgreSQL's own statements
    far     what a message costs through Spark among ten million, beside one among a million
    reconcile  a reconciliation of ten million rows beside Spark's own distinct count of the same ids (needs `idemp[spark]`)
    reading  rows a second from PostgreSQL into Spark
    guard   the guard against late duplicates at ten million ids
    twophase  a handling in two databases by two-phase commit, beside one database and beside a message to the other
    report  the page and the plots, made anew of what was saved

Each takes `--help`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from benchmarks import cpu, designs, everything, growth, poison, purge, rates, report, where
from benchmarks.telling import HEADINGS

if TYPE_CHECKING:
    from collections.abc import Callable


def _of_pipeline(name: str) -> Callable[[list[str]], int]:
    """A part that takes PySpark or Arrow, which are there only where somebody wants them."""

    def main(arguments: list[str]) -> int:
        part: Any = import_module(f"benchmarks.{name}")
        return int(part.main(arguments))

    return main


NAMES = {
    "all": everything.main,
    "rates": rates.main,
    "where": where.main,
    "designs": designs.main,
    "cpu": cpu.main,
    "growth": growth.main,
    "purge": purge.main,
    "poison": poison.main,
    **{name: _of_pipeline(name) for name in HEADINGS},
    "report": report.main,
}


def main() -> int:
    """Run one of them."""
    name, *arguments = sys.argv[1:] or ["all"]
    if name.startswith("-") and name not in {"-h", "--help"}:
        name, arguments = "all", sys.argv[1:]
    if name not in NAMES:
        print(__doc__)
        return 0 if name in {"-h", "--help"} else 2
    return NAMES[name](arguments)


if __name__ == "__main__":
    sys.exit(main())
