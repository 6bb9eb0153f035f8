"""`python -m tests.simulation`: the small cases in full, the seeded faults, and larger ones by chance.

Exit code 1 if a promise broke, or a seeded fault was not found.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import count, islice

from idemp.testing.simulation import Report, Run
from idemp.testing.simulation.exploring import Exploring
from idemp.testing.simulation.search import quiet, sample
from tests.simulation import documents as of_documents
from tests.simulation import prepared as of_prepared
from tests.simulation import prepared_faults, twophase_faults
from tests.simulation import streams as of_streams
from tests.simulation import twophase as of_twophase
from tests.simulation.cases import full, large, medium, small
from tests.simulation.mutants import MUTANTS

CHUNK = 500


def main() -> int:
    """Run them, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--schedules", type=int, default=10_000, help="distinct schedules by chance (default: %(default)s)"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60.0, help="at most so long by chance (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--full", action="store_true", help="all cases in full, which takes long")
    options = parser.parse_args()
    held = [_in_full(name, each) for name, each in (full if options.full else small)(workers=options.workers).items()]
    kinds = {"documents": of_documents, "streams": of_streams, "prepared": of_prepared, "two phases": of_twophase}
    for kind, cases in kinds.items():
        of_kind = cases.full() if options.full else cases.small()
        held += [_in_full(f"{kind}: {name}", each) for name, each in of_kind.items()]
    faults = (MUTANTS, of_documents.MUTANTS, of_streams.MUTANTS, prepared_faults.MUTANTS, twophase_faults.MUTANTS)
    seeded = [mutant for each in faults for mutant in each]
    killed = [_mutant(mutant.name, mutant.simulation) for mutant in seeded]
    print(f"seeded faults found: {sum(killed)} of {len(killed)}\n")
    for name, each in {
        "": large(workers=options.workers),
        " of prepared messages": of_prepared.large(),
        " of handlings in two phases": of_twophase.large(),
    }.items():
        print(f"a large case{name} by chance:", report := each.sample(300, seed=options.seed), sep="\n  ")
        held.append(report.violation is None)
    held.append(_by_chance(medium(workers=options.workers), options))
    return 0 if all(held) and all(killed) else 1


def _in_full(name: str, simulation: Exploring) -> bool:
    report = simulation.explore()
    print(f"{name}:\n  {report}\n", flush=True)
    return report.violation is None


def _mutant(name: str, simulation: Exploring) -> bool:
    report: Report = simulation.explore(5_000)
    found = report.violation
    told = f"{found.promise}, {len(found.steps)} steps" if found else "NOT FOUND"
    print(f"  {name:<50}{report.schedules:>7} schedules  {told}", flush=True)
    return found is not None


def _by_chance(simulation: Exploring, options: argparse.Namespace) -> bool:
    """Schedules by chance, until so many distinct ones have been run; the processes share the numbers out."""
    begun, deadline, made = time.monotonic(), time.monotonic() + options.minutes * 60, 0
    seen: set[bytes] = set()
    broken: list[Run] = []
    with ProcessPoolExecutor(options.processes) as pool:
        numbers: Iterator[int] = count(step=CHUNK)
        while len(seen) < options.schedules and not broken and time.monotonic() < deadline:
            starts = list(islice(numbers, options.processes * 4))
            for digests, violation in pool.map(_chunk, [(simulation, options.seed, first) for first in starts]):
                made += CHUNK
                seen |= digests
                broken += [violation] if violation else []
            rate = made / (time.monotonic() - begun)
            print(
                f"\rthe small case by chance: {len(seen):,} distinct of {made:,} schedules, {rate:,.0f} per second",
                end="",
                flush=True,
            )
    print(f"\nseed {options.seed}, {time.monotonic() - begun:.1f} s")
    print(broken[0] if broken else "all promises held")
    return not broken


def _chunk(given: tuple[Exploring, int, int]) -> tuple[set[bytes], Run | None]:
    simulation, seed, first = given
    with quiet():
        tally = sample(simulation.setting, CHUNK, seed, first)
    if tally.broken is None:
        return tally.distinct, None
    return tally.distinct, simulation.sample(CHUNK, seed=seed, first=first).violation


if __name__ == "__main__":
    sys.exit(main())
