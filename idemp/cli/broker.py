"""`idemp broker`: an app's queues."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from idemp.broker.copies import dead_queue
from idemp.cli.command import Broker, Screen, group, verb
from idemp.cli.mending import Mending
from idemp.cli.wiring import configured_app
from idemp.errors import ConfigurationError

commands = group("broker", "Make an app's queues, or make one anew.")

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
        f"{len(topology.bindings)} bindings are at {found.broker!r}.",
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
    rebuilds: Any = getattr(found.broker, "rebuild", None)
    if rebuilds is None:
        raise ConfigurationError(f"Queues of {found.broker!r} have no arguments.", fix="Nothing is to be done.")
    with screen.progress() as bar:
        task = bar.add_task("moving", total=None)
        again = Mending(app, found, {"broker": broker}).queues()
        done = rebuilds(found.topology(), queue, lambda count: bar.advance(task, count), again)
    what = "was made anew" if done.rebuilt else "is as it must be"
    screen.result(asdict(done), f"{queue} {what}; {done.aside} messages went aside, {done.back} came back.")
