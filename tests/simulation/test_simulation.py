"""Orders of steps are enumerated, not hoped for: the promises hold in all of them, and seeded faults are found."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from datetime import timedelta

import pytest

from idemp.errors import ConfigurationError
from idemp.testing.crash_points import CRASH_POINTS
from idemp.testing.simulation import Parts, Simulation
from idemp.testing.simulation.search import explore, quiet
from tests.lanes import mostly_slow
from tests.simulation.cases import MINUTE, large, small
from tests.simulation.mutants import MUTANTS, Mutant

CASES = small()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CASES)
def test_promises_hold_in_every_schedule_of_a_small_case(name: str) -> None:
    report = CASES[name].explore()
    print(f"{name}: {report}")
    assert report.violation is None, report
    assert report.complete


APART = {
    "two workers, a death": Simulation(copies=1, relays=0, purges=0, jumps=()),
    "a message twice, a death": Simulation(workers=1, relays=0, purges=0, jumps=()),
    "a fault and a death, late claim": Simulation(
        workers=1, copies=1, relays=0, purges=0, jumps=(), faults=1, claim="late"
    ),
    "a relay and a cleaner": Simulation(workers=1, copies=1, crashes=0, jumps=(MINUTE,)),
    "the database fails once": Simulation(
        workers=1, copies=1, relays=0, purges=0, jumps=(MINUTE,), crashes=0, outages=1
    ),
    "told to stop": Simulation(workers=1, copies=2, relays=0, purges=0, jumps=(), crashes=0, stops=1),
    "a relay that stays dead": Simulation(workers=1, copies=1, purges=0, jumps=(), relay_returns=False),
}


@pytest.mark.parametrize("name", mostly_slow(APART))
def test_merged_schedules_come_to_the_same_ends_as_all(name: str) -> None:
    with quiet():
        merged = explore(APART[name].setting, None, merge=True)
        apart = explore(APART[name].setting, None, merge=False)
    print(f"{name}: {merged.schedules} for {apart.schedules}, {len(merged.ends)} ends")
    assert merged.complete
    assert apart.complete
    assert merged.broken is apart.broken is None
    assert merged.ends == apart.ends
    assert merged.schedules < apart.schedules
    assert merged.paths <= apart.schedules == len(apart.distinct), "two different choices led to one trace"


@pytest.mark.parametrize("mutant", mostly_slow(MUTANTS, first=10), ids=lambda mutant: mutant.name)
def test_seeded_fault_is_found(mutant: Mutant) -> None:
    report = mutant.simulation.explore(5_000)
    print(f"{mutant.name}: {report}")
    violation = report.violation
    assert violation is not None
    assert mutant.simulation.replay(violation.schedule) == violation, "the schedule does not lead there again"
    genuine = replace(mutant.simulation, parts=Parts()).explore(30)
    assert genuine.violation is None, genuine


def test_violation_is_a_short_numbered_list() -> None:
    (mutant,) = [each for each in MUTANTS if each.name == "no redispatch on duplicate"]
    violation = mutant.simulation.explore().violation
    assert violation is not None
    lines = str(violation).splitlines()
    assert lines[0] == "nothing lost: message-1 was acked with an unconfirmed output, and no relay lives"
    assert lines[1] == "    1. worker 1: receive → message-1, copy 1"
    assert "    8. worker 1: dies → before publish" in lines
    assert lines[-1].endswith("worker 1, life 2: settle → ack")
    assert violation.schedule[-1] == "worker 1: dies", "choices behind the last one that matters were kept"


def test_every_death_leads_where_the_list_of_crash_points_says() -> None:
    """One worker dies before each of its calls: what is committed by then agrees with the public list."""
    simulation = Simulation(workers=1, copies=1, relays=0, purges=0, jumps=())
    calls = [step.partition(": ")[2].partition(" →")[0] for step in simulation.replay(()).steps]
    committed = {point.name: point.committed for point in CRASH_POINTS}
    for number, call in enumerate(calls):
        if f"before {call}" not in committed:
            continue
        schedule = [f"worker 1: {each}" for each in calls[:number]]
        run = simulation.replay([*schedule, "worker 1: dies"])
        handled_again = any(step.endswith("claim → claimed") for step in run.steps[run.scheduled :])
        assert run.promise == ""
        assert handled_again is not committed[f"before {call}"], run


def test_one_seed_one_run_byte_for_byte() -> None:
    """In another process, too, whose hashes are seeded otherwise."""
    program = (
        "import sys; from tests.simulation.cases import large; "
        "sys.stdout.buffer.write(b'--'.join(large().run(number, seed=7).trace for number in range(20)))"
    )
    here = b"--".join(large().run(number, seed=7).trace for number in range(20))
    command = [sys.executable, "-c", program]
    there = subprocess.run(command, check=True, capture_output=True, timeout=60, env={"PYTHONHASHSEED": "1"})
    assert here == there.stdout
    assert large().run(0, seed=8).trace != large().run(0, seed=7).trace


def test_large_case_by_chance() -> None:
    report = large().sample(200, seed=3)
    print(report)
    assert report.violation is None, report
    assert report.distinct > 195


def test_impossible_choice_names_the_possible_ones() -> None:
    with pytest.raises(ConfigurationError, match="Possible: worker 1: receive, worker 2: receive"):
        Simulation(jumps=()).replay(["worker 1: commit"])


@pytest.mark.parametrize("options", [{"workers": 0}, {"crashes": -1}, {"jumps": (timedelta(0),)}])
def test_nothing_to_simulate_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError):
        Simulation(**options)  # type: ignore[arg-type]
