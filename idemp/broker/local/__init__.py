"""A durable broker in one file, for the demo and for services on one machine."""

from __future__ import annotations

from idemp.broker.local.broker import LocalBroker

__all__ = ["LocalBroker"]
