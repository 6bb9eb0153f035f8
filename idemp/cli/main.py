"""The commands `idemp worker`, `relay`, `recover`, `demo`, `describe` and `db`; commands of other modules are registered here."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from idemp.app import App, load_app
from idemp.cli.bulk import bulk
from idemp.cli.dead import dead
from idemp.cli.doctor import doctor
from idemp.cli.exits import AsJson, Exit, exits, fail
from idemp.cli.inbox import inbox
from idemp.cli.pipeline import pipeline
from idemp.cli.prepared import prepared
from idemp.cli.screen import escape, records
from idemp.events import JsonLines, log
from idemp.hooks import LogDeliveries
from idemp.identity import toml
from idemp.settings import Settings

if TYPE_CHECKING:
    from idemp.sql.engine import Database

__all__ = ["Exit", "main"]


class Sorted(TyperGroup):
    """Lists its commands by name."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands."""
        return sorted(super().list_commands(ctx))


cli = typer.Typer(cls=Sorted, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
db = typer.Typer(help="The tables of idemp.", no_args_is_help=True, rich_markup_mode=None)
cli.add_typer(db, name="db")
cli.command()(bulk)
cli.command()(doctor)
cli.add_typer(dead, name="dead")
cli.add_typer(inbox, name="inbox")
cli.add_typer(pipeline, name="pipeline")
cli.add_typer(prepared, name="prepared")


class Level(StrEnum):
    """Levels of logging."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


LogLevel = Annotated[
    Level | None,
    typer.Option(
        help="Level of idemp and of the root logger; by default the app's, else info for idemp and warning for others.",
        case_sensitive=False,
    ),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log each delivery, and the traceback of an app that fails.")]
JsonLog = Annotated[bool, typer.Option("--json", help="Log lines of JSON.")]


def _print_version(value: bool) -> None:
    if value:
        print(f"idemp {version('idemp')}")
        raise typer.Exit


@cli.callback()
def settings(
    values: Annotated[
        list[str] | None,
        typer.Option("--set", "-s", metavar="NAME=VALUE", help="A setting, or TYPE.OPTION of a message type. Repeatable."),
    ] = None,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Idempotent consumers: effects exactly once, outputs at least once under one id."""
    with exits():
        for setting in values or ():
            name, equals, value = setting.partition("=")
            type, dot, option = name.rpartition(".")
            if not equals or not name or (dot and not (type and option)):
                fail(Exit.USAGE, f"--set {setting!r}: write NAME=VALUE or TYPE.OPTION=VALUE")
            if dot:
                messages = Settings().messages
                messages.setdefault(type, {})[option] = _value(value)
                os.environ["IDEMP_MESSAGES"] = json.dumps(messages, default=str)
            else:
                os.environ[f"IDEMP_{name.upper()}"] = value


def _value(text: str) -> Any:
    """Return an option's value: JSON, a table or an array of TOML, else the text itself."""
    for read in (json.loads, lambda text: tomllib.loads(f"it = {text}")["it"] if text[:1] in ("{", "[") else text):
        with suppress(ValueError, RecursionError):
            return read(text)
    return text


def main() -> NoReturn:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal may support ASCII only
    with exits():
        cli()
    raise SystemExit(Exit.OK)


@cli.command()
def worker(
    target: Annotated[str, typer.Argument(help="module:app, such as shop.orders:app", metavar="MODULE:APP")],
    processes: Annotated[int, typer.Option(min=1, max=256, help="Worker processes.")] = 1,
    log_level: LogLevel = None,
    verbose: Verbose = False,
    as_json: JsonLog = False,
    reload: Annotated[bool, typer.Option("--reload", help="Start again when a source file changes; for development.")] = False,
    reloaded: Annotated[bool, typer.Option("--reloaded", hidden=True)] = False,
    supervisor: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Consume the queue of an app until SIGTERM."""
    from idemp.worker import Worker, lifecycle

    options = [name for name, given in (("--verbose", verbose), ("--json", as_json)) if given]
    options += ["--log-level", log_level] if log_level else []
    command = [sys.executable, "-m", "idemp", "worker", target, *options]
    if reload:
        from idemp.worker.reload import run_reloading

        with exits():
            _log(log_level, verbose=verbose, as_json=as_json)
            raise SystemExit(run_reloading([*command, "--processes", str(processes), "--reloaded"]))
    with exits(traceback=verbose or reloaded):
        app = load_app(target)
        _log(log_level, verbose=verbose, as_json=as_json)
        if logging.getLogger("idemp").isEnabledFor(logging.DEBUG):
            app.hooks = [*app.hooks, LogDeliveries()]
        with _measured(app, processes, supervised=supervisor is not None) as environment:
            if processes > 1:
                try:
                    app.adapters()  # raises here what every process would raise
                    app.close()
                except Exception as error:
                    if not lifecycle.outage(error, app.database()):  # the processes wait until it is over
                        raise
                raise SystemExit(lifecycle.Supervisor([*command, "--supervisor"], processes, app.settings, environment).run())
            try:
                lifecycle.run(lambda: Worker(app), app.database(), app.settings, supervisor=supervisor)
            except SystemExit as error:
                fail(Exit.FAILED, f"a handler raised SystemExit({error.code!r}): its message is delivered again")


@contextmanager
def _measured(app: App, processes: int = 1, *, supervised: bool = False) -> Iterator[Callable[[int], Mapping[str, str]]]:
    """Serve `/metrics`, or leave this to the supervisor; yield a function that returns the environment of a process by its number."""
    if app.settings.metrics_port is None:
        yield lambda _: {}
        return
    from idemp.telemetry.metrics import Metrics, MetricsServer

    app.hooks = [*app.hooks, Metrics(app.name)]
    if supervised:
        yield lambda _: {}
        return
    with closing(MetricsServer(app, processes=processes)) as server:
        yield server.environment


@cli.command()
def relay(
    target: Annotated[
        str | None, typer.Argument(help="module:app whose prepared messages are checked, too.", metavar="MODULE:APP")
    ] = None,
    log_level: LogLevel = None,
    verbose: Verbose = False,
    as_json: JsonLog = False,
) -> None:
    """Send pending outputs until SIGTERM, for apps without a worker."""
    from idemp.worker import RelayProcess, lifecycle

    with exits(traceback=verbose):
        app = load_app(target) if target else None
        _log(log_level, verbose=verbose, as_json=as_json)
        settings = app.settings if app else Settings()
        with _measured(app or App("relay", settings=settings)):
            database = (app or App("relay", settings=settings)).database()
            lifecycle.run(lambda: RelayProcess(settings, app), database, settings)


@cli.command()
def recover(
    target: Annotated[str, typer.Argument(help="module:app, such as shop.orders:app", metavar="MODULE:APP")],
    as_json: AsJson = False,
) -> None:
    """Commit or roll back branches in doubt in the second databases of an app, as its workers do."""
    from idemp.twophase import recover

    with exits():
        outcomes = recover(load_app(target))
    if as_json:
        print(json.dumps(outcomes, indent=2))
    else:
        print("\n".join(f"{escape(xid)}  {escape(what)}" for xid, what in outcomes.items()) or "nothing is in doubt")
    if any(what.startswith("left") for what in outcomes.values()):
        raise SystemExit(Exit.FAILED)


@cli.command()
def describe(
    target: Annotated[str | None, typer.Argument(help="module:app, such as shop.orders:app", metavar="MODULE:APP")] = None,
    grafana: Annotated[bool, typer.Option("--grafana", help="Print a Grafana dashboard instead.")] = False,
    alerts: Annotated[bool, typer.Option("--alerts", help="Print Prometheus alert rules instead.")] = False,
    as_json: AsJson = False,
) -> None:
    """Describe an app: its settings, and the policy of each message type. Opens no connection."""
    if (target is not None) + grafana + alerts != 1:
        fail(Exit.USAGE, "name an app, or use --grafana or --alerts")
    if target is None:
        from idemp.telemetry.catalogue import alert_rules, dashboard

        print(json.dumps(dashboard(), indent=2) if grafana else alert_rules(), end="\n" if grafana else "")
        return
    with exits():
        app = load_app(target)
        app.configure()
        described = app.describe()
    if as_json:
        print(json.dumps(described, indent=2))
        return
    if described["unhandled"]:
        print(f"configured, and not handled by this app: {escape(', '.join(described['unhandled']))}\n")
    options = ("key", "previous")  # shown as in a configuration file
    messages = [message | {name: message[name] and toml(message[name]) for name in options} for message in described["messages"]]
    print(f"consumer  {escape(described['consumer'])}\n\n{records([described['settings']], 1)}\n\n{records(messages)}")


@cli.command()
def demo(
    messages: Annotated[int, typer.Option(min=1, max=100_000, help="Messages to send.")] = 2_000,
    kills: Annotated[int, typer.Option(min=0, max=1_000, help="Worker processes to kill.")] = 20,
    seed: Annotated[int, typer.Option(help="Seed of the choice of duplicates and kills.")] = 1,
    folder: Annotated[Path | None, typer.Option(help="Folder to keep the database in; it must not exist.")] = None,
    as_json: AsJson = False,
) -> None:
    """Send duplicates to two consumers, kill their processes, and count lost and doubled effects."""
    from idemp.demo import run

    with exits():
        report = run(messages=messages, kills=kills, seed=seed, folder=folder, quiet=as_json)
    print(json.dumps(report.as_dict(), indent=2) if as_json else report)
    if not report.kept:
        raise SystemExit(Exit.FAILED)


@db.command()
def upgrade(as_json: AsJson = False) -> None:
    """Create the tables, or upgrade them to this release."""
    from idemp.sql.schema import REVISION
    from idemp.sql.schema import upgrade as upgrade_tables

    with exits():
        database = _database()
        upgrade_tables(database)
        database.close()
    url = database.engine.url.render_as_string()
    print(json.dumps({"database": url, "revision": REVISION}) if as_json else f"{url} has the tables of revision {REVISION}")


@db.command()
def check(as_json: AsJson = False) -> None:
    """Check tables, keys and isolation; exit code 1 if a worker would refuse to start."""
    from idemp.sql.checks import check_database

    with exits():
        database = _database()
        findings = check_database(database)
        database.close()
    if as_json:
        print(json.dumps([{"level": finding.level, "text": finding.text, "fix": finding.fix} for finding in findings], indent=2))
    else:
        print("\n".join(f"{finding.level}: {finding}" for finding in findings) or "ok")
    if any(finding.level == "red" for finding in findings):
        raise SystemExit(Exit.FAILED)


@db.command()
def partition(
    partitions: Annotated[int, typer.Option(min=2, max=256, help="Partitions of each table.")] = 16,
    yes: Annotated[bool, typer.Option("--yes", help="Copy large tables, for which workers wait.")] = False,
    as_json: AsJson = False,
) -> None:
    """Copy the inbox and the outputs into hash partitions, on PostgreSQL. All or nothing; workers wait meanwhile."""
    from idemp.sql.partition import SMALL, unpartitioned
    from idemp.sql.partition import partition as partition_tables

    with exits(), closing(_database()) as database:
        sizes = unpartitioned(database)
        if (size := sum(sizes.values())) > SMALL:
            text = f"{' and '.join(sizes)} have {size / 1e6:,.0f} MB, and workers wait until they are copied"
            if not yes:
                fail(Exit.USAGE, f"{text}; nothing was changed: try it on a copy, then use --yes")
            print(f"{text} …", file=sys.stderr)
        changed = partition_tables(database, partitions)
    if as_json:
        print(json.dumps({"partitioned": changed, "partitions": partitions}))
    else:
        print(
            f"{' and '.join(changed)} have {partitions} partitions"
            if changed
            else "the tables have partitions already; nothing was changed"
        )


@db.command()
def sql(as_json: AsJson = False) -> None:
    """Print the statements that create the tables."""
    from idemp.sql.schema import sql as statements

    with exits():
        text = statements(_database())
    print(json.dumps({"sql": text}) if as_json else text)


def _database() -> Database:
    from idemp.sql.engine import Database

    settings = Settings()
    return Database(settings.database_url, settings.table_prefix)


def _log(level: Level | None, *, verbose: bool, as_json: bool) -> None:
    """Configure logging, unless the app did so when it was imported. Options of the command line override both."""
    root, own = logging.getLogger(), logging.getLogger("idemp")
    own.disabled = False  # logging.config disables existing loggers
    if own.hasHandlers():
        if as_json:
            log("worker.logging")
    else:
        logging.basicConfig(format="%(asctime)s %(levelname)-7s %(name)s %(process)d %(message)s", level=logging.WARNING)
        own.setLevel(own.level or logging.INFO)
        if as_json:
            for handler in root.handlers:
                handler.setFormatter(JsonLines())
    if level is not None:
        root.setLevel(level.upper())
        own.setLevel(level.upper())
    if verbose:
        own.setLevel(logging.DEBUG)
