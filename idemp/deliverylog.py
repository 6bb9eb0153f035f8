"""One log line per delivery, the same whether a worker or a wrapped consumer ran it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from idemp.broker.port import Park, Retry
from idemp.protocol import Outcome

if TYPE_CHECKING:
    from idemp.broker.port import Delivery, Settlement

log = logging.getLogger("idemp.delivery")


def tell(consumer: str, delivery: Delivery, outcome: Outcome, settlement: Settlement) -> None:
    """Log how a delivery ended: parked as an error, retried as a warning, all others for debugging only."""
    level = {Outcome.PARKED: logging.ERROR, Outcome.RETRIED: logging.WARNING}.get(outcome, logging.DEBUG)
    if not log.isEnabledFor(level):
        return
    detail, delay = "", None
    if isinstance(settlement, Park):
        detail = settlement.headers.get("idemp-dead-error", settlement.reason)
    elif isinstance(settlement, Retry):
        detail, delay = settlement.reason, settlement.delay.total_seconds()
    log.log(
        level,
        "%s: %s %s%s",
        consumer,
        delivery.message.type or "message",
        outcome.value,
        f": {detail}" if detail else "",
        extra={
            "event": "delivery",
            "outcome": outcome.value,
            "message_id": delivery.message.message_id,
            "attempt": delivery.attempt,
            "delay": delay,
        },
    )
