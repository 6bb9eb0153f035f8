"""The relay: sends outputs that are due and that no dispatch has sent."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from idemp.dispatcher import publish
from idemp.events import log
from idemp.ports import Kind, Publisher, Scheduler
from idemp.worker.repeated import Repeated

__all__ = ["Cleaner", "Relay"]

LIMIT: Final = 100  # outputs a turn
PURGE: Final = 600.0  # seconds between purges
REST: Final = 1.5  # times as long as a batch took, the purge rests after it, so that claims go on meanwhile


class Relay:
    """Leases outputs and sends them. Several relays take disjoint outputs.

    Args:
        scheduler: Leases the outputs, and learns what became of them.
        publisher: Belongs to the relay's thread.
        timeout: Seconds to wait for confirms; half of the lease.
        chores: Done at the begin of each turn.

    Attributes:
        publisher: Belongs to the relay's thread.

    Example:
        >>> from idemp.worker.relay import Relay
        >>> Relay.turn.__name__
        'turn'
    """

    def __init__(
        self, scheduler: Scheduler, publisher: Publisher, timeout: float, chores: Sequence[Callable[[], object]] = ()
    ) -> None:
        self.publisher, self._scheduler, self._timeout = publisher, scheduler, timeout
        self._refused, self._chores = False, chores

    def turn(self) -> bool:
        """Send one list of outputs; return whether there may be more that are due."""
        for chore in self._chores:
            chore()
        outputs = self._scheduler.lease_outputs(LIMIT, 2 * self._timeout)
        if not outputs:
            return False
        refused = publish(self.publisher, outputs, self._timeout)
        self._scheduler.confirm([output.id for output in outputs if output.id not in refused])
        self._scheduler.refuse(refused)
        outage = [refusal.reason for refusal in refused.values() if not refusal.own]
        if outage and not self._refused:
            log("relay.refused", reason=outage[0])
        elif self._refused and not outage:
            log("relay.resumed")
        self._refused = bool(outage)
        return len(outputs) == LIMIT and len(refused) < LIMIT


class Cleaner(Repeated):
    """The thread that deletes old rows, in batches."""

    def __init__(
        self,
        scheduler: Scheduler,
        classify: Callable[[BaseException], Kind | None],
        failed: Callable[[BaseException], None],
        every: float = PURGE / 10,
    ) -> None:
        super().__init__("purge", self._turn, every, classify, failed)
        self._scheduler = scheduler

    def _turn(self) -> float:
        """Delete a batch; return the seconds until the next one."""
        start = time.monotonic()
        more = self._scheduler.purge()
        return REST * (time.monotonic() - start) if more else PURGE
