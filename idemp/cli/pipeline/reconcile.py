"""`idemp pipeline reconcile`: what was sent, beside what the inbox says."""

from __future__ import annotations

from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from idemp.cli.command import Database, Prefix, Schema, Screen, verb
from idemp.cli.exits import ExitCode
from idemp.cli.letters import moment
from idemp.cli.pipeline.options import Conf, Master, UrlFile, pairs, place_of
from idemp.cli.screen import Rows, shown
from idemp.cli.wiring import open_store, settings_of
from idemp.durations import parse_duration
from idemp.errors import ConfigurationError
from idemp.plurals import counted
from idemp.spark import require
from idemp.spark.reconcile import INBOX_COLUMNS, OUTPUT_COLUMNS, Kind, Sent, Summary
from idemp.spark.reconcile import reconcile as compare

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from idemp.spark.archive.reading import Inbox

_SQL: Final = "SQL expression, such as a column's name"
_WHEN: Final = "a time (2026-01-31T10:30, UTC unless it says more) or a duration ago (2h)"
_LIFETIME: Final = timedelta(hours=2)
_KINDS: Final = {"kind": "finding", "messages": "messages", "meaning": "that is"}

_Consumers = Annotated[list[str], typer.Option("--consumer", help="Who gets what was sent; may be repeated.")]
_Paths = Annotated[
    list[str], typer.Option("--sent", metavar="PATH", help="The log: files or folders; may be repeated.")
]
_Format = Annotated[str, typer.Option("--format", help="parquet, json (a message a line), csv, orc, …")]
_Options = Annotated[
    list[str] | None, typer.Option("--option", metavar="NAME=VALUE", help="For Spark's reader; may be repeated.")
]
_Id = Annotated[str, typer.Option("--id", metavar="COLUMN", help=f"Message id: {_SQL}.")]
_Time = Annotated[str, typer.Option("--time", metavar="COLUMN", help="When it was sent.")]
_Type = Annotated[str | None, typer.Option("--type", metavar="COLUMN", help="Message type.")]
_For = Annotated[str | None, typer.Option("--for", metavar="COLUMN", help="Which consumer it is for; default each.")]
_Source = Annotated[str | None, typer.Option("--source", metavar="COLUMN", help="CloudEvents source.")]
_Headers = Annotated[str | None, typer.Option("--headers", metavar="COLUMN", help="Headers, a JSON object.")]
_Body = Annotated[str | None, typer.Option("--body", metavar="COLUMN", help="Body, to tell conflicting ones.")]
_Digest = Annotated[str | None, typer.Option("--digest", metavar="COLUMN", help="Instead: differs where bodies do.")]
_Position = Annotated[str | None, typer.Option("--position", metavar="COLUMN", help="Place in the log.")]
_App = Annotated[str | None, typer.Option("--app", metavar="MODULE:APP", help="Reads ids as this app does.")]
_Grace = Annotated[str, typer.Option("--grace", metavar="DURATION", help="How long a message may take.")]
_Retention = Annotated[str, typer.Option("--retention", metavar="DURATION", help="How long claims are kept.")]
_Since = Annotated[str | None, typer.Option("--since", metavar="WHEN", help=f"First moment judged: {_WHEN}.")]
_Until = Annotated[str | None, typer.Option("--until", metavar="WHEN", help="Last moment judged.")]
_Report = Annotated[Path | None, typer.Option("--report", metavar="DIR", help="Folder for page, JSON and Parquet.")]
_Allow = Annotated[list[Kind] | None, typer.Option("--allow", help="No reason for exit code 6; may be repeated.")]
_Examples = Annotated[int, typer.Option("--examples", min=0, help="Findings of each kind to show, at most.")]


def add_to(group: typer.Typer) -> None:
    """Register the verb."""
    verb(group, "reconcile")(reconcile)


def reconcile(
    screen: Screen,
    *,
    sent: _Paths,
    consumers: _Consumers,
    id: _Id,
    time: _Time,
    format: _Format = "parquet",
    option: _Options = None,
    message_type: _Type = None,
    consumer: _For = None,
    source: _Source = None,
    headers: _Headers = None,
    body: _Body = None,
    digest: _Digest = None,
    position: _Position = None,
    app: _App = None,
    grace: _Grace = "15m",
    retention: _Retention = "7d",
    since: _Since = None,
    until: _Until = None,
    report: _Report = None,
    allow: _Allow = None,
    examples: _Examples = 20,
    master: Master = None,
    conf: Conf = None,
    url_file: UrlFile = None,
    database: Database = None,
    schema: Schema = None,
    prefix: Prefix = None,
) -> None:
    """Compare what was sent with what was handled, produced and confirmed. Exit code 6 says that there are findings.

    COLUMN is a column's name, or an expression of Spark SQL. Nothing is written to the database.
    """
    require()
    from idemp.spark.failures import told_plainly
    from idemp.spark.session import session

    settings = settings_of(database, schema=schema, prefix=prefix)
    now = datetime.now(UTC)
    first, last = (None if text is None else moment(text, now) for text in (since, until))
    patience, window = _duration("--grace", grace), _duration("--retention", retention)
    store = open_store(settings)
    store.verify(writes=False)  # what is wrong with the database is told before Spark starts
    with ExitStack() as stack:
        place = stack.enter_context(place_of(store, url_file))
        spark = stack.enter_context(session("idemp reconcile", master=master, conf=pairs(conf)))
        log = Sent(
            frame=_log(spark, sent, format, pairs(option)),
            consumers=consumers,
            id=id,
            time=time,
            type=message_type,
            consumer=consumer,
            source=source,
            headers=headers,
            body=body,
            digest=digest,
            position=position,
            app=app,
        )
        as_of, inbox, outputs = _stored(stack, spark, place)
        stack.enter_context(told_plainly(writes=False))
        found = stack.enter_context(
            compare(log, inbox, outputs, as_of=as_of, since=first, until=last, grace=patience, retention=window)
        )
        summary = found.summary(examples) if report is None else found.save(report, examples)
    _tell(screen, summary, report)
    if summary.found(allowed=allow or []):
        raise typer.Exit(ExitCode.FINDINGS)


def _duration(option: str, text: str) -> timedelta:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise typer.BadParameter(f"{option}: {error}.") from None


def _log(spark: SparkSession, paths: list[str], format: str, options: dict[str, str]) -> DataFrame:
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    from idemp.spark.failures import cause_of, unlogged

    told = {"header": "true", **options} if format == "csv" else options
    try:
        with unlogged():
            return spark.read.options(**told).format(format).load(paths)
    except (PySparkException, Py4JError) as error:
        why = cause_of(str(error), outermost=True)
        raise ConfigurationError(
            f"{', '.join(paths)} can't be read as {format}: {why}", fix="Nothing was changed."
        ) from error


def _stored(stack: ExitStack, spark: SparkSession, place: Inbox) -> tuple[datetime, DataFrame, DataFrame]:
    """Claims and outputs, and when they were so: of PostgreSQL, both of one moment."""
    from idemp.spark.datasource import register
    from idemp.spark.reading import Snapshot
    from idemp.spark.reading.arrow import is_postgresql
    from idemp.spark.reading.secret import settings_with

    options = {"url_file": place.url_file, "schema": place.schema, "prefix": place.prefix}
    if is_postgresql(settings_with(**options).database_url):
        snapshot = stack.enter_context(Snapshot(**options, lifetime=_LIFETIME))
        as_of, options["snapshot"] = snapshot.taken_at, snapshot.id
    else:
        as_of = datetime.now(UTC)
    register(spark)
    reader = spark.read.format("idemp").options(**{name: value for name, value in options.items() if value is not None})
    inbox = reader.option("table", "inbox").schema(INBOX_COLUMNS).load()
    return as_of, inbox, reader.option("table", "outputs").schema(OUTPUT_COLUMNS).load()


def _tell(screen: Screen, summary: Summary, report: Path | None) -> None:
    found = summary.found()
    totals = summary.totals
    judged = totals.messages - totals.outside
    rows = [
        {"kind": kind.value.replace("_", " "), "messages": number, "meaning": kind.meaning}
        for kind, number in found.items()
    ]
    span = f"from {shown(summary.since)} to {shown(summary.until)}"
    said = [f"{counted(judged, 'message')}, sent {span}: {totals.handled} handled."]
    said += [] if found else ["Nothing was found."]
    tables = [Rows(rows, _KINDS)] if found else []
    where = [] if report is None else [f"The page is {report / 'index.html'}."]
    screen.result(summary.model_dump(mode="json"), *said, *tables, *where)
