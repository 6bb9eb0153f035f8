"""The relay: sends outputs that are due and that no dispatch has sent."""

from __future__ import annotations

import logging
from typing import Final

from idemp.ports import Publisher, Scheduler
from idemp.protocol import publish

__all__ = ["Relay"]

log = logging.getLogger("idemp")

LIMIT: Final = 100  # outputs a turn


class Relay:
    """Leases outputs and sends them. Several relays take disjoint outputs.

    Args:
        scheduler: Leases the outputs, and learns what became of them.
        publisher: Belongs to the relay's thread.
        timeout: Seconds to wait for confirms; half of the lease.

    Example:
        >>> from idemp.worker.relay import Relay
        >>> Relay.turn.__name__
        'turn'
    """

    def __init__(self, scheduler: Scheduler, publisher: Publisher, timeout: float) -> None:
        self._scheduler, self._publisher, self._timeout = scheduler, publisher, timeout
        self._refused = False

    def turn(self) -> bool:
        """Send one list of outputs; return whether there may be more that are due."""
        outputs = self._scheduler.lease_outputs(LIMIT, 2 * self._timeout)
        if not outputs:
            return False
        refused = publish(self._publisher, outputs, self._timeout)
        self._scheduler.confirm([output.id for output in outputs if output.id not in refused])
        self._scheduler.refuse(refused)
        outage = [refusal.reason for refusal in refused.values() if not refusal.own]
        if outage and not self._refused:
            log.warning("the broker takes no outputs, so they wait: %s", outage[0])
        elif self._refused and not outage:
            log.info("the broker takes outputs again")
        self._refused = bool(outage)
        return len(outputs) == LIMIT and len(refused) < LIMIT
