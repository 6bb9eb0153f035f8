"""Retention: purges expired claims in bounded batches, never blocking claims, never touching what still pends."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from idemp.errors import StoreError
from idemp.inbox.port import HORIZON_SLACK
from idemp.plurals import counted
from idemp.showing import logger
from idemp.telemetry import SILENT, Telemetry

if TYPE_CHECKING:
    import threading
    from collections.abc import Mapping

    from idemp.inbox.port import Upkeep

log = logger("idemp.retention")

BATCH: Final = 500
NEVER: Final = timedelta(days=100_000)
"""A window that no consumer has consumed through."""
_REST: Final = 4
"""So many times as long as a batch took nothing is deleted, so that deliveries have the database's CPU and disk."""


class Cleaner:
    """Purges one consumer's expired claims. Any number may run; the store lets one work at a time.

    Args:
        upkeep: the store's half that deletes.
        consumer: whose claims.
        retention: window per message type; initiations, and types without a handler by now, are kept as long as the longest.
        batch: rows per transaction.
        telemetry: what looks on.

    Example:
        >>> from datetime import timedelta
        >>> from idemp.inbox.memory import InMemoryStore
        >>> Cleaner(InMemoryStore(), "orders", {"orders.Place": timedelta(days=7)}).run()
        0
    """

    def __init__(
        self,
        upkeep: Upkeep,
        consumer: str,
        retention: Mapping[str, timedelta],
        *,
        batch: int = BATCH,
        telemetry: Telemetry = SILENT,
    ) -> None:
        self._upkeep = upkeep
        self._consumer = consumer
        # A worker may still go by the start of a window that it read a while ago: see HORIZON_SLACK.
        self._retention = {name: window + HORIZON_SLACK for name, window in retention.items()}
        self._longest = max(self._retention.values(), default=None)
        self._batch = batch
        self._telemetry = telemetry

    def run(self, stop: threading.Event | None = None) -> int:
        """Batches until nothing expired is left, or `stop` is set; the number of claims deleted.

        Where there is somebody to stop it, it works a fifth of the time, and gives way to deliveries for the rest.
        """
        deleted, lag = 0, None
        try:
            while self._retention and (stop is None or not stop.is_set()):
                began = time.monotonic()
                gone = self._upkeep.purge(self._consumer, self._retention, self._batch, others=self._longest)
                deleted += gone
                if gone < self._batch:
                    break
                if stop is not None:
                    stop.wait(_REST * (time.monotonic() - began))
            lag = self._lag()
        except StoreError as error:
            log.warning("purge put off: %s", error, extra={"event": "purge_failed", "consumer": self._consumer})
        if deleted:
            log.info(
                "purged %s of %s",
                counted(deleted, "claim"),
                self._consumer,
                extra={"event": "purged", "consumer": self._consumer, "claims": deleted},
            )
        self._telemetry.purged(self._consumer, deleted, lag)
        return deleted

    def _lag(self) -> float | None:
        """How far the oldest claim that could be purged is past its window, seconds; unknown if nobody asks."""
        if not self._retention or not self._telemetry.reads_state:
            return None
        return self._upkeep.purge_lag(self._consumer, self._retention, others=self._longest).total_seconds()
