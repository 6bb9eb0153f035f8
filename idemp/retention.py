"""Retention: purges expired claims in bounded batches, never blocking claims, never touching what still pends."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from idemp.errors import StoreError
from idemp.telemetry import SILENT, Telemetry

if TYPE_CHECKING:
    import threading
    from collections.abc import Mapping
    from datetime import timedelta

    from idemp.inbox.port import Upkeep

log = logging.getLogger("idemp.retention")

BATCH: Final = 1_000


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
        self._retention = dict(retention)
        self._longest = max(retention.values(), default=None)
        self._batch = batch
        self._telemetry = telemetry

    def run(self, stop: threading.Event | None = None) -> int:
        """Batches until nothing expired is left, or `stop` is set; the number of claims deleted."""
        deleted, lag = 0, None
        try:
            while self._retention and (stop is None or not stop.is_set()):
                gone = self._upkeep.purge(self._consumer, self._retention, self._batch, others=self._longest)
                deleted += gone
                if gone < self._batch:
                    break
            lag = self._lag()
        except StoreError as error:
            log.warning("purge put off: %s", error, extra={"event": "purge_failed", "consumer": self._consumer})
        if deleted:
            log.info(
                "purged %d claims of %s",
                deleted,
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
