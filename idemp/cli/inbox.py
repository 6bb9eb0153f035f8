"""`idemp inbox`: claims of handled messages, and the state of their outputs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from shlex import quote
from typing import Annotated, Any

import typer

from idemp.cli.exits import AsJson, Exit, exits, fail, open_database
from idemp.cli.screen import counted, escape, fields, moment, records
from idemp.sql.engine import worker_name
from idemp.sql.records.claims import ClaimAccount, ClaimRecord, InboxRecords, OutputRecord
from idemp.sql.records.failures import FailedMessage
from idemp.sql.scheduler import SqlScheduler

__all__ = ["inbox"]

inbox = typer.Typer(help="Claims and their outputs.", no_args_is_help=True, rich_markup_mode=None)

Pairs = list[tuple[str, object]]
Id = Annotated[str, typer.Argument(help="Original id (7, i:7, s:7), key, or id of an output.")]
Consumer = Annotated[str | None, typer.Option(help="Only claims of this consumer.")]
Type = Annotated[str | None, typer.Option(help="Only claims of messages of this type.")]


@inbox.command("list")
def list_(
    consumer: Consumer = None,
    type: Type = None,
    pending: Annotated[bool, typer.Option("--pending", help="Only claims with unconfirmed outputs.")] = False,
    quarantined: Annotated[bool, typer.Option("--quarantined", help="Only claims with outputs in quarantine.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=1_000_000)] = 100,
    as_json: AsJson = False,
) -> None:
    """List claims, newest first."""
    with exits():
        claims = _open(consumer, type).newest(
            consumer=consumer, type=type, pending=pending, quarantined=quarantined, limit=limit + 1
        )
    more, claims = len(claims) > limit, claims[:limit]
    if as_json:
        print(json.dumps({"claims": [claim.as_dict() for claim in claims], "more": more}, indent=2))
        return
    rows = []
    for claim in claims:
        row: dict[str, Any] = {"id": claim.id, "type": claim.type, "consumer": claim.consumer}
        rows.append({**row, "claimed": moment(claim.claimed_at), "outputs": claim.outputs, "pending": claim.pending})
    print(records(rows) or "no claims")
    if more:
        print(f"… and more: --limit {limit * 10}")


@inbox.command()
def show(id: Id, as_json: AsJson = False) -> None:
    """Show the claims of an id, and their outputs with bodies."""
    with exits():
        opened = _open()
        shown = [(claim, opened.outputs(claim)) for claim in _find(opened, id)]
    if as_json:
        claims = [{**claim.as_dict(), "outputs": [asdict(output) for output in outputs]} for claim, outputs in shown]
        print(json.dumps({"claims": claims}, indent=2))
        return
    blocks = []
    for claim, outputs in shown:
        pairs: Pairs = [*_claim_pairs(claim), ("original id", claim.original_id), ("fingerprint", claim.fingerprint)]
        for output in outputs:
            pairs += _output_pairs(output)
            pairs += [("properties", json.dumps(output.properties, ensure_ascii=False)), ("body", output.body)]
        blocks.append(fields(pairs))
    print("\n\n".join(blocks))


@inbox.command()
def explain(id: Id, as_json: AsJson = False) -> None:
    """Explain what happened to a message: its claims, outputs, retries, dead letters, cause and effects."""
    with exits():
        accounts, failures = _open().explain(id)
    if not accounts and not failures:
        unknown = "it may be in its queue, never sent, or older than the retention window"
        fail(Exit.FAILED, f"no claim, output, retry or dead letter has the id {escape(id)}: {unknown}")
    claims = [account.claim for account in accounts]
    stuck = [account.claim for account in accounts if any(output.state == "quarantined" for output in account.outputs)]
    dead = [failed.id for each in (failures, *(account.failures for account in accounts)) for failed in each if failed.dead]
    commands = [f"idemp inbox redispatch {_arguments(id, claim, claims)}" for claim in stuck]
    commands += [f"idemp dead replay {number}" for number in dead]
    if as_json:
        explained = {"id": id, "claims": [account.as_dict() for account in accounts], "next": commands}
        print(json.dumps({**explained, "failures": [failed.summary() for failed in failures]}, indent=2))
        return
    blocks = [_account_pairs(id, account) for account in accounts] or [[("id", id), ("claim", "none: no handling is committed")]]
    if failures and len(blocks) > 1:
        blocks.append([])
    for failed in failures:
        blocks[-1] += _failure_pairs(failed)
    print("\n\n".join(map(fields, blocks)))
    if commands:
        print("", *commands, sep="\n")


@inbox.command()
def redispatch(
    id: Annotated[str | None, typer.Argument(help="Original id (7, i:7, s:7), key, or id of an output.")] = None,
    confirmed: Annotated[bool, typer.Option("--confirmed", help="Also send confirmed outputs again.")] = False,
    quarantined: Annotated[bool, typer.Option("--quarantined", help="All outputs in quarantine (of the consumer).")] = False,
    consumer: Consumer = None,
    type: Type = None,
    as_json: AsJson = False,
) -> None:
    """Send pending and quarantined outputs now; ids and bodies stay the same. Delayed outputs keep their delay."""
    if (id is None) != quarantined or (quarantined and (confirmed or type is not None)):
        fail(Exit.USAGE, "name a message, or use --quarantined, with --consumer at most")
    with exits():
        opened, sent = _open(consumer, type), 0
        if id is None:
            due = opened.redispatch_quarantined(consumer)
        else:
            claim = _pick(opened, id, consumer, type)
            due = opened.redispatch(claim, confirmed=confirmed)
            sent = sum(output.state == "confirmed" for output in opened.outputs(claim))
    if as_json:
        print(json.dumps({"made_due": due, "confirmed": sent}))
        return
    print(f"{counted(due, 'output')} made due")
    if sent and not confirmed:
        print(f"{counted(sent, 'output')} confirmed: --confirmed sends again")


@inbox.command()
def erase(
    id: Id,
    force: Annotated[bool, typer.Option(help="Even if outputs are pending, which are never sent then.")] = False,
    consumer: Consumer = None,
    type: Type = None,
    as_json: AsJson = False,
) -> None:
    """Delete bodies and properties of a claim's outputs permanently. Redeliveries stay duplicates."""
    with exits():
        opened = _open(consumer, type)
        claim = _pick(opened, id, consumer, type)
        waiting = sum(output.waits for output in opened.outputs(claim))
        if waiting and not force:
            fail(Exit.FAILED, f"{counted(waiting, 'output')} not confirmed, and never sent once erased: to erase, use --force")
        erased = opened.erase(claim)
    print(json.dumps({"erased": erased}) if as_json else f"{counted(erased, 'output')} erased")


@inbox.command()
def purge(as_json: AsJson = False) -> None:
    """Delete expired claims now; workers and relays do so every ten minutes."""
    with exits():
        database = open_database()
        scheduler, deleted = SqlScheduler(database, worker_name()), 0
        while more := scheduler.purge():
            deleted += more
    print(json.dumps({"deleted": deleted}) if as_json else f"{counted(deleted, 'claim')} deleted")


def _open(consumer: str | None = None, type: str | None = None) -> InboxRecords:
    opened = InboxRecords(open_database())
    for kind, name in (("consumer", consumer), ("type", type)):
        if name is not None and name not in opened.names(kind):
            known = ", ".join(map(escape, opened.names(kind))) or "none is known"
            fail(Exit.FAILED, f"there is no {kind} {escape(name)}: {known}")
    return opened


def _find(opened: InboxRecords, id: str) -> list[ClaimRecord]:
    if not (claims := opened.find(id)):
        fail(Exit.FAILED, f"there is no claim of {escape(id)}: idemp inbox explain {escape(quote(id))}")
    return claims


def _pick(opened: InboxRecords, id: str, consumer: str | None, type: str | None) -> ClaimRecord:
    """Return the one claim that the arguments name; fail with a list of candidates if there are none or several."""
    claims = _find(opened, id)
    matching = [claim for claim in claims if consumer in (None, claim.consumer) and type in (None, claim.type)]
    if len(matching) != 1:
        choices = ", ".join(_arguments(id, claim, claims) for claim in matching or claims)
        known = f"names {counted(len(matching), 'claim')}; use one of" if matching else "names a claim only as"
        fail(Exit.FAILED, f"{escape(id)} {known}: {choices}")
    return matching[0]


def _arguments(id: str, claim: ClaimRecord, claims: Sequence[ClaimRecord]) -> str:
    """Return the arguments that select one of the claims of an id."""
    alike = [other for other in claims if other.original_id == claim.original_id]
    # An id that a terminal or the option parser would misread is shown with its type.
    texts = [id if len(claims) == 1 and id.isprintable() and not id.startswith("-") else claim.typed]
    if len({other.consumer for other in alike}) > 1:
        texts += ["--consumer", claim.consumer]
    if len({other.type for other in alike}) > 1:
        texts += ["--type", claim.type]
    return escape(" ".join(map(quote, texts)))


def _claim_pairs(claim: ClaimRecord) -> Pairs:
    return [
        ("id", claim.id),
        ("type", claim.type),
        ("consumer", claim.consumer),
        ("key", claim.message_key),
        ("handled", moment(claim.claimed_at)),
        ("worker", claim.worker),
    ]


def _output_pairs(output: OutputRecord) -> Pairs:
    state = output.state
    if output.due_at is not None:
        state += f" until {moment(output.due_at)}" if state == "delayed" else f", due {moment(output.due_at)}"
    pairs: Pairs = [
        (f"output {output.ordinal}", output.output_id),
        ("", state),
        ("", ", ".join(filter(None, [output.type, output.place]))),
    ]
    if output.attempts:
        pairs.append(("", f"{counted(output.attempts, 'attempt')}, {counted(output.refusals, 'refusal')}: {output.reason}"))
    return pairs


def _account_pairs(id: str, account: ClaimAccount) -> Pairs:
    pairs = _claim_pairs(account.claim)
    if asked := [output.ordinal for output in account.outputs if output.output_id == id]:
        pairs = [("asked for", f"output {asked[0]} of this claim"), *pairs]
    linked = [("caused by", each) for each in [account.cause] if each] + [("caused", each) for each in account.effects]
    pairs += [pair for output in account.outputs for pair in _output_pairs(output)]
    for name, claim in linked:
        pairs += [(name, f"{claim.type}, handled by {claim.consumer}"), ("", claim.id)]
    for failed in account.failures:
        pairs += [("caused", failed.message_id), *_failure_pairs(failed)]
    return pairs


def _failure_pairs(failed: FailedMessage) -> Pairs:
    where = f"{failed.type or '?'} in {failed.queue}, {counted(failed.failures, 'failure')}"
    error: Pairs = [("", f"{failed.rule}: {failed.error}")] if failed.history else []
    error += [("", line) for line in failed.trace.splitlines()]
    if failed.due_at is None:
        return [("dead letter", where), *error, ("", f"idemp dead show {failed.id}")]
    state = f"held by {failed.holder}" if failed.holder else f"due {moment(failed.due_at)}"
    return [("retry", where), ("", state), *error, ("", f"idemp dead show {failed.id}")]
