"""Faults in daily tables, and in what workers remember of windows."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_DAILY: Final = "tests/inbox/sql/test_daily.py"
_DROPPING: Final = "tests/inbox/sql/test_dropping.py"
_DELIVERIES: Final = "tests/protocol/test_daily_tables.py"
_HORIZONS: Final = "tests/inbox/sql/test_horizons.py"

IN_DAYS: Final = (
    Mutant(
        name="plain-inbox-unguarded",
        file="idemp/inbox/sql/daily.py",
        old="        ddl.guard(connection, self._tables, layout)\n",
        new="",
        breaks="A worker that has not heard of daily tables takes what was handled there for new.",
        tests=(f"{_DAILY}::TestSwitchingOn::test_a_worker_that_has_not_heard_of_it",),
    ),
    Mutant(
        name="layout-never-read-again",
        file="idemp/inbox/sql/places.py",
        old="        self._next_look = 0.0\n        return True",
        new="        return True",
        breaks="A worker that was told that its layout is an old one goes by it for a minute.",
        tests=(f"{_DAILY}::TestSwitchingOn::test_a_worker_that_has_not_heard_of_it",),
    ),
    Mutant(
        name="early-ids-not-looked-for",
        file="idemp/inbox/sql/daily.py",
        old="        if latest is not None:",
        new="        if latest is False:",
        breaks="An id that was claimed before its day got tables is new once more in them.",
        tests=(f"{_DAILY}::TestSwitchingOn::test_refused_where_ids_of_that_time_were_claimed",),
    ),
    Mutant(
        name="days-given-up-with-their-claims",
        file="idemp/inbox/sql/daily.py",
        old="            if connection.scalar(select(exists(part.inbox.select()))):",
        new="            if False:",
        breaks="Switching back drops the claims of ids that were early, and they are handled again.",
        tests=(f"{_DAILY}::TestSwitchingOff::test_refused_where_ids_of_that_time_were_claimed",),
    ),
    Mutant(
        name="late-ids-in-the-plain-tables",
        file="idemp/inbox/sql/days.py",
        old="        if layout.covers(key):",
        new="        if layout.covers(key) and key >= first_key(layout.dropped):",
        breaks="An id that comes after its day was dropped can be claimed nowhere.",
        tests=(f"{_DROPPING}::TestWhatIsNeeded::test_a_late_id_is_new_once",),
    ),
    Mutant(
        name="dropped-days-forgotten-by-a-longer-window",
        file="idemp/inbox/sql/places.py",
        old="                return start_of(layout.dropped)",
        new="                return start_of(layout.since)",
        breaks="Once `retention` is lengthened, an id whose day was dropped is young enough to be handled again.",
        tests=(f"{_DELIVERIES}::test_an_id_of_a_day_that_was_dropped_is_late_whatever_the_window_says",),
    ),
    Mutant(
        name="relay-trusts-what-it-remembers",
        file="idemp/inbox/sql/leased.py",
        old="            rows += self._short.run(lambda",
        new="            self._short.run(lambda",
        breaks="A relay that has not heard of daily tables leases outputs for ever and sends none of them.",
        tests=("tests/inbox/sql/test_daily_relays.py::TestRelays::test_one_that_has_not_heard_of_the_days",),
    ),
    Mutant(
        name="day-dropped-by-its-beginning",
        file="idemp/inbox/sql/daily.py",
        old="            if start_of(day + timedelta(days=1)) > before:",
        new="            if start_of(day) > before:",
        breaks="A day's late hours are dropped while a message from them is not late yet.",
        tests=(f"{_DROPPING}::test_the_oldest_day_decides_by_its_end",),
    ),
    Mutant(
        name="dropped-day-made-again",
        file="idemp/inbox/sql/daily.py",
        old="where(mine, daily.c.dropped <= day, daily.c.made > day)",
        new="where(mine)",
        breaks="A day that another process dropped is made again, and whoever remembers it claims there.",
        tests=(f"{_DROPPING}::TestWhoRemembersTheDay::test_nobody_makes_a_day_again_that_is_gone",),
    ),
    Mutant(
        name="pending-dropped-with-its-day",
        file="idemp/inbox/sql/dropping.py",
        old="for table in (self._tables.pending, self._tables.decision)",
        new="for table in (self._tables.decision,)",
        breaks="Outputs without a confirm are gone with their day.",
        tests=(f"{_DROPPING}::TestWhatIsNeeded::test_what_pends_is_kept_among_late_ids",),
    ),
    Mutant(
        name="young-claims-dropped-with-their-day",
        file="idemp/inbox/sql/dropping.py",
        old="return sorted({*connection.scalars(recent), *(",
        new="return sorted({*(",
        breaks="A late message that was handled by force is handled again by its next redelivery.",
        tests=(f"{_DROPPING}::TestWhatIsNeeded::test_a_claim_of_the_window_is_kept_among_late_ids",),
    ),
    Mutant(
        name="days-deleted-row-by-row",
        file="idemp/inbox/sql/claiming.py",
        old='    return cast("Statement", hinted)',
        new="    return statement",
        breaks="The cleaner deletes from daily tables what is to be dropped whole, and duplicates look in all of them.",
        tests=(f"{_DROPPING}::TestWhen::test_the_plain_tables_are_cleaned_as_before",),
    ),
    Mutant(
        name="daily-tables-without-rights",
        file="idemp/inbox/sql/ddl.py",
        old='                _run(connection, f"GRANT {right} ON {part} TO {grantee}")',
        new="                pass",
        breaks="A worker that does not own the tables can't claim from the first daily one on.",
        tests=(f"{_DAILY}::TestAnotherUser::test_it_claims_sends_and_cleans",),
    ),
    Mutant(
        name="rights-never-passed-on",
        file="idemp/inbox/sql/daily.py",
        old="        self._short.run(lambda connection: ddl.grant(connection, self._tables))\n",
        new="",
        breaks="A role that was granted its rights after the days were made stays shut out of them.",
        tests=(f"{_DAILY}::TestAnotherUser::test_one_that_came_after_the_days",),
    ),
    Mutant(
        name="lacking-right-counts-as-the-handlers",
        file="idemp/inbox/sql/translating.py",
        old="failures.translate(error) or failures.denied(error)",
        new="failures.translate(error)",
        breaks="Messages are parked because an operator forgot a GRANT.",
        tests=(f"{_DAILY}::TestAnotherUser::test_a_right_that_lacks_is_no_fault_of_the_message",),
    ),
    Mutant(
        name="strangers-taken-for-parts",
        file="idemp/inbox/sql/ddl.py",
        old="        _refuse_stranger(connection, parent, table)\n",
        new="",
        breaks="Claims go to a table of the same name in another schema, where no list and no other worker looks.",
        tests=(f"{_DAILY}::TestSchemas::test_a_table_of_that_name_elsewhere_is_not_taken_for_a_part",),
    ),
    Mutant(
        name="failed-days-stop-the-purge",
        file="idemp/inbox/sql/cleaning.py",
        old="        except (StoreError, ConfigurationError) as error:",
        new="        except ZeroDivisionError as error:",
        breaks="One table that can't be made ends all retention of its consumer.",
        tests=(f"{_DROPPING}::TestWhatGoesWrong::test_a_day_that_can_not_be_made",),
    ),
    Mutant(
        name="future-taken-for-an-outage",
        file="idemp/inbox/sql/places.py",
        old="        if none.moment > self._clock.now() + FUTURE:",
        new="        if none.moment.year > 9999:",
        breaks="One id from the future stops the whole consumer.",
        tests=(f"{_DELIVERIES}::test_an_id_from_the_future_is_parked_with_the_reason",),
    ),
    Mutant(
        name="purged-without-slack",
        file="idemp/retention.py",
        old="{name: window + HORIZON_SLACK for name, window in retention.items()}",
        new="dict(retention)",
        breaks="A worker that read the window's start a while ago takes a purged id for new.",
        tests=(f"{_DELIVERIES}::test_a_worker_that_read_the_window_a_while_ago",),
    ),
    Mutant(
        name="window-remembered-for-ever",
        file="idemp/inbox/sql/horizons.py",
        old="        if self._clock.monotonic() - at > HORIZON_SLACK.total_seconds():",
        new="        if False:",
        breaks="A worker whose heartbeat fails goes by a window's start that cleaners have long left behind.",
        tests=(f"{_HORIZONS}::test_not_for_longer_than_cleaners_expect",),
    ),
)
