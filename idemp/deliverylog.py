"""One log line per delivery, the same whether a worker or a wrapped consumer ran it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from idemp.broker.port import Park, Retry
from idemp.protocol import Outcome

if TYPE_CHECKING:
    from idemp.broker.port import Delivery, Settlement

log = logging.getLogger("idemp.delivery")


def about(consumer: str, delivery: Delivery) -> dict[str, Any]:
    """Which message it is about, as log events say it.

    Example:
        >>> from idemp.broker.port import Delivery
        >>> from idemp.messages import Message
        >>> about("shop", Delivery(message=Message(body=b"{}", type="shop.Sell", message_id="m-1"), queue="shop"))
        {'consumer': 'shop', 'message_id': 'm-1', 'message_type': 'shop.Sell'}
    """
    message = delivery.message
    return {"consumer": consumer, "message_id": message.message_id, "message_type": message.type}


def tell(consumer: str, delivery: Delivery, outcome: Outcome, settlement: Settlement, *, seconds: float) -> None:
    """Log how a delivery ended: parked as an error, retried as a warning, all others for debugging only.

    Args:
        consumer: whose delivery.
        delivery: what arrived.
        outcome: what became of it.
        settlement: how it is settled.
        seconds: how long it took, outages that it was held for included.
    """
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
            **about(consumer, delivery),
            "outcome": outcome.name.lower(),
            "queue": delivery.queue,
            "attempt": delivery.attempt,
            "redelivered": delivery.redelivered,
            "duration": round(seconds, 6),
            "delay": delay,
            "reason": settlement.reason if isinstance(settlement, Park) else None,
        },
    )
