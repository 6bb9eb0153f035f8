"""RabbitMQ, and the virtual transports that kombu has: the only part of idemp that imports kombu."""

from __future__ import annotations

from idemp.broker.kombu.broker import KombuBroker
from idemp.broker.kombu.consuming import KombuReceiver
from idemp.broker.kombu.publisher import ConfirmingPublisher
from idemp.broker.kombu.settling import KombuSettler

__all__ = ["ConfirmingPublisher", "KombuBroker", "KombuReceiver", "KombuSettler"]
