"""Model and code take the same steps: every step of the simulated code is one of the model's, and the other way round."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import pytest

from tests.model.following import FOLLOWED, Followed, FollowedSimulation
from tests.model.page import rows
from tests.model.promela import Model, Statement, load
from tests.model.spin import MODEL, needs_spin
from tests.simulation import mutants

pytestmark = [pytest.mark.slow, needs_spin]

MINUTE: Final = timedelta(minutes=1)
WINDOW: Final = timedelta(hours=2)
_ALONE: Final[Mapping[str, Any]] = {"workers": 1, "relays": 0, "purges": 0, "jumps": (), "crashes": 0}
_AGES: Final = ("SHORT_WINDOW", "AGE_KNOWN")
CASES: Final[Mapping[str, tuple[tuple[str, ...], Mapping[str, Any]]]] = {
    "a fault, one attempt": ((), {"copies": 1, "faults": 1, "attempts": 1}),
    "a crash and a fault": ((), {"copies": 1, "faults": 1, "crashes": 1}),
    "a message twice, a crash": ((), {"copies": 2, "crashes": 1}),
    "two workers, a message twice": ((), {"workers": 2, "copies": 2}),
    "two workers, COMMIT fails": ((), {"workers": 2, "copies": 1, "outages": 1, "jumps": (MINUTE,)}),
    "a relay, a fault": ((), {"copies": 1, "relays": 1, "faults": 1, "jumps": (MINUTE,)}),
    "a relay, a crash": ((), {"copies": 1, "relays": 1, "crashes": 1, "jumps": (MINUTE,)}),
    "late claims, two workers, a fault": (("LATE_CLAIM",), {"workers": 2, "copies": 2, "faults": 1, "claim": "late"}),
    "a cleaner, two hours, a crash": (_AGES, {"copies": 2, "crashes": 1, "purges": 1, "jumps": (WINDOW,)}),
}
NEVER_TAKEN: Final = (
    # A relay gives an output up after ten refusals, too many for a small case.
    ":: fails -> quarantined[m] = quarantined[m] | (leased & pending[m]);",
    # The death of a worker that has nothing in hand is one before its next call, when it has received again.
    ":: unacked[me] -> queued[m] = true :: else",
)
"""Alternatives that no small case of the simulation takes."""
SAME_TO_BOTH: Final = {
    "GONE_IS_DUPLICATE": "no INSERT of the simulated inbox is ignored without a conflict",
    "REMAKE_OUTPUTS": "the bytes of outputs are looked after by the witness of the simulation",
    "SHORT_WINDOW": "it is about the world and not about the code",
    "SHORT_WINDOW AGE_KNOWN STALE_HORIZON": "a horizon that was read a while ago is in the model of the case as it is",
}
"""Faults of the model that following it does not notice, and why."""
CHANGES: Final = {
    ":: missing && relay_runs -> at[me] = ACK": ":: missing && relay_runs -> at[me] = PARK",
    ":: holder[m] == me -> holder[m] = BROKEN": ":: holder[m] == me -> holder[m] = NOBODY",
    ":: held(m) -> at[me] = RETRY; printf": ":: held(m) -> at[me] = PARK; printf",
    "at[me] = FIRST\n#endif\n#endif": "at[me] = LOOK\n#endif\n#endif",
    "unpend(m, leased);\n    leased = 0; sent": "leased = 0; sent",
}
IN_THE_CODE: Final = {
    "no redispatch on duplicate": "a message twice, a crash",
    "ack what is in flight": "two workers, a message twice",
    "unknown commit taken for done": "a fault, one attempt",
    "mark before publish": "a message twice, a crash",
    "no claim": "a message twice, a crash",
    "held claim taken for a duplicate": "two workers, a message twice",
    "relay marks before it publishes": "a relay, a fault",
    "purge of pending outputs": "a cleaner, two hours, a crash",
}


def simulation(model: Model, options: Mapping[str, Any], **more: Any) -> FollowedSimulation:
    """A case beside which the model is followed."""
    return FollowedSimulation(Followed(model), **{**_ALONE, **options, **more})


def noticed(text: Path, flags: tuple[str, ...] = ()) -> str:
    """The first difference between the code and a model that was changed; empty if there is none."""
    cases = [each for each in CASES.values() if ("purges" in each[1]) == any("PURGE" in flag for flag in flags)]
    for own, options in cases:
        found = simulation(load(text, (*own, *flags)), options).explore().violation
        if found is not None:
            assert found.promise == FOLLOWED
            return found.detail
    return ""


def test_the_model_is_read_as_spin_reads_it() -> None:
    """It has as many states; spin counts one more, in which nothing runs yet."""
    model = load(MODEL)
    left = [model.with_value(model.start, "relay_runs", runs) for runs in (0, 1)]
    seen = set(left)
    while left:
        new = {outcome.state for _, outcome in model.steps(left.pop())} - seen
        seen |= new
        left += new
    assert len(seen) + 1 == rows("runs")[0].states


@pytest.fixture(scope="module")
def followed() -> dict[str, tuple[Followed, Any]]:
    """Each case, and what it came to."""
    found = {}
    for name, (flags, options) in CASES.items():
        each = simulation(load(MODEL, flags), options)
        found[name] = (each.followed, each.explore())
    return found


@pytest.mark.parametrize("name", CASES)
def test_each_step_of_the_code_is_one_of_the_model(name: str, followed: dict[str, tuple[Followed, Any]]) -> None:
    report = followed[name][1]
    print(f"{name}: {report}")
    assert report.violation is None, report
    assert report.complete


def test_each_step_of_the_model_is_one_of_the_code(followed: dict[str, tuple[Followed, Any]]) -> None:
    """An alternative of a process that no case takes is one that the code does not have."""
    taken = {line for each, _ in followed.values() for line in each.lines}
    there = {
        line
        for each, _ in followed.values()
        for name, process in each.model.processes.items()
        if name != "World"
        for line in _alternatives(process)
    }
    missing = sorted(map(_alternative, there - taken))
    assert len(missing) == len(NEVER_TAKEN)
    assert all(found.startswith(known) for found, known in zip(missing, sorted(NEVER_TAKEN), strict=True)), missing


@pytest.mark.parametrize("flags", [row.flags for row in rows("mutants") if row.flags not in SAME_TO_BOTH])
def test_fault_of_the_model_is_noticed(flags: str) -> None:
    assert noticed(MODEL, tuple(flags.split()))


@pytest.mark.parametrize("old", CHANGES)
def test_changed_transition_is_noticed(old: str, tmp_path: Path) -> None:
    text = MODEL.read_text(encoding="utf-8")
    assert text.count(old) == 1
    changed = tmp_path / MODEL.name
    changed.write_text(text.replace(old, CHANGES[old]), encoding="utf-8")
    assert noticed(changed)


@pytest.mark.parametrize("name", IN_THE_CODE)
def test_changed_code_is_noticed(name: str) -> None:
    (mutant,) = [each for each in mutants.MUTANTS if each.name == name]
    flags, options = CASES[IN_THE_CODE[name]]
    found = simulation(load(MODEL, flags), options, parts=mutant.simulation.parts).explore().violation
    assert found is not None
    assert found.promise == FOLLOWED


def _alternative(line: int) -> str:
    before, text = (each.strip() for each in MODEL.read_text(encoding="utf-8").splitlines()[line - 2 : line])
    return f"{before} {text}" if text == ":: else" else text


def _alternatives(statement: Statement) -> Iterator[int]:
    if statement[0] == "one":
        for line, body in statement[1]:
            yield line
            yield from _alternatives(body)
    elif statement[0] == "all":
        for each in statement[1]:
            yield from _alternatives(each)
