"""How a delivery is settled after its handling, as the protocol decides it: acked, retried or parked."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from idemp.broker.port import Park, Retry
from idemp.deadletter import MAX_ERROR_CHARACTERS, dead_letter_headers
from idemp.errors import (
    BranchUnavailable,
    BranchUnfinished,
    DispatchIncomplete,
    MessageError,
    Refuse,
    TransactionEnded,
    TransientStoreError,
    WorkerDied,
    text_of,
)
from idemp.messages import DEFERRED_HEADER, counter

if TYPE_CHECKING:
    from idemp.broker.port import Delivery
    from idemp.messages import Message
    from idemp.policy import Policy
    from idemp.work import Consumer

IN_FLIGHT_DELAY: Final = timedelta(seconds=5)
UNCONFIRMED_DELAY: Final = timedelta(seconds=5)
MAX_DEFERRALS: Final = 20
"""How often a delivery comes back uncounted because the database asks for it (deadlocks, lock waits); then it counts."""


def settlement_of_failure(consumer: Consumer, delivery: Delivery, error: Exception) -> Retry | Park:
    """A failed delivery is parked, or retried; the retry counts as an attempt if it was the handler that failed."""
    if isinstance(error, MessageError | TransactionEnded):
        return _parked(consumer, delivery, error)
    if _is_nobodys_fault(delivery, error):
        return Retry(UNCONFIRMED_DELAY, counted=False, reason=_reason(error))
    policy = _policy_of(consumer, delivery.message)
    if policy is None:
        return _parked(consumer, delivery, error)
    if delivery.attempt >= policy.attempts:
        return _parked(consumer, delivery, error, f"attempts used up ({policy.attempts})")
    if (rule := policy.refusing_rule(error)) is not None and not isinstance(error, TransientStoreError):
        return _parked(consumer, delivery, error, rule)
    delay, attempt = policy.retry_delay(delivery.attempt), delivery.attempt + 1
    return Retry(delay, counted=True, reason=_reason(error), attempt=attempt, attempts=policy.attempts)


def _is_nobodys_fault(delivery: Delivery, error: Exception) -> bool:
    if isinstance(error, TransientStoreError):
        return counter(delivery.message.headers, DEFERRED_HEADER) < MAX_DEFERRALS
    if isinstance(error, BranchUnfinished):
        return not error.is_lost  # what only a person can mend is parked in the end, and seen there
    if isinstance(error, BranchUnavailable):
        return True
    # What no queue takes is the handler's fault; all else the broker's, and passes.
    return isinstance(error, DispatchIncomplete) and not set(error.reasons) <= {"returned", "unsendable"}


def _policy_of(consumer: Consumer, message: Message) -> Policy | None:
    try:
        return consumer.find(consumer.unwrap(message) if consumer.unwrap is not None else message).policy
    except MessageError:
        return None


def _parked(consumer: Consumer, delivery: Delivery, error: Exception, rule: str = "") -> Park:
    because = rule or ("Refuse" if isinstance(error, Refuse) else "can't be handled, however often")
    if isinstance(error, WorkerDied):
        delivery = replace(delivery, attempt=error.attempts)
        because = f"attempts used up ({error.attempts})"
    policy = _policy_of(consumer, delivery.message)
    story = dead_letter_headers(delivery, error, consumer.name, consumer.clock, consumer.app_version, because=because)
    return Park(type(error).__name__, story, policy.attempts if policy is not None else None)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {text_of(error)}"[:MAX_ERROR_CHARACTERS]
