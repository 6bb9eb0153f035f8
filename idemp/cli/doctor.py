"""`idemp doctor`: proves the preconditions of the promises against the live database and broker."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final
from uuid import uuid4

import typer
from rich.text import Text

from idemp.broker.copies import dead_queue
from idemp.broker.guarantees import guarantees_of
from idemp.broker.making import missing_file
from idemp.broker.port import Topology
from idemp.cli.command import Broker, Database, Prefix, Schema, Screen, verb
from idemp.cli.daily import look_at_days
from idemp.cli.databases import look_at_databases
from idemp.cli.entities import look_at_entities
from idemp.cli.exits import ExitCode
from idemp.cli.mending import Mending
from idemp.cli.screen import Paragraph, shortened, shown
from idemp.cli.wiring import NO_FILE, configured_app, open_broker, open_store, settings_of
from idemp.clock import SystemClock
from idemp.diagnosis import BrokerCommands, Command, Diagnosis, Verdict, free_space, shell
from idemp.errors import BrokerChanged, BrokerUnavailable, ConfigurationError, IdempError
from idemp.inbox.port import DEFAULT_BROKER
from idemp.messages import Message, Output, OutputKind
from idemp.plurals import counted
from idemp.prepared.port import State
from idemp.startup import (
    check_effects,
    check_entities,
    check_guarantees,
    check_guard,
    check_handlers,
    check_order,
    compare_identities,
    unhandled_types,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from idemp.app import App
    from idemp.broker.port import Broker as BrokerPort
    from idemp.clock import Clock
    from idemp.inbox.sql import SqlStore
    from idemp.settings import Settings

_STYLES: Final = {"ok": "green", "warning": "yellow", "failed": "bold red"}
_MARKS: Final = {"ok": "ok     ", "warning": "warning", "failed": "FAILED "}
_SECONDS: Final = 10.0
_INDENT: Final = " " * 9
_RECENTLY: Final = timedelta(hours=1)
_AT_ONCE: Final = timedelta(seconds=10)  # what was just emitted is not worth a word yet
_LONG_DUE: Final = timedelta(minutes=1)  # a worker that runs effects looks each second
_TOP: Final = 3
_NEEDED: Final = frozenset({"database", "tables", "columns", "rights"})
_MANY: Final = 1000


def add_to(group: typer.Typer) -> None:
    """Register the verb."""
    verb(group, "doctor", log_level="error")(doctor)


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

    checks: list[Diagnosis] = field(default_factory=list)

    def add(self, verdict: Verdict, name: str, detail: str, fix: str = "", *commands: Command) -> None:
        """Add a line."""
        self.checks.append(Diagnosis(verdict, name, detail, fix, commands))

    @contextmanager
    def check(self, name: str) -> Iterator[None]:
        """An error of the block is a failed check."""
        try:
            yield
        except IdempError as error:
            self.add("failed", name, error.message, error.fix)

    @property
    def inbox_answers(self) -> bool:
        """Whether the inbox can be asked; if not, its own checks have told why."""
        return not any(check.verdict == "failed" and check.name in _NEEDED for check in self.checks)

    @property
    def healthy(self) -> bool:
        """Whether no check failed."""
        return all(check.verdict != "failed" for check in self.checks)


def doctor(
    screen: Screen,
    app: Annotated[
        str | None,
        typer.Argument(metavar="[MODULE:APP]", help="Check this app too."),
    ] = None,
    *,
    database: Database = None,
    broker: Broker = None,
    schema: Schema = None,
    prefix: Prefix = None,
) -> None:
    """Check that database, broker and policies can keep the promises. Each failed check names its fix."""
    options = {"database": database, "broker": broker, "schema": schema, "prefix": prefix}
    report = Report()
    found = configured_app(app, **options) if app is not None else None
    settings = found.settings if found is not None else settings_of(**options)
    mending = Mending(app, found, options)
    store: Any = None
    with report.check("database"):
        store = found.store if found is not None else open_store(settings)
        store = getattr(store, "beside", store)  # streams in a database have their inbox there, too
        if hasattr(store, "engine"):
            from idemp.inbox.sql.engine import give_up_on_locks

            give_up_on_locks(store.engine)
        look_at_database(report, store, found.clock if found is not None else SystemClock(), mending)
        if report.healthy:
            report.checks += look_at_days(store, found, mending)
            kept = found.store if found is not None else store
            look_at_entities(report, kept, found.clock if found is not None else SystemClock(), named=found is not None)
    with report.check("broker"):
        if (path := missing_file((found or settings).broker_url or "")) is not None:
            report.add("warning", "broker", f"the embedded broker's file {path} does not exist yet", NO_FILE)
        else:
            where = found.broker if found is not None else open_broker(settings)
            look_at_broker(report, where, found, mending, store if report.inbox_answers else None)
            look_at_guarantees(report, where, settings)
    if found is not None:
        look_at_app(report, found, mending)
    lines = [line for check in report.checks for line in _lines(check)]
    data = {"healthy": report.healthy, "checks": report.checks}
    last = "All preconditions hold." if report.healthy else "Not all preconditions hold; fix what failed."
    screen.result(data, *lines, last)
    if not report.healthy:
        raise typer.Exit(ExitCode.FAILED)


def look_at_guarantees(report: Report, broker: BrokerPort, settings: Settings) -> None:
    """Whether the transport keeps what it took, or its loss is allowed."""
    with report.check("guarantees"):
        check_guarantees(broker.guarantees, allow_at_most_once=settings.allow_at_most_once)
        if broker.guarantees.at_least_once:
            report.add("ok", "guarantees", f"{broker.guarantees.name}: at least once")
        else:
            report.add("warning", "guarantees", f"{broker.guarantees.name}: at most once, allowed by the settings")


def look_at_database(report: Report, store: SqlStore, clock: Clock, mending: Mending) -> None:
    """Server, tables, keys, rights, settings that weaken promises, a probe, and what waits."""
    if not hasattr(store, "engine"):
        store.verify()
        report.add(
            "ok", "database", f"none: {type(store).__name__} has looked at itself, and nothing more is known of it"
        )
        return
    from idemp.inbox.sql.diagnosing import Diagnoses
    from idemp.inbox.sql.engine import sqlite_file

    if (file := sqlite_file(store.engine)) is not None:  # before all else: on a full disk it can't even be opened
        report.checks.append(free_space(file))
    report.checks += Diagnoses(store.engine, store.tables, clock, mending.upgrade()).run()
    if report.inbox_answers:  # whatever else is wrong with it, perhaps for long
        with report.check("what waits"):
            _look_at_what_waits(report, store, clock, mending)
            _look_at_workers(report, store, clock)


def _look_at_what_waits(report: Report, store: SqlStore, clock: Clock, mending: Mending) -> None:
    from idemp.cli.stored import overdue_effects, refused, unserved
    from idemp.inbox.sql.queries import Queries

    waiting, effects = store.upkeep.waiting()
    unserved_by_name = unserved(store)
    given_up = len(Queries(store.engine, store.tables).list_pending(quarantined_only=True, limit=1000))
    for name, count in unserved_by_name.items():
        run = mending.relay(name)
        which = "" if waiting.keys() <= {DEFAULT_BROKER} else f" that ships to the broker {name!r}"
        detail = f"{counted(count, 'output')} pending and no relay{which} is alive"
        report.add("warning", "relay", detail, f"Run `{run.text}`, or a worker of an app of that broker.", run)
    if not unserved_by_name:
        alive = store.upkeep.relay_alive()
        report.add("ok", "relay", "one is alive" if alive else "none is alive, and nothing waits for one")
    now = clock.now()
    if overdue := overdue_effects(store, now - _LONG_DUE):
        whose = ", ".join(f"{number} of {consumer!r}" for consumer, number in overdue.items())
        fix = "Run a worker of that app; was it renamed, one whose `previous=` names it (docs/how-to/external-effects.md)."
        report.add(
            "warning", "effects", f"could have been run for more than {shown(_LONG_DUE)}, and were not: {whose}", fix
        )
    elif effects:
        report.add("ok", "effects", f"{counted(effects, 'effect')} pending, for workers of the app that has them")
    if told := refused(store, now - _AT_ONCE):
        age = _age(now - min(item.oldest for item in told))
        reasons = "; ".join(f"{counted(item.count, 'time')} {shortened(item.reason)}" for item in told[:_TOP])
        number = counted(sum(item.count for item in told), "output")
        detail = f"{number} refused and tried again, the oldest for {age}: {reasons}"
        see = shell("idemp", "inbox", "list", "--pending", *mending.of_database())
        report.add("warning", "refused outputs", detail, f"See them with `{see.text}`.", see)
    if given_up:
        see, release = shell("idemp", "inbox", "list", "--quarantined", *mending.of_database()), mending.release()
        fix = (
            f"See them with `{see.text}`. Once what they missed is there: `{mending.redispatch()} ID` sends those of one "
            f"message again, `{release.text}` gives all of them back to the relay."
        )
        report.add("warning", "quarantine", f"{counted(given_up, 'output')} given up", fix, see, release)


def _age(value: timedelta) -> str:
    seconds = int(value.total_seconds())
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "m")):
        if seconds >= 2 * size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def _look_at_workers(report: Report, store: SqlStore, clock: Clock) -> None:
    """Those that showed life and then fell silent without a goodbye, as long as somebody may wonder about them."""
    rows = store.upkeep.workers()
    alive = [row.name for row in rows if row.alive]
    now = clock.now()
    silent = [row for row in rows if not row.alive and row.seen_at is not None and now - row.seen_at < _RECENTLY]
    if not silent:
        report.add("ok", "workers", f"{counted(len(alive), 'worker')} alive")
        return
    told = ", ".join(f"{row.name} ({shown(row.seen_at)})" for row in silent if row.seen_at is not None)
    fix = "If they crashed, their messages come again by themselves: start others. If they still run, they hang."
    report.add(
        "warning", "workers", f"{counted(len(alive), 'worker')} alive; without a goodbye fell silent: {told}", fix
    )


def look_at_broker(
    report: Report, broker: BrokerPort, app: App | None, mending: Mending, store: SqlStore | None
) -> None:
    """A connection, confirms, and whether the app's queues are as they must be."""
    topology = None
    if (file := getattr(broker, "path", None)) is not None:
        report.checks.append(free_space(file))
    if app is not None:
        with suppress(ConfigurationError):  # which the look at the app tells
            app.registry.build(app.settings.messages)
            topology = app.topology()
    inspect = getattr(broker, "inspect", None)
    seen: list[Diagnosis] = inspect(topology, mending.queues()) if inspect is not None else []
    report.checks += seen
    if not seen:
        broker.declare(Topology(exchange="", queues=()))
        report.add("ok", "broker", repr(broker))
    if any(check.verdict == "failed" and check.name in {"broker", "rights", "alarms"} for check in seen):
        return
    look_at_identity(report, store, broker, mending)
    if not any(check.name == "confirms" for check in seen):
        _look_at_confirms(report, broker)
    if app is not None and not any("queue" in check.name for check in seen):
        _look_at_queue(report, broker, app, mending)


def look_at_identity(report: Report, store: SqlStore | None, broker: BrokerPort, mending: Mending) -> None:
    """Whether outputs in the database belong to this very broker."""
    brokers = getattr(getattr(store, "upkeep", None), "brokers", None)
    identity = broker.identity() if brokers is not None else None
    if store is None or brokers is None or identity is None:
        return
    try:
        brokers.check(store.broker_name, identity)
    except BrokerChanged as error:
        report.add("failed", "broker name", error.message, error.fix, mending.adopt())
    else:
        report.add("ok", "broker name", f"{store.broker_name}: {identity}")


def _look_at_confirms(report: Report, broker: BrokerPort) -> None:
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


def _look_at_queue(report: Report, broker: BrokerPort, app: App, mending: Mending) -> None:
    try:
        ready, dead = broker.depth(app.queue), broker.depth(dead_queue(app.queue))
    except ConfigurationError as error:
        report.add("warning", "queue", error.message, "The worker declares it at its start.", mending.declare())
        return
    report.add("ok", "queue", f"{app.queue} has {counted(ready, 'message')} ready")
    if dead:
        see = (mending.queues() or BrokerCommands("MODULE:APP")).dead_letters()
        report.add("warning", "dead letters", f"{dead} in {dead_queue(app.queue)}", f"See them with `{see.text}`.", see)


def look_at_app(report: Report, app: App, mending: Mending) -> None:
    """Policies, and windows against the time in which the broker may redeliver."""
    with report.check("policies"):
        app.registry.build(app.settings.messages)
        registrations = app.registry.registrations()
        check_handlers(app)
        check_guard(app.guard, registrations)
        check_entities(app.store, registrations)
        check_effects(app.store, app.registry.effects)
        report.add("ok", "policies", f"{counted(len(registrations), 'message type')} of {app.name}")
    if report.checks[-1].verdict == "failed":
        return
    look_at_identities(report, app)
    look_at_prepared(report, app)
    look_at_databases(report, app, mending)
    url = app.broker_url or ""
    try:
        guarantees = app.broker.guarantees if missing_file(url) is None else guarantees_of(url)
    except (ConfigurationError, BrokerUnavailable):
        return  # told already
    with report.check("order"):
        check_order(guarantees, registrations)
    horizon = app.settings.redelivery_horizon or timedelta(seconds=guarantees.horizon_seconds)
    whose = "the setting redelivery_horizon" if app.settings.redelivery_horizon else f"{guarantees.name}'s default"
    short = {name: window for name, window in app.retentions().items() if window < horizon}
    for name, window in short.items():
        report.add(
            "failed",
            "retention",
            f"The window of {name!r} is {shown(window)}; the broker redelivers for up to {shown(horizon)} ({whose}): "
            "a late redelivery would be handled twice.",
            f'Write retention = "{shown(horizon)}" or more under [messages."{name}"] in idemp.toml or in the policy in its '
            f'code; or, if yours redelivers for a shorter time, redelivery_horizon = "{shown(window)}" at its top.',
        )
    if not short:
        shortest = min(app.retentions().values(), default=None)
        detail = "no type is opted in" if shortest is None else f"the shortest window is {shown(shortest)}"
        report.add("ok", "retention", f"{detail}; the broker redelivers for up to {shown(horizon)} ({whose})")


def look_at_identities(report: Report, app: App) -> None:
    """Whether the worker would refuse to start, because what makes two messages the same has changed."""
    # Where the tables are is asked at the first use of `upkeep`, too.
    compare = getattr(app.store.upkeep, "check_identities", None) if report.inbox_answers else None
    if compare is not None:
        with report.check("identities"):
            compare_identities(partial(compare, app.name, app.queue), app.registry)
            if types := unhandled_types(app.store, app.name, app.registry):
                report.add("warning", "identities", *_renamed_or_gone(app.name, types))
            else:
                report.add("ok", "identities", "as those that are stored, or covered by previous=")


def _renamed_or_gone(consumer: str, types: Sequence[str]) -> tuple[str, str]:
    """What is found of types that no handler takes any more, and what to do."""
    names = ", ".join(map(repr, types))
    former = f"type={types[0]!r}"
    detail = (
        f"claims of {names} still count, and no handler of {consumer!r} takes such messages any more: what was handled "
        "under the former name of a type is handled again under its new one"
    )
    fix = (
        f"If it was renamed, add previous=[Previous({former})] to the new type's policy for one retention window, or keep "
        f"{former} and add the new name to its aliases. If it is gone, or another app of this consumer takes it, nothing is "
        "to be done: this ends with the window."
    )
    return detail, fix


def look_at_prepared(report: Report, app: App) -> None:
    """Where prepared messages wait, whether they are needed, and what is parked."""
    prepared = app.prepared
    if prepared is None:
        return
    with report.check("prepared messages"):
        prepared.verify()
        parked = len(prepared.home.browse(State.PARKED, _MANY))
        where = f"they wait at {prepared.home.place}"
        if parked:
            detail = f"{where}; {counted(parked, 'message')} parked, neither dropped nor published"
            fix = "See `idemp prepared list MODULE:APP --state parked`; `idemp prepared resume` has them checked again."
            report.add("warning", "prepared messages", detail, fix)
        elif prepared.needless:
            detail = f"messages, local work and inbox share {prepared.home.place}: nobody has to prepare there"
            report.add("warning", "prepared messages", detail, "Use `app.initiate`: one transaction, no checker.")
        else:
            report.add("ok", "prepared messages", where)


def _unroutable() -> Output:
    name = f"idemp.doctor.{uuid4().hex}"
    message = Message(body=b"{}", type="idemp.doctor", message_id=name)
    return Output(id=uuid4(), ordinal=0, kind=OutputKind.SEND, exchange="", routing_key=name, message=message)


def _lines(check: Diagnosis) -> list[Paragraph | Text]:
    mark = Text.assemble((_MARKS[check.verdict], _STYLES[check.verdict]), "  ")
    lines: list[Paragraph | Text] = [Paragraph(mark, f"{check.name}: {check.detail}")]
    if check.fix:
        lines.append(Paragraph(Text(_INDENT), check.fix))
    # Commands are copied: never wrapped.
    lines += [Text(f"{_INDENT}  {'$' if item.kind == 'shell' else 'sql>'} {item.text}") for item in check.commands]
    return lines
