"""Faults in what a message costs, and in the benchmarks, which would then say what is not so."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_RATES: Final = "tests/benchmarks/test_rates.py"

IN_COSTS: Final = (
    Mutant(
        name="marks-one-by-one",
        file="idemp/dispatch.py",
        old="len(self._marks) >= self._batch or",
        new="len(self._marks) >= 1 or",
        breaks="Each message costs a second transaction, for its mark.",
        tests=("tests/benchmarks/test_costs.py::test_writing_transactions_per_message",),
    ),
    Mutant(
        name="benchmark-keeps-void-figures",
        file="benchmarks/rates.py",
        old="if wrong := variant.conserved():",
        new="if (wrong := variant.conserved()) and not wrong:",
        breaks="A variant that loses messages is told to be fast.",
        tests=(f"{_RATES}::test_what_is_not_conserved_has_no_figures",),
    ),
    Mutant(
        name="benchmark-does-not-count-outputs",
        file="benchmarks/work.py",
        old="== (len(good), good, good, 0, len(self._poison)):",
        new="== (len(good), good, outputs, 0, len(self._poison)):",
        breaks="A variant that sends nothing is told to be fast.",
        tests=(f"{_RATES}::test_what_is_not_conserved_has_no_figures",),
    ),
    Mutant(
        name="benchmark-takes-luck-for-proof",
        file="benchmarks/shows.py",
        old="surely = reached and sign * found[bound] >= sign * goal",
        new="surely = reached",
        breaks="A target counts as reached though the next run may miss it.",
        tests=(f"{_RATES}::test_a_ratio_pairs_the_blocks_of_one_round",),
    ),
)
