"""`python -m tests.mutants`: seeds each fault in a copy of the tree and runs the tests that must catch it.

Exit code 0: all were caught. 1: one survived, or its tests could not be run. 2: tests fail without any fault.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING

from tests.mutants.running import EVERYTHING, Run, copied_tree, run, run_mutant
from tests.mutants.seeded import MUTANTS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.mutants.mutant import Mutant


def main(arguments: Sequence[str] | None = None, known: Sequence[Mutant] = MUTANTS) -> int:
    """The command line."""
    options = _parser().parse_args(arguments)
    if options.list:
        print(markdown(known))
        return 0
    by_name = {mutant.name: mutant for mutant in known}
    unknown = sorted(set(options.names) - set(by_name))
    if unknown:
        print(f"no such mutant: {', '.join(unknown)}; --list shows all", file=sys.stderr)
        return 2
    chosen = [by_name[name] for name in options.names] or list(known)
    with copied_tree() as tree:
        healthy = run(tree, _tests_of(chosen, everything=options.all_tests), options.limit * len(chosen))
        if healthy.verdict != "survived":
            print(f"without any fault: {healthy.by}\n{healthy.output}", file=sys.stderr)
            return 2
        print(f"without any fault: all pass, {healthy.seconds:.0f} s", flush=True)
        runs = _run_all(chosen, tree, options)
    print(table([(mutant, runs[mutant.name]) for mutant in chosen]))
    return 0 if all(each.verdict == "killed" for each in runs.values()) else 1


def table(runs: Sequence[tuple[Mutant, Run]]) -> str:
    """The results as Markdown."""
    rows = [
        f"| {mutant.name} | {mutant.breaks} | {each.by if each.verdict == 'killed' else _shouted(each)} "
        f"| {each.seconds:.1f} |"
        for mutant, each in runs
    ]
    killed = sum(each.verdict == "killed" for _, each in runs)
    head = ["| mutant | what it breaks | killed by | seconds |", "|---|---|---|---:|"]
    return "\n".join([*head, *rows, "", f"{killed} of {len(runs)} killed"])


def markdown(mutants: Sequence[Mutant]) -> str:
    """The table of the README."""
    rows = [
        f"| {mutant.name} | `{mutant.file}` | {mutant.breaks} | {', '.join(f'`{test}`' for test in mutant.tests)} |"
        for mutant in mutants
    ]
    return "\n".join(["| mutant | where | what it breaks | tests that catch it |", "|---|---|---|---|", *rows])


def _run_all(chosen: Sequence[Mutant], tree: Path, options: argparse.Namespace) -> dict[str, Run]:
    runs: dict[str, Run] = {}
    with ThreadPoolExecutor(options.jobs) as pool:
        waiting = {
            pool.submit(
                run_mutant, mutant, tree, _tests_of([mutant], everything=options.all_tests), options.limit
            ): mutant
            for mutant in chosen
        }
        for done in as_completed(waiting):
            mutant, each = waiting[done], done.result()
            runs[mutant.name] = each
            told = f"{len(runs)}/{len(chosen)} {mutant.name}: {each.verdict} {each.by} ({each.seconds:.1f} s)"
            print(told, file=sys.stderr, flush=True)
            if each.verdict == "not run":
                print(each.output, file=sys.stderr, flush=True)
    return runs


def _tests_of(mutants: Sequence[Mutant], *, everything: bool) -> tuple[str, ...]:
    if everything:
        return EVERYTHING
    named = sorted({test for mutant in mutants for test in mutant.tests})
    # What stands inside of another is run with it.
    return tuple(test for test in named if not any(test.startswith((f"{other}::", f"{other}/")) for other in named))


def _shouted(each: Run) -> str:
    return f"**{each.verdict.upper()}** {each.by}".strip()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants to run; default all")
    parser.add_argument(
        "--all-tests", action="store_true", help="the whole suite instead of the tests named in the table"
    )
    parser.add_argument("--jobs", type=int, default=1, help="mutants at once")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds that the tests of one mutant may take")
    parser.add_argument("--list", action="store_true", help="print the table as Markdown")
    return parser


if __name__ == "__main__":
    sys.exit(main())
