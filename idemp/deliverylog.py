"""One log line per delivery, the same whether a worker or a wrapped consumer ran it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from idemp.broker.port import Park, Retry
from idemp.messages import DEAD_PREFIX
from idemp.outcome import Outcome
from idemp.showing import logger

if TYPE_CHECKING:
    from idemp.broker.port import Delivery, Settlement

log = logger("idemp.delivery")

_BECAUSE: Final = f"{DEAD_PREFIX}because"


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
    failed = settlement if isinstance(settlement, Park | Retry) else None
    log.log(
        level,
        "%s: %s %s%s",
        consumer,
        delivery.message.type or "message",
        delivery.message.message_id or "without an id",
        _how(delivery, outcome, settlement),
        extra={
            "event": "delivery",
            **about(consumer, delivery),
            "outcome": outcome.name.lower(),
            "queue": delivery.queue,
            "attempt": _attempt(delivery, settlement),
            "attempts": failed.attempts if failed is not None else None,
            "redelivered": delivery.redelivered,
            "duration": round(seconds, 6),
            "delay": settlement.delay.total_seconds() if isinstance(settlement, Retry) else None,
            "reason": failed.reason.partition(": ")[0] or None if failed is not None else None,
            "because": settlement.headers.get(_BECAUSE) if isinstance(settlement, Park) else None,
        },
    )


def _how(delivery: Delivery, outcome: Outcome, settlement: Settlement) -> str:
    if isinstance(settlement, Park):
        error = settlement.headers.get(f"{DEAD_PREFIX}error")
        said = f"{settlement.reason}: {error}" if error else settlement.reason
        return f" (attempt {_of(delivery, settlement)}) {outcome.value}: {in_one_line(said)}"
    if isinstance(settlement, Retry):
        attempt = f", attempt {_of(delivery, settlement)}" if settlement.counted else ", not counted"
        said = f": {in_one_line(settlement.reason)}" if settlement.reason else ""
        return f" {outcome.value} in {round(settlement.delay.total_seconds(), 1):.10g} s{attempt}{said}"
    return f" {outcome.value}"


def _of(delivery: Delivery, settlement: Park | Retry) -> str:
    attempt = str(_attempt(delivery, settlement))
    return attempt if settlement.attempts is None else f"{attempt} of {settlement.attempts}"


def _attempt(delivery: Delivery, settlement: Settlement) -> int:
    """Which attempt it was; deaths of the process count, of which the delivery itself knows nothing."""
    if isinstance(settlement, Park):
        return int(settlement.headers.get(f"{DEAD_PREFIX}attempts", delivery.attempt))
    if isinstance(settlement, Retry) and settlement.counted and settlement.attempt is not None:
        return settlement.attempt - 1
    return delivery.attempt


def in_one_line(text: str) -> str:
    r"""A text whose line breaks are blanks.

    Example:
        >>> in_one_line("no such sku\n  DETAIL: 7")
        'no such sku DETAIL: 7'
    """
    return " ".join(line.strip() for line in text.splitlines() if line.strip())
