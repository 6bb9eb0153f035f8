"""How a delivery is settled after its handling, as the protocol decides it: acked, retried or parked."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from idemp.broker.port import Park, Retry
from idemp.classification import Action, rule_for
from idemp.deadletter import MAX_ERROR_CHARACTERS, dead_letter_headers
from idemp.errors import HandlerError, MessageError, Refuse, WorkerDied
from idemp.messages import DEFERRED_HEADER, counter
from idemp.policy import Policy
from idemp.showing import class_of, described

if TYPE_CHECKING:
    from idemp.broker.port import Delivery
    from idemp.classification import Rule
    from idemp.messages import Message
    from idemp.work import Consumer

IN_FLIGHT_DELAY: Final = timedelta(seconds=5)
UNCONFIRMED_DELAY: Final = timedelta(seconds=5)


def settlement_of_failure(
    consumer: Consumer, delivery: Delivery, error: Exception, rule: Rule | None = None
) -> Retry | Park:
    """A failed delivery is parked or retried, as the rule for its error says; see `idemp.classification`.

    Args:
        consumer: whose delivery it is.
        delivery: what failed.
        error: of what.
        rule: the one that decides; default that of a store which can take a handling.
    """
    rule = rule or rule_for(error, lambda: False)
    if rule.action is Action.PARK:
        return _parked(consumer, delivery, error)
    if rule.free is None or counter(delivery.message.headers, DEFERRED_HEADER) < rule.free:
        return Retry(UNCONFIRMED_DELAY, counted=False, reason=_reason(error))
    policy = _policy_of(consumer, delivery.message)
    if policy is None or not rule.counts:
        return _parked(consumer, delivery, error)
    if delivery.attempt >= policy.attempts:
        return _parked(consumer, delivery, error, f"attempts used up ({policy.attempts})")
    if rule.by_policy and (refusing := policy.refusing_rule(_raised(error))) is not None:
        return _parked(consumer, delivery, error, refusing)
    delay, attempt = policy.retry_delay(delivery.attempt), delivery.attempt + 1
    return Retry(delay, counted=True, reason=_reason(error), attempt=attempt, attempts=policy.attempts)


def _policy_of(consumer: Consumer, message: Message) -> Policy | None:
    try:
        return consumer.find(consumer.unwrap(message) if consumer.unwrap is not None else message).policy
    except MessageError:
        return None


def attempts_of(consumer: Consumer, message: Message) -> int:
    """The attempts that the policy of a message's type allows; the default policy's where no handler takes it."""
    return (_policy_of(consumer, message) or Policy()).attempts


def _parked(consumer: Consumer, delivery: Delivery, error: Exception, rule: str = "") -> Park:
    because = rule or ("Refuse" if isinstance(error, Refuse) else "can't be handled, however often")
    if isinstance(error, WorkerDied):
        delivery = replace(delivery, attempt=error.attempts)
        because = f"attempts used up ({error.attempts})"
    policy = _policy_of(consumer, delivery.message)
    story = dead_letter_headers(delivery, error, consumer.name, consumer.clock, consumer.app_version, because=because)
    return Park(class_of(error), story, policy.attempts if policy is not None else None)


def _raised(error: Exception) -> Exception:
    """What the handler raised, which `refuse_on` and `retry_on` may name."""
    return (error.raised if isinstance(error, HandlerError) else None) or error


def _reason(error: Exception) -> str:
    return described(error)[:MAX_ERROR_CHARACTERS]
