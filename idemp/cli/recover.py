"""`idemp recover`: ends what handlings in several databases left prepared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from idemp.cli.command import Broker, Database, Prefix, Schema, Screen, verb
from idemp.cli.exits import ExitCode
from idemp.cli.screen import table
from idemp.cli.wiring import configured_app
from idemp.errors import ConfigurationError
from idemp.twophase import Recovery

if TYPE_CHECKING:
    from idemp.twophase import Recovered

_COLUMNS: Final = {
    "state": "state",
    "databases": "databases",
    "consumer": "consumer",
    "key": "key",
    "since": "since",
    "branch": "transaction",
    "reason": "reason",
}


def add_to(group: typer.Typer) -> None:
    """Register the verb."""
    verb(group, "recover")(recover)


def recover(
    screen: Screen,
    app: Annotated[str, typer.Argument(metavar="MODULE:APP", help="Whose inbox and databases.")],
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what is in doubt now.")] = False,
    database: Database = None,
    broker: Broker = None,
    schema: Schema = None,
    prefix: Prefix = None,
) -> None:
    """End what handlings in several databases left in doubt: commit what the inbox decided, roll back all else.

    Never touches a transaction that is not this inbox's. Workers do the same by themselves, and several may at once.
    """
    found = configured_app(app, database=database, broker=broker, schema=schema, prefix=prefix)
    coordinator = found.coordinator
    if coordinator is None:
        raise ConfigurationError(
            f"{app} has no other databases.", fix='Register them: App(…, databases={"ledger": …}), or in idemp.toml.'
        )
    found.store.verify()
    recovery = Recovery(coordinator)
    done = recovery.look() if dry_run else recovery.run_once()
    rows = [_row(each) for each in done.found]
    data = {"found": rows, "left": len(done.left), "away": done.away}
    away = [f"The database {name!r} could not be asked: {reason}" for name, reason in done.away.items()]
    screen.result(data, table(rows, _COLUMNS) if rows else "Nothing is in doubt.", *away)
    if done.left:
        raise typer.Exit(ExitCode.FAILED)
    if done.away:
        raise typer.Exit(ExitCode.UNREACHABLE)


def _row(each: Recovered) -> dict[str, Any]:
    return {
        "state": each.state.value,
        "databases": ", ".join(each.databases),
        "consumer": each.consumer,
        "key": each.key,
        "since": each.since,
        "branch": each.branch or "(decision)",
        "reason": each.reason,
    }
