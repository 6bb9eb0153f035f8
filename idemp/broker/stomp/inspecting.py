"""A look at a live ActiveMQ: whether it keeps messages, has space for them, and tells what idemp has to know."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from idemp.broker.stomp.statistics import NoStatistics
from idemp.broker.stomp.topology import read
from idemp.diagnosis import Diagnosis

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from idemp.broker.port import Topology
    from idemp.broker.stomp.link import Link
    from idemp.broker.stomp.statistics import Statistics
    from idemp.diagnosis import BrokerCommands

_OLDEST: Final = (5, 16)
_NEARLY_FULL: Final = 80
_PLUGIN: Final = (
    "Add <statisticsBrokerPlugin/> to the broker's plugins, and xstream.jar and jettison.jar to its libraries."
)


def inspect(
    link: Link, statistics: Statistics, topology: Topology | None, commands: BrokerCommands | None, deadline: float
) -> list[Diagnosis]:
    """All that was found.

    Raises:
        StompError: refused, late, or the connection is gone.
        BrokerUnavailable: another connection can't be opened.
    """
    found = [_version(link)]
    known = read(link, deadline)
    missing = [queue for queue in topology.queues if not known.has(queue)] if topology is not None else []
    if missing:
        detail = f"Not declared yet: {', '.join(missing)}."
        mends = () if commands is None else (commands.declare(),)
        found.append(Diagnosis("warning", "queue", detail, "The worker declares it at its start.", mends))
    try:
        found += _judged(statistics.of_broker())
    except NoStatistics:
        detail = (
            "The broker does not answer: depths count what consumers hold, sends to queues that idemp did not declare come "
            "back, and nobody can see here whether messages reach a disk."
        )
        found.append(Diagnosis("warning", "statistics", detail, _PLUGIN))
    return found


def _version(link: Link) -> Diagnosis:
    name = link.server or "a server without a name"
    numbers = re.match(r"ActiveMQ/(\d+)\.(\d+)", name)
    if numbers is None:
        return Diagnosis("failed", "broker", f"{link.shown}: {name} is no ActiveMQ Classic.", "Take ActiveMQ Classic.")
    if (int(numbers[1]), int(numbers[2])) < _OLDEST:
        return Diagnosis("failed", "broker", f"{link.shown}: {name} is too old.", "Use 5.16 or newer.")
    return Diagnosis("ok", "broker", f"{link.shown}: {name}")


def _judged(values: Mapping[str, Any]) -> Iterator[Diagnosis]:
    # A journal has a size from its first moment; what is in memory only has none.
    if not values.get("storeUsage"):
        fix = 'Give the broker persistent="true" and a persistenceAdapter, such as kahaDB.'
        yield Diagnosis("failed", "store", "Messages are in memory only: a restart of the broker loses them.", fix)
    elif int(values.get("storePercentUsage", 0)) >= _NEARLY_FULL:
        detail = f"{values['storePercentUsage']} % of the store are used; a full one takes no output and no retry."
        yield Diagnosis("warning", "store", detail, "Consume, or raise storeUsage in the broker's systemUsage.")
    else:
        yield Diagnosis("ok", "store", f"{values.get('storePercentUsage', 0)} % are used")
