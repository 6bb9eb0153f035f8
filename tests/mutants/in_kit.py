"""Faults in the test kit: handlers that are not idempotent pass it, or the wrong cause is blamed."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_IDIOMS: Final = "tests/testing/test_idioms.py"
_USE: Final = "tests/testing/test_use.py"

IN_KIT: Final = (
    Mutant(
        name="kit-leaves-chance-to-luck",
        file="idemp/testing/chance.py",
        old="        if self._first is None:\n            return 0\n",
        new="        return 0\n",
        breaks="A decision by chance is found in some runs of a test, and not in others.",
        tests=(f"{_IDIOMS}::test_chance_is_found_for_sure",),
    ),
    Mutant(
        name="kit-looks-at-one-moment",
        file="idemp/testing/detectors.py",
        old='    if "clock" in wanted and first.outputs',
        new="    if not wanted and first.outputs",
        breaks="Whether a handler is found that acts by the calendar depends on the day of the test.",
        tests=(f"{_IDIOMS}::test_the_clock_is_looked_at_around_the_boundaries_of_the_calendar",),
    ),
    Mutant(
        name="kit-blames-a-death",
        file="idemp/testing/light.py",
        old="            comparison.check_causes(expected, wanted)\n",
        new="",
        breaks="A random value in the state passes, or is blamed on a death of the process.",
        tests=(f"{_USE}::test_chance_and_clock_are_not_blamed_on_a_death",),
    ),
    Mutant(
        name="kit-passes-a-narrow-key",
        file="idemp/testing/light.py",
        old='            if "conflict" in wanted:\n',
        new="            if not wanted:\n",
        breaks="A key under which two different messages are one passes, and the product parks the second.",
        tests=(f"{_USE}::test_a_key_that_is_too_narrow",),
    ),
    Mutant(
        name="kit-blind-to-old-connections",
        file="idemp/testing/connections.py",
        old="            if (number := _changes(each) - self._changes[id(each)]) > 0\n",
        new="            if (number := _changes(each) - self._changes[id(each)]) < 0\n",
        breaks="What a handler writes through a SQLite connection that was open before is not seen.",
        tests=("tests/testing/test_connections.py::test_sqlite_in_memory",),
    ),
    Mutant(
        name="kit-says-nothing-of-the-unseen",
        file="idemp/testing/light.py",
        old="    for sentence in tally.unseen:\n",
        new="    for sentence in ():\n",
        breaks="A test is green and silent though the handler used a connection that nothing can look into.",
        tests=("tests/testing/test_connections.py::test_what_can_not_be_seen_is_said",),
    ),
    Mutant(
        name="kit-takes-messages-for-settings",
        file="idemp/testing/detectors.py",
        old="            found |= {place for place in places if run.seen.changes(place)}\n",
        new="            pass\n",
        breaks="What a handler remembers of its messages passes for settings that are made at their first use.",
        tests=(f"{_IDIOMS}::test_what_follows_from_the_message_is_memory",),
    ),
)
