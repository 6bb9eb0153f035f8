"""Faults in what a reconciliation reads and shows; what it judges, small worlds are for."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_BODIES: Final = "tests/spark/reconcile/test_bodies.py"
_PAGE: Final = "tests/spark/reconcile/test_page.py"

IN_RECONCILIATION: Final = (
    Mutant(
        name="reconcile-types-not-opted-in",
        file="idemp/spark/reconcile/bodies.py",
        old="        if item.policy.idempotent\n",
        new="",
        breaks="Messages of types that are never in the inbox are told as lost or unusable.",
        tests=(f"{_BODIES}::test_what_the_inbox_knows_nothing_of_is_left_out",),
    ),
    Mutant(
        name="reconcile-with-two-ids",
        file="idemp/spark/reconcile/bodies.py",
        old="any(former.opted_in for former in item.policy.previous)",
        new="not item.policy",
        breaks="After a change of a key, messages handled under the former one are told as lost.",
        tests=(f"{_BODIES}::test_apps_that_can_not_be_used",),
    ),
    Mutant(
        name="reconcile-other-bodies-alike",
        file="idemp/spark/reconcile/bodies.py",
        old="_NO_JSON + hashlib.sha256(message.body).digest()[:16]",
        new="_NO_JSON",
        breaks="Two bodies under one id are no conflict where they are no JSON.",
        tests=(f"{_BODIES}::test_without_an_app_other_bodies_than_json_differ_from_each_other",),
    ),
    Mutant(
        name="reconcile-page-runs-ids",
        file="idemp/spark/reconcile/page.py",
        old="{escape(named)}",
        new="{named}",
        breaks="Whoever may send a message may run a script in the browser of whoever reads the page.",
        tests=(f"{_PAGE}::test_one_file_that_fetches_nothing_and_runs_nothing",),
    ),
    Mutant(
        name="reconcile-hours-left-out",
        file="idemp/spark/reconcile/plots.py",
        old="range((last - first) // width + 1)",
        new="range(max((last - first) // width, 1))",
        breaks="The last hour of the log, where trouble usually is, makes the page fail.",
        tests=(f"{_PAGE}::test_plots_say_in_words_what_they_show",),
    ),
)
