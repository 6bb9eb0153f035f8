"""`idemp doctor`: proves the preconditions of the promises against the live database and broker."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal
from uuid import uuid4

import typer
from rich.text import Text

from idemp.broker.copies import dead_queue
from idemp.broker.port import Topology
from idemp.cli.command import Broker, Database, Prefix, Schema, Screen, verb
from idemp.cli.exits import ExitCode
from idemp.cli.screen import shown
from idemp.cli.wiring import configured_app, open_broker, open_store, settings_of
from idemp.errors import ConfigurationError, IdempError
from idemp.messages import Message, Output, OutputKind
from idemp.startup import check_guarantees, check_horizon

if TYPE_CHECKING:
    from collections.abc import Iterator

    from idemp.app import App
    from idemp.broker.port import Broker as BrokerPort
    from idemp.inbox.sql import SqlStore

Verdict = Literal["ok", "warning", "failed"]

_STYLES: Final = {"ok": "green", "warning": "yellow", "failed": "bold red"}
_MARKS: Final = {"ok": "ok     ", "warning": "warning", "failed": "FAILED "}
_SECONDS: Final = 10.0


def add_to(group: typer.Typer) -> None:
    """Register the verb."""
    verb(group, "doctor", log_level="error")(doctor)


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report."""

    verdict: Verdict
    name: str
    detail: str
    fix: str = ""


@dataclass(slots=True)
class Report:
    """What was looked at.

    Example:
        >>> report = Report()
        >>> with report.check("database"):
        ...     raise ConfigurationError("It is full.", fix="Buy a disk.")
        >>> report.checks[0].verdict, report.checks[0].fix
        ('failed', 'Buy a disk.')
    """

    checks: list[Check] = field(default_factory=list)

    def add(self, verdict: Verdict, name: str, detail: str, fix: str = "") -> None:
        """Add a line."""
        self.checks.append(Check(verdict, name, detail, fix))

    @contextmanager
    def check(self, name: str) -> Iterator[None]:
        """An error of the block is a failed check."""
        try:
            yield
        except IdempError as error:
            self.add("failed", name, error.message, error.fix)

    @property
    def healthy(self) -> bool:
        """Whether no check failed."""
        return all(check.verdict != "failed" for check in self.checks)


def doctor(
    screen: Screen,
    app: Annotated[str | None, typer.Argument(metavar="[MODULE:APP]", help="Look at its setting, too.")] = None,
    *,
    database: Database = None,
    broker: Broker = None,
    schema: Schema = None,
    prefix: Prefix = None,
) -> None:
    """Look whether database, broker and policies can keep the promises. What is red comes with what mends it."""
    options = {"database": database, "broker": broker, "schema": schema, "prefix": prefix}
    report = Report()
    found = configured_app(app, **options) if app is not None else None
    settings = found.settings if found is not None else settings_of(**options)
    with report.check("database"):
        store: Any = found.store if found is not None else open_store(settings)
        look_at_database(report, store)
    with report.check("broker"):
        where = found.broker if found is not None else open_broker(settings)
        look_at_broker(report, where)
        with report.check("guarantees"):
            check_guarantees(where.guarantees, allow_at_most_once=settings.allow_at_most_once)
            if where.guarantees.at_least_once:
                report.add("ok", "guarantees", f"{where.guarantees.name}: at least once")
            else:
                report.add("warning", "guarantees", f"{where.guarantees.name}: at most once, allowed by the settings")
        if found is not None:
            look_at_app(report, found, where)
    lines = [line for check in report.checks for line in _lines(check)]
    data = {"healthy": report.healthy, "checks": report.checks}
    last = "All preconditions hold." if report.healthy else "Not all preconditions hold; mend what is red."
    screen.result(data, *lines, last)
    if not report.healthy:
        raise typer.Exit(ExitCode.FAILED)


def look_at_database(report: Report, store: SqlStore) -> None:
    """Server, tables, keys, a probe, settings that weaken promises, and what waits."""
    from idemp.inbox.sql.engine import shown as shown_url
    from idemp.inbox.sql.queries import Queries
    from idemp.inbox.sql.schema import check

    if not hasattr(store, "engine"):
        report.add("warning", "database", "This store is no SQL database; it was not looked at.")
        return
    seen = check(store.engine, store.tables)
    report.add("ok", "database", f"{shown_url(store.engine)}: {seen.dialect} {seen.server_version}, {seen.isolation}")
    report.add(
        "ok", "tables", f"{store.tables.prefix}* of version {seen.revision}; a probe claimed once and conflicted"
    )
    for finding in seen.findings:
        verdict: Verdict = "warning" if finding.level == "warning" else "ok"
        detail = f"{finding.value}. {finding.meaning}" if finding.meaning else finding.value
        report.add(verdict, finding.name, detail, finding.fix)
    waiting = store.upkeep.pending_count()
    alive = store.upkeep.relay_alive()
    given_up = len(Queries(store.engine, store.tables).list_pending(quarantined_only=True, limit=1000))
    if alive or not waiting:
        report.add("ok", "relay", "one is alive" if alive else "none is alive, and nothing waits for one")
    else:
        report.add("warning", "relay", f"{waiting} outputs wait and no relay is alive", "Run `idemp relay`.")
    if given_up:
        fix = "See `idemp inbox list --quarantined`; `idemp inbox redispatch ID` sends them again."
        report.add("warning", "quarantine", f"{given_up} outputs were given up", fix)


def look_at_broker(report: Report, broker: BrokerPort) -> None:
    """A connection, and the proof that the broker says so when a message can't be routed."""
    broker.declare(Topology(exchange="", queues=()))
    report.add("ok", "broker", repr(broker))
    publisher = broker.publisher()
    try:
        (refusal,) = publisher.publish([_unroutable()], _SECONDS)
    finally:
        publisher.close()
    if refusal is not None and refusal.kind == "returned":
        report.add("ok", "confirms", "a message to a queue that does not exist came back")
    else:
        said = "was confirmed" if refusal is None else f"was {refusal.kind}: {refusal.detail}"
        report.add("failed", "confirms", f"A message to a queue that does not exist {said}.", "Use another transport.")


def look_at_app(report: Report, app: App, broker: BrokerPort) -> None:
    """Policies, windows, and the app's queues."""
    with report.check("policies"):
        app.registry.build(app.settings.messages)
        report.add("ok", "policies", f"{len(app.registry.registrations())} message types of {app.name}")
    with report.check("retention"):
        check_horizon(broker.guarantees, app.settings.redelivery_horizon, app.retentions())
        horizon = app.settings.redelivery_horizon or timedelta(seconds=broker.guarantees.horizon_seconds)
        shortest = min(app.retentions().values(), default=None)
        detail = "no type is opted in" if shortest is None else f"the shortest window is {shown(shortest)}"
        report.add("ok", "retention", f"{detail}; the broker redelivers for up to {shown(horizon)}")
    try:
        ready, dead = broker.depth(app.queue), broker.depth(dead_queue(app.queue))
    except ConfigurationError as error:
        report.add("warning", "queue", error.message, "The worker declares it at its start.")
        return
    report.add("ok", "queue", f"{app.queue} has {ready} messages ready")
    if dead:
        report.add("warning", "dead letters", f"{dead} in {dead_queue(app.queue)}", "See `idemp dead list`.")


def _unroutable() -> Output:
    name = f"idemp.doctor.{uuid4().hex}"
    message = Message(body=b"{}", type="idemp.doctor", message_id=name)
    return Output(id=uuid4(), ordinal=0, kind=OutputKind.SEND, exchange="", routing_key=name, message=message)


def _lines(check: Check) -> list[Text]:
    lines = [Text.assemble((_MARKS[check.verdict], _STYLES[check.verdict]), f"  {check.name}: {check.detail}")]
    if check.fix:
        lines.append(Text(f"         {check.fix}"))
    return lines
