"""Conformance suites of the ports, and crash points at their calls."""

from idemp.testing.conformance import BrokerConformance, SchedulerConformance, StoreConformance
from idemp.testing.crash_points import Crash, CrashPoints

__all__ = ["BrokerConformance", "Crash", "CrashPoints", "SchedulerConformance", "StoreConformance"]
