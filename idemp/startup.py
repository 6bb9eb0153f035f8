"""Checks at start: what can be known before the first message is said before the first message."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from idemp.errors import ConfigurationError, GuaranteeError
from idemp.inbox.identities import OFF
from idemp.inbox.port import Identity

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from idemp.broker.port import Guarantees
    from idemp.inbox.port import InboxStore
    from idemp.work import Registration


def check_guarantees(guarantees: Guarantees, *, allow_at_most_once: bool) -> None:
    """Refuse a transport that loses messages when a worker dies.

    Raises:
        GuaranteeError: it does, and nobody said that this is fine.
    """
    if not guarantees.at_least_once and not allow_at_most_once:
        raise GuaranteeError(
            f"The transport {guarantees.name!r} may lose messages: {guarantees.remarks or 'it says so itself'}.",
            fix="Use RabbitMQ (pyamqp://) or local://, or accept the loss: IDEMP_ALLOW_AT_MOST_ONCE=true, or in idemp.toml.",
        )


def check_horizon(guarantees: Guarantees, horizon: timedelta | None, retentions: Mapping[str, timedelta]) -> None:
    """Refuse a retention window shorter than the time in which the broker may still redeliver.

    Raises:
        ConfigurationError: one is.
    """
    horizon = horizon or timedelta(seconds=guarantees.horizon_seconds)
    for message_type, retention in retentions.items():
        if retention < horizon:
            raise ConfigurationError(
                f"The retention window of {message_type!r} ({retention}) is shorter than the redelivery horizon of "
                f"{guarantees.name!r} ({horizon}): a late redelivery would be handled twice.",
                fix="Raise retention, or set redelivery_horizon if yours is shorter.",
            )


def agree_identities(store: InboxStore, consumer: str, queue: str, registrations: Sequence[Registration]) -> None:
    """Refuse a deploy that silently changes what makes two messages the same while old claims still count.

    Raises:
        IdentityChanged: it does, and no `previous=` covers it.
    """
    current = []
    covered: dict[str, list[Identity]] = {}
    for item in registrations:
        policy = item.policy
        current.append(
            Identity(
                item.message_type,
                policy.key.name if policy.idempotent else OFF,
                aliases=item.aliases,
                scoped_by_type=policy.key.scope == "body",
            )
        )
        covered[item.message_type] = [
            Identity(
                former.type or item.message_type,
                (former.key or policy.key).name if former.opted_in else OFF,
                consumer=former.consumer,
                scoped_by_type=(former.key or policy.key).scope == "body",
            )
            for former in policy.previous
        ]
    retentions = {item.message_type: item.policy.retention for item in registrations}
    store.upkeep.agree_identities(consumer, queue, current, covered, retentions)
