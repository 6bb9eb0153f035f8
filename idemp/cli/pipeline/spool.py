"""`idemp pipeline spool`: drain a queue into its spool."""

from __future__ import annotations

import threading
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from idemp.cli.command import Broker, Database, Prefix, Schema, Screen, verb
from idemp.cli.exits import ExitCode
from idemp.cli.wiring import existing_broker, settings_of
from idemp.cli.worker import until_stopped
from idemp.errors import BrokerUnavailable
from idemp.plurals import counted

if TYPE_CHECKING:
    from idemp.broker.port import Broker as BrokerPort
    from idemp.spool import Tally


def add_to(group: typer.Typer) -> None:
    """Register the verb."""
    verb(group, "spool", log_level="info")(spool)


def spool(
    screen: Screen,
    queue: Annotated[str, typer.Argument(help="The queue to drain.")],
    *,
    until_empty: Annotated[bool, typer.Option("--until-empty", help="End when the queue is empty.")] = False,
    most_messages: Annotated[
        int, typer.Option("--most-messages", min=1, help="Stop consuming while the spool holds more.")
    ] = 1_000_000,
    most_bytes: Annotated[int, typer.Option("--most-bytes", min=1, help="The same, by the sum of the bodies.")] = 4
    * 1024**3,
    chunk: Annotated[int, typer.Option("--chunk", min=1, max=10_000, help="Messages in one transaction.")] = 500,
    database: Database = None,
    broker: Broker = None,
    schema: Schema = None,
    prefix: Prefix = None,
) -> None:
    """Take messages out of a queue, commit them to a table, then ack them; Spark reads them there (idemp-spool).

    It runs until SIGTERM or SIGINT, through outages. Needs no Spark. The queue must have no other consumers: what they
    take, the spool does not see.
    """
    from idemp.inbox.sql import create_engine_safely
    from idemp.spool import Spooler, SpoolStore

    settings = settings_of(database=database, broker=broker, schema=schema, prefix=prefix)
    draining = existing_broker(settings)
    _check_queue(draining, queue, waits=not until_empty)
    engine = create_engine_safely(settings.database_url)
    try:
        store = SpoolStore(engine, schema=settings.schema_name, prefix=settings.table_prefix)
        store.create(queue)
        spooler = Spooler(
            draining,
            store,
            queue,
            chunk=chunk,
            most_messages=most_messages,
            most_bytes=most_bytes,
            max_body_bytes=settings.max_body_bytes,
        )
        stop = threading.Event()
        with screen.progress() as bar:
            task = bar.add_task("spooling", total=None)

            def told(so_far: Tally) -> None:
                bar.update(task, completed=so_far.stored)

            until_stopped(stop.set, lambda: spooler.run(stop, until_empty=until_empty, told=told))
        tally, level = spooler.tally, store.level(queue)
    finally:
        engine.dispose()
    _tell(screen, queue, tally, asdict(level) | {"messages": level.messages})
    if tally.full and until_empty:
        raise typer.Exit(ExitCode.FAILED)


def _check_queue(broker: BrokerPort, queue: str, *, waits: bool) -> None:
    """Refuse a queue that does not exist, or may not be read, before tables are made for it.

    Args:
        broker: where it is.
        queue: its name.
        waits: whether a broker that is away is waited for; then the queue is looked at once it is back.

    Raises:
        ConfigurationError: there is no such queue, or this user has no right to it.
        BrokerUnavailable: the broker is away, and is not waited for.
    """
    try:
        broker.depth(queue)
    except BrokerUnavailable:
        if not waits:
            raise


def _tell(screen: Screen, queue: str, tally: Tally, level: dict[str, int]) -> None:
    full = " The spool is full, and the queue is not empty: read it, then run this again." if tally.full else ""
    screen.result(
        {"queue": queue, **asdict(tally), "spool": level},
        f"Spooled {counted(tally.stored, 'message')} of {queue}, parked {tally.parked}. The spool holds "
        f"{counted(level['messages'], 'message')}, offsets {level['first']} to {level['next']}.{full}",
    )
