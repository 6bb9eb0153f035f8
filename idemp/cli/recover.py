"""`idemp recover`: ends what handlings in several databases left prepared."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Final
from uuid import UUID

import typer

from idemp.cli.command import Broker, Database, Prefix, Schema, Screen, verb
from idemp.cli.exits import ExitCode, NotFound
from idemp.cli.screen import Rows
from idemp.cli.wiring import configured_app
from idemp.diagnosis import shell
from idemp.errors import ConfigurationError
from idemp.startup import check_databases
from idemp.twophase import Recovery, Round, State

if TYPE_CHECKING:
    from collections.abc import Sequence

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


def _decision_key(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is no key of a decision, which is a UUID and not the message's id: "
            '`idemp recover MODULE:APP` shows it in its column "key".'
        ) from None


def recover(
    screen: Screen,
    app: Annotated[str, typer.Argument(metavar="MODULE:APP", help="Whose inbox and databases.")],
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what is in doubt now.")] = False,
    forget: Annotated[
        list[UUID] | None,
        typer.Option(
            metavar="KEY",
            parser=_decision_key,
            help="Give up the decision that is listed under this key, if nobody can carry it out any more. Repeatable.",
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Don't ask before --forget.")] = False,
    database: Database = None,
    broker: Broker = None,
    schema: Schema = None,
    prefix: Prefix = None,
) -> None:
    """End what handlings in several databases left in doubt: commit what the inbox decided, roll back all else.

    Never touches a transaction that is not this inbox's. Workers do the same by themselves, and several may at once.
    """
    from idemp.twophase.sql import coordinator_of

    if dry_run and forget:
        raise typer.BadParameter("--dry-run changes nothing, and --forget does: take one of them.")
    found = configured_app(app, database=database, broker=broker, schema=schema, prefix=prefix)
    found.store.verify()
    # Without other databases there may be decisions still about some that it had.
    coordinator = found.coordinator or coordinator_of(found.store, {})
    if forget:  # what policies name is not gone, only not configured here
        found.registry.build(found.settings.messages)
        check_databases(coordinator, found.registry.registrations())
    recovery = Recovery(coordinator)
    done = recovery.look() if dry_run else recovery.run_once()
    if forget:
        done = _given_up(recovery, done, found.consumers(), forget, ask=not yes)
    elif not coordinator.names and not done.found:
        raise ConfigurationError(
            f"{app} has no other databases.", fix='Register them: App(…, databases={"ledger": …}), or in idemp.toml.'
        )
    rows = [_row(each) for each in done.found]
    data = {"found": rows, "left": len(done.left), "away": done.away}
    away = [f"The database {name!r} could not be asked: {reason}" for name, reason in done.away.items()]
    lost = [each for each in done.left if each.is_lost]
    mending = [f"Nobody can complete it: {_mending(app, each)}" for each in lost]
    screen.result(data, Rows(rows, _COLUMNS) if rows else "Nothing is in doubt.", *mending, *away)
    if done.left:
        raise typer.Exit(ExitCode.FAILED)
    if done.away:
        raise typer.Exit(ExitCode.UNREACHABLE)


def _given_up(recovery: Recovery, done: Round, consumers: Sequence[str], keys: list[UUID], *, ask: bool) -> Round:
    """The round, with what became of decisions that were to be forgotten: the app's, and those under its former names."""
    own = {(each.consumer, each.key): each for each in done.found if not each.branch and each.consumer in consumers}
    meant = {this: each for this, each in own.items() if each.key in keys}
    for key in keys:
        about = [each for each in meant.values() if each.key == key]
        if not about or not all(each.is_lost or each.state is State.COMMITTED for each in about):
            raise NotFound(
                f"{consumers[0]} has no decision about {key} that nobody can carry out any more; nothing was forgotten.",
                fix="`idemp recover MODULE:APP` shows all that is left, and why; --forget takes what its column key shows.",
            )
        lost = next((each for each in about if each.is_lost), None)
        if lost is not None and ask:
            said = f"{lost.reason} Its message is taken for handled, and what is missing stays missing. Forget {key}?"
            typer.confirm(said, abort=True, err=True)
    for this, each in meant.items():
        if each.is_lost:  # and if somebody else was faster, nothing is told of it any more
            own[this] = replace(each, state=State.GONE, reason="")
    for consumer in {consumer for consumer, _ in meant}:
        own.update(((consumer, each.key), each) for each in recovery.forget(consumer, keys))
    rest = [each for each in done.found if each.branch or each.consumer not in consumers]
    return Round([*own.values(), *rest], done.away)


def _mending(app: str, each: Recovered) -> str:
    where = ", ".join(each.databases)
    forget = shell("idemp", "recover", app, "--forget", str(each.key)).text
    return f"mend its rows in {where} by hand, then `{forget}`; or register that database again, if it was taken out."


def _row(each: Recovered) -> dict[str, Any]:
    return {
        "state": each.state.value,
        "databases": ", ".join(each.databases),
        "consumer": each.consumer,
        "key": each.key,
        "since": each.since,
        "branch": each.branch or "(decision)",
        "reason": each.reason,
        "is_lost": each.is_lost,
    }
