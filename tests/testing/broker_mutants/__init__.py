"""Brokers with one fault each, and the case of `BrokerConformance` that has to notice it."""

from __future__ import annotations

from tests.testing.broker_mutants import ordering, publishing, reopening, settling, sharing
from tests.testing.broker_mutants.sound import TABLE, Broker, Modest

__all__ = ["TABLE", "Broker", "Modest", "ordering", "publishing", "reopening", "settling", "sharing"]
