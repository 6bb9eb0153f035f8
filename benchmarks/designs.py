"""`python -m benchmarks designs`: for each goal that is out of reach, the designs beside the one that was taken.

PostgreSQL with RabbitMQ, in rounds as those of `rates`, all in one run; see docs/benchmarks/does-not-reproduce.md.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any, Final

from benchmarks import rates
from benchmarks.figures import machine, versions
from benchmarks.results import save
from benchmarks.servers import Servers

if TYPE_CHECKING:
    from collections.abc import Sequence

DESIGNS: Final = {
    "one message in a transaction": (
        "bare", "one confirm at a time", "window", "window, statement by statement", "4 threads",
    ),
    "batches": (
        "batch 50 without idemp", "batch 50", "batch 50, statement by statement", "batch 200", "batch handler 50",
    ),
    "batch handlers": (
        "batch handler 200 without idemp", "batch handler 50", "batch handler 200", "batch handler 400",
    ),
    "duplicates": ("duplicates", "duplicates in batches", "duplicates in batches of 200"),
    "duplicates whose outputs are confirmed": (
        "duplicates pending", "duplicates pending in batches", "duplicates pending in batches of 200",
    ),
    "several at once": ("4 processes, bare", "4 processes", "4 threads, bare", "4 threads", "2 processes"),
}  # fmt: skip
"""What is put side by side."""


def run(servers: Servers, options: argparse.Namespace) -> dict[str, Any]:
    """All of them."""
    names = dict.fromkeys(name for group in DESIGNS.values() for name in group)
    asked = [f"--variants={';'.join(names)}", f"--rounds={options.rounds}", f"--messages={options.messages}"]
    (pair,) = rates.run(servers, rates.options_of(asked))
    return {"machine": machine(), "versions": versions(), "designs": DESIGNS, **pair}


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    """What is asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks designs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--messages", type=int, default=400, help="per block")
    parser.add_argument("--save", action="store_true", help="below docs/benchmarks, for `report`")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Run them; print a table each."""
    from benchmarks.page import designs

    options = options_of(arguments)
    with Servers() as servers:
        found = run(servers, options)
    if options.save:
        save("designs", found)
    sys.stdout.write("\n".join(designs(found)))
    return 1 if found["failed"] else 0
