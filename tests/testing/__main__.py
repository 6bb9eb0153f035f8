"""`python -m tests.testing --examples 1000`: correct handlers under attack, and how long faulty ones stay unfound.

Exit code 1 if a correct handler raised anything, or a fault was not found.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from idemp import Idempotent
from idemp.testing import Harness, NotIdempotent, assert_idempotent, redelivery_machine, rehearse
from tests.testing import classic, correct, suspicious


def attack(case: correct.Case, examples: int) -> None:
    """Let Hypothesis attack an app with messages out of its samples, as a test class does."""
    machine = redelivery_machine(case.app, messages=messages(case), state=case.state, tables=case.tables, rehearse=True)
    configured: Any = machine.TestCase
    try:
        run_state_machine_as_test(machine, settings=settings(configured.settings, max_examples=examples, database=None))
    finally:
        configured.tearDownClass()


def messages(case: correct.Case) -> Any:
    by_type = {}
    for registration in case.app.registry.registrations():
        cls = case.app.registry.declared[registration.message_type].cls
        samples = [sample for sample in case.samples if isinstance(sample, cls)]
        by_type[registration.message_type if cls is dict else cls] = st.sampled_from(samples)
    return by_type


def held(index: int, examples: int) -> tuple[str, float, str]:
    """Attack the correct handler with this number: its name, seconds, and what it raised."""
    logging.disable(logging.CRITICAL)
    case, began = correct.CASES[index], time.perf_counter()
    try:
        attack(case, examples)
    except Exception as error:  # whatever it is, it is told
        return case.name, time.perf_counter() - began, f"{type(error).__name__}: {error}"
    return case.name, time.perf_counter() - began, ""


def main() -> int:
    """Run both, and print a line for each handler."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=1000, help="of each correct handler (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    unfound = 0
    for classical in classic.CASES:
        began, told = time.perf_counter(), "NOTHING"
        try:
            assert_idempotent(
                classical.handler,
                classic.SAMPLE,
                message=dict,
                type=classic.TYPE,
                policy=Idempotent(),
                tables=classic.Base.metadata,
            )
        except NotIdempotent as error:
            told = ", ".join(finding.kind for finding in error.findings)
        unfound += told == "NOTHING"
        print(f"{classical.handler.__name__:<28}{time.perf_counter() - began:6.1f} s  {told}", flush=True)
    for case in suspicious.CASES:
        began = time.perf_counter()
        with Harness(case.app, tables=case.tables) as harness:
            kinds = {finding.kind for sample in case.samples for finding in rehearse(harness, harness.message(sample))}
        unfound += not kinds
        print(
            f"{case.name:<28}{time.perf_counter() - began:6.1f} s  {', '.join(sorted(kinds)) or 'NOTHING'}", flush=True
        )
    raised = 0
    with ProcessPoolExecutor(options.processes) as pool:
        for name, seconds, error in pool.map(held, range(len(correct.CASES)), [options.examples] * len(correct.CASES)):
            raised += bool(error)
            print(f"{name:<28}{seconds:6.1f} s  {options.examples} examples, {error or 'nothing raised'}", flush=True)
    return 1 if unfound or raised else 0


if __name__ == "__main__":
    sys.exit(main())
