"""`python -m benchmarks all`: every part, saved below docs/benchmarks, and the page made of it. About 45 minutes.

A part that fails is told and keeps its former results; the others go on. More rounds, rows and variants: by the
sub-commands, each with `--save`.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any

from benchmarks import cpu, designs, growth, purge, rates, report, where
from benchmarks.results import save
from benchmarks.servers import Servers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FAR = "bare;naive;window;batch 50;batch 50 without idemp;batch handler 200;batch handler 200 without idemp"
QUICK = ["--rounds=2", "--messages=50"]


def parts(*, quick: bool) -> dict[str, Callable[[Servers], dict[str, Any]]]:
    """What is run, in this order."""
    short = QUICK if quick else []
    rows = ["--rows=20000"] if quick else []
    windows = ["--rounds=2", "--seconds=3", "--messages=100"] if quick else []
    return {
        "cpu": lambda servers: cpu.run(servers, cpu.options_of(short)),
        "rates": lambda servers: rates.results(list(_pairs(servers, short))),
        "where": lambda servers: where.run(servers, where.options_of(short)),
        "designs": lambda servers: designs.run(servers, designs.options_of(short)),
        "growth": lambda servers: growth.run(servers, growth.options_of(["--keys=time-ordered", *rows, *short])),
        "purge": lambda servers: purge.run(servers, purge.options_of([*rows, *windows])),
    }


def _pairs(servers: Servers, short: list[str]) -> list[dict[str, Any]]:
    asked = (
        [],
        ["--round-trip=2", f"--variants={FAR}", "--rounds=9", "--messages=100"],
        ["--brokers=redis,local", "--rounds=9", "--messages=200"],
        ["--databases=mariadb,sqlite", "--brokers=rabbitmq,redis,local", "--rounds=9", "--messages=200"],
    )
    return [pair for options in asked for pair in rates.run(servers, rates.options_of([*options, *short]))]


def main(arguments: Sequence[str]) -> int:
    """Run all of it."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks all", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="to see that it works: the figures mean nothing")
    options = parser.parse_args(arguments)
    failed = []
    for name, run in parts(quick=options.quick).items():
        began = time.monotonic()
        try:
            with Servers() as servers:
                save(name, run(servers))
        except Exception:  # noqa: BLE001 - half an hour's other results are worth keeping
            traceback.print_exc()
            failed.append(name)
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    report.main([])
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0
