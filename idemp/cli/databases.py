"""What `idemp doctor` and `idemp inbox explain` tell of other databases: can they prepare, what is unfinished."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Final, cast

from idemp.cli.screen import shown
from idemp.diagnosis import Command
from idemp.plurals import counted
from idemp.startup import check_databases
from idemp.twophase import Recovery

if TYPE_CHECKING:
    from idemp.app import App
    from idemp.cli.doctor import Report
    from idemp.cli.mending import Mending
    from idemp.inbox.sql import SqlStore
    from idemp.inbox.sql.queries import Story
    from idemp.twophase import Coordinator, Recovered

_OLD: Final = timedelta(minutes=1)
"""What is in doubt for longer is in nobody's hands."""


def unfinished_in(store: SqlStore, story: Story) -> list[str]:
    """The other databases in which a handling is not known to be committed yet."""
    from idemp.twophase.sql import SqlDecisions

    number = store.names.known("consumer", story.claim.consumer)
    decision = SqlDecisions(store).noted(number, story.claim.key) if number is not None else None
    return [branch.database for branch in decision.branches] if decision is not None else []


def look_at_databases(report: Report, app: App, mending: Mending) -> None:
    """Each of them, and what is in doubt in all of them."""
    inbox_answers = report.inbox_answers
    with report.check("databases"):
        coordinator = app.coordinator
        check_databases(coordinator, app.registry.registrations())
        if coordinator is None:
            return
        for name, database in coordinator.databases.items():
            with report.check(f"database {name}"):
                database.verify()
                if not inbox_answers:
                    continue
                _look_at_room(report, app, coordinator, name)
                _look_at_durability(report, app, coordinator, name)
        if not inbox_answers:
            return
        with report.check("in doubt"):
            _look_at_doubts(report, app, Recovery(coordinator).look().found, mending)


def _look_at_room(report: Report, app: App, coordinator: Coordinator, name: str) -> None:
    """Each thread may have one transaction prepared; those of workers that died stay until they are recovered."""
    database = coordinator.databases[name]
    room = getattr(database, "room", lambda _: None)(coordinator.decisions.inbox())
    alive = sum(row.alive for row in app.store.upkeep.workers()) if hasattr(app.store.upkeep, "workers") else 0
    wanted = app.settings.threads * max(1, alive)
    where = f"{database.place} prepares transactions"
    if room is None:
        report.add("ok", f"database {name}", where)
    elif room.most - room.others >= wanted:
        report.add(
            "ok", f"database {name}", f"{where}, {room.most} at most; {counted(wanted, 'thread')} may need one each"
        )
    elif room.most >= wanted:
        see = Command("sql", "SELECT gid, prepared, owner, database FROM pg_prepared_xacts ORDER BY prepared")
        report.add(
            "failed",
            f"database {name}",
            f"max_prepared_transactions is {room.most}, {room.others} of them are taken by others than this inbox, and "
            f"{counted(wanted, 'thread')} may need one each.",
            "See whose they are, and have their owners end them; of those that begin with `idemp1.`, another inbox "
            "is the owner: run `idemp recover` with its app.",
            see,
        )
    else:
        report.add(
            "failed",
            f"database {name}",
            f"max_prepared_transactions is {room.most}, and {counted(wanted, 'thread')} may need one each.",
            f"Set max_prepared_transactions in its postgresql.conf to {2 * wanted} or more, and restart the server.",
        )


def _look_at_durability(report: Report, app: App, coordinator: Coordinator, name: str) -> None:
    """What a crash makes a server forget of what it prepared can't be told from what it committed, on MariaDB."""
    database, store = coordinator.databases[name], cast("SqlStore", app.store)
    found = database.durability(store.tables) if hasattr(database, "durability") else []
    for each in found:
        # PostgreSQL prepares, and ends what it prepared, on the disk, whatever synchronous_commit says.
        if each.verdict == "failed" and each.name != "synchronous_commit":
            report.add("failed", f"database {name}: {each.name}", each.detail, each.fix)


def _look_at_doubts(report: Report, app: App, found: list[Recovered], mending: Mending) -> None:
    now = app.clock.now()
    old = [each for each in found if each.since is None or now - each.since > _OLD]
    if not old:
        report.add("ok", "in doubt", f"nothing for longer than {shown(_OLD)}")
        return
    oldest = min((each.since for each in old if each.since is not None), default=None)
    since = f", the oldest since {shown(oldest)}" if oldest is not None else ""
    report.add(
        "warning",
        "in doubt",
        f"{counted(len(old), 'transaction or decision', 'transactions or decisions')} of this inbox{since}",
        "End them; what is left after that is told, and why.",
        mending.recover(),
    )
