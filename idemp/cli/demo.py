"""`idemp demo`: see the promises kept, and counted from outside."""

from __future__ import annotations

import secrets
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import idemp
from idemp.cli.command import Broker, Database, Screen, verb
from idemp.cli.exits import ExitCode
from idemp.cli.screen import Rows
from idemp.plurals import counted

if TYPE_CHECKING:
    from idemp.demo.proof import Proof


def add_to(group: typer.Typer) -> None:
    """Register the verb."""
    verb(group, "demo")(demo)


def demo(
    screen: Screen,
    *,
    messages: Annotated[int, typer.Option("--messages", min=10, help="Messages, a fifth of them duplicates.")] = 2_000,
    kills: Annotated[int, typer.Option("--kills", min=0, help="Worker processes to kill.")] = 20,
    workers: Annotated[int, typer.Option("--workers", min=1, max=32, help="Worker processes at a time.")] = 3,
    seed: Annotated[int | None, typer.Option("--seed", help="Of all that is random.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave tables, queues and files for a look.")] = False,
    database: Database = None,
    broker: Broker = None,
) -> None:
    """Run the orders example, kill its workers at random moments, and count what came of it.

    Without options everything lives in a temporary directory. On your own servers it uses fresh tables and queues under
    a prefix, and removes them.
    """
    from idemp.demo import Plan, run

    plan = Plan(
        messages=messages, kills=kills, workers=workers, seed=secrets.randbelow(10**6) if seed is None else seed
    )
    with screen.progress() as bar:
        task = bar.add_task("orders", total=None)

        def progress(effects: int, wanted: int, killed: int) -> None:
            bar.update(task, completed=effects, total=wanted, description=f"orders, {killed} kills")

        proof = run(plan, database=database, broker=broker, keep=keep, progress=progress)
    data = {**asdict(proof), "seed": plan.seed, "broken": proof.broken, "kept": not proof.broken}
    headings = {"what": "", "count": "", "where": "read from"}
    sentence = _sentence(proof)
    kept = f"Files are kept in {proof.folder}." if proof.folder else ""
    screen.result(data, Rows(_lines(proof), headings), kept, sentence)
    if proof.broken:
        raise typer.Exit(ExitCode.FAILED)


def _lines(proof: Proof) -> list[dict[str, object]]:
    effects = ", ".join(f"{count} {name}" for name, count in proof.effects.items())
    lines = [
        ("messages fed", proof.fed, f"{proof.duplicates} of them duplicates"),
        ("deliveries", proof.deliveries, "handler runs begun and duplicates skipped"),
        ("redeliveries", proof.redeliveries, "deliveries beyond the first of each message"),
        ("handler runs begun", proof.begun, "notes written outside of the transaction"),
        ("handler runs rolled back", proof.rolled_back, "begun, and left nothing behind"),
        ("executions", proof.executions, "rows written by the handlers themselves"),
        ("duplicates skipped", proof.skipped, "the inbox's history"),
        ("outputs stored", proof.outputs_stored, "the inbox"),
        ("outputs redispatched", proof.outputs_redispatched, "the audit queue"),
        ("effects", effects, "the shop's tables"),
        ("kills", proof.kills, "SIGKILL, at random moments"),
        ("kills while unsettled", proof.kills_unsettled, "a delivery was in the process's hands"),
        ("lost", proof.lost, "effects that should be there"),
        ("doubled", proof.doubled, "effects beyond the first, pieces of stock included"),
        ("outputs under two ids", proof.two_ids, "the audit queue"),
        ("outputs altered", proof.altered, "the audit queue: same id, other bytes"),
        ("outputs never seen", proof.never_seen, "the audit queue"),
        ("outputs pending", proof.pending, "the inbox"),
        ("messages unsettled", proof.unsettled, "the queues"),
        ("dead letters", proof.dead, "the dead-letter queues"),
    ]
    return [{"what": what, "count": count, "where": where} for what, count, where in lines]


def _sentence(proof: Proof) -> str:
    if proof.broken:
        broken = ", ".join(f"{name}: {count}" for name, count in proof.broken.items())
        return f"A promise broke ({broken}); please report it; `idemp demo --keep` leaves everything for a look."
    return (
        f"In {proof.seconds:.0f} s workers were killed {counted(proof.kills, 'time')} "
        f"({proof.kills_unsettled} with work in hand) and every order was still handled exactly once; "
        f"read {_example() / 'handlers.py'} next, then `idemp --help`."
    )


def _example() -> Path:
    """Where the code is that just ran: in the wheel, or in a checkout."""
    package = Path(idemp.__file__).parent
    shipped = package / "_examples" / "orders"
    return shipped if shipped.is_dir() else package.parent / "examples" / "orders"
