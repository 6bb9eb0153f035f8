"""`idemp broker`: an app's queues."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from idemp.broker.copies import dead_queue
from idemp.cli.command import Broker, Database, Prefix, Schema, Screen, group, verb
from idemp.cli.mending import Mending
from idemp.cli.wiring import configured_app, existing_broker
from idemp.errors import ConfigurationError
from idemp.plurals import counted

commands = group("broker", "Make an app's queues, make one anew, or have a broker take another's place.")

_App = Annotated[str, typer.Argument(metavar="MODULE:APP", help="Whose queues.")]


@verb(commands, "declare")
def declare(screen: Screen, app: _App, *, broker: Broker = None) -> None:
    """Make the queues, dead-letter queues, delay tiers, exchange and bindings that are missing."""
    found = configured_app(app, broker=broker)
    found.registry.build(found.settings.messages)
    topology = found.topology()
    found.broker.declare(topology)
    queues = ", ".join(topology.queues)
    screen.result(
        {"broker": repr(found.broker), **asdict(topology), "dead_letter_queues": [*map(dead_queue, topology.queues)]},
        f"{queues} with its dead letters and delay tiers, and the exchange {topology.exchange} with "
        f"{counted(len(topology.bindings), 'binding')} are at {found.broker!r}.",
    )


@verb(commands, "adopt")
def adopt(
    screen: Screen,
    app: _App,
    *,
    database: Database = None,
    broker: Broker = None,
    schema: Schema = None,
    prefix: Prefix = None,
) -> None:
    """Have the app's broker take the place of the one that has its name in the database: what pends goes there from now on.

    For a broker that was made anew, or moved to another cluster. Stop the app's workers and relays before.
    """
    found = configured_app(app, database=database, broker=broker, schema=schema, prefix=prefix)
    store: Any = getattr(found.store, "beside", found.store)  # streams in a database have their inbox there, too
    if not hasattr(store, "engine"):
        raise ConfigurationError(f"A {type(store).__name__} notes no broker.", fix="Nothing is to be done.")
    identity = existing_broker(found).identity()
    store.verify()
    if identity is None:
        raise ConfigurationError(f"{found.broker!r} can't be told from others.", fix="Nothing is to be done.")
    name = store.broker_name
    alive = [row.name for row in store.upkeep.workers() if row.alive and row.broker == name]
    if alive and store.upkeep.brokers.stored(name) != identity:
        raise ConfigurationError(
            f"Processes of the broker {name!r} are alive: {', '.join(alive)}. Nothing was changed.",
            fix="Stop them; a process that was killed counts as alive for 15 seconds.",
        )
    former = store.upkeep.brokers.adopt(name, identity)
    waiting, _ = store.upkeep.waiting()
    screen.result(
        {"broker_name": name, "identity": identity, "former": former, "waiting": waiting.get(name, 0)},
        f"The broker {name!r} is {identity} (formerly {former or 'unknown'}); "
        f"{counted(waiting.get(name, 0), 'output')} pending, to be sent there.",
    )


@verb(commands, "rebuild")
def rebuild(
    screen: Screen,
    app: _App,
    *,
    queue: Annotated[str, typer.Option("--queue", help="A queue, dead-letter queue or delay tier of the app.")],
    broker: Broker = None,
) -> None:
    """Make a queue anew that exists with other arguments, and keep its messages; run it again if it stops half-way.

    Stop its consumers and whoever publishes to it before.
    """
    found = configured_app(app, broker=broker)
    found.registry.build(found.settings.messages)
    existing = existing_broker(found)
    rebuilds: Any = getattr(existing, "rebuild", None)
    if rebuilds is None:
        raise ConfigurationError(f"Queues of {existing!r} have no arguments.", fix="Nothing is to be done.")
    with screen.progress() as bar:
        task = bar.add_task("moving", total=None)
        again = Mending(app, found, {"broker": broker}).queues()
        done = rebuilds(found.topology(), queue, lambda count: bar.advance(task, count), again)
    what = "was made anew" if done.rebuilt else "is as it must be"
    screen.result(asdict(done), f"{queue} {what}; {counted(done.aside, 'message')} went aside, {done.back} came back.")
