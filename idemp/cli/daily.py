"""What `idemp doctor` says of daily tables: whether there are enough for days to come, and none too many of days gone by."""

from __future__ import annotations

from datetime import UTC, timedelta
from typing import TYPE_CHECKING, Final

from idemp.cli.screen import shown
from idemp.diagnosis import Diagnosis, shell
from idemp.plurals import counted

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import date

    from idemp.app import App
    from idemp.cli.mending import Mending
    from idemp.diagnosis import Verdict
    from idemp.inbox.sql import SqlStore
    from idemp.inbox.sql.days import Layout

_ENOUGH: Final = timedelta(days=3)
_LEFT_OVER: Final = timedelta(days=2)


def look_at_days(store: SqlStore, app: App | None, mending: Mending) -> Iterator[Diagnosis]:
    """A line for each consumer that keeps daily tables, and one where days of the app's could have been dropped."""
    if not hasattr(store, "engine"):
        return
    today = store.clock.now().astimezone(UTC).date()
    for consumer, layouts in store.upkeep.daily.all().items():
        yield from (
            _days_to_come(consumer, layout, today, mending) for layout in layouts if layout.dropped < layout.until
        )
    if app is None or not app.retentions():
        return
    windows = app.retentions()
    lag = store.upkeep.purge_lag(app.name, windows, others=max(windows.values()))
    if store.upkeep.daily.layouts(app.name) and lag > _LEFT_OVER:
        purge = shell("idemp", "inbox", "purge", mending.where or "MODULE:APP", *mending.of_database())
        detail = f"{app.name} could have dropped the first of them {shown(lag)} ago"
        yield Diagnosis("warning", "daily tables", detail, "Purge as the tables' owner, each day.", (purge,))


def _days_to_come(consumer: str, layout: Layout, today: date, mending: Mending) -> Diagnosis:
    kept = f"{consumer} has {counted(len(layout.days), 'day')}, from {layout.dropped}"
    if layout.made >= min(today + _ENOUGH, layout.until):
        return Diagnosis("ok", "daily tables", f"{kept} to before {layout.made}")
    make = shell("idemp", "db", "partition", consumer, *mending.of_database())
    detail = f"{kept}, and none from {layout.made} on: without them the consumer stands still"
    verdict: Verdict = "failed" if layout.made <= today else "warning"
    return Diagnosis(verdict, "daily tables", detail, "Make them as the tables' owner, each day.", (make,))
