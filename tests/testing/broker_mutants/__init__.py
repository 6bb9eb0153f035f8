"""Brokers with one fault each, and the case of `BrokerConformance` that has to notice it."""

from __future__ import annotations

from tests.testing.broker_mutants import publishing, reopening, settling, sharing
from tests.testing.broker_mutants.sound import TABLE, Broker, Modest

__all__ = ["TABLE", "Broker", "Modest", "publishing", "reopening", "settling", "sharing"]
