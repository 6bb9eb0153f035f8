"""`make bench`, or `python -m benchmarks NAME …`: what idemp costs, beside what a user would write without it.

    rates   messages per second on real servers, as ratios to the bare handler (the default)
    cpu     CPU and throughput of the protocol alone: SQLite or PostgreSQL, and a broker in memory
    poison  what poison in a queue costs the healthy messages

Each takes `--help`.
"""

from __future__ import annotations

import sys

from benchmarks import cpu, poison, rates

NAMES = {"rates": rates.main, "cpu": cpu.main, "poison": poison.main}


def main() -> int:
    """Run one of them."""
    name, *arguments = sys.argv[1:] or ["rates"]
    if name.startswith("-") and name not in {"-h", "--help"}:
        name, arguments = "rates", sys.argv[1:]
    if name not in NAMES:
        print(__doc__)
        return 0 if name in {"-h", "--help"} else 2
    return NAMES[name](arguments)


if __name__ == "__main__":
    sys.exit(main())
