"""Tests of handlers: unit tests, an app under test, `assert_idempotent`, redeliveries in any order; and suites for adapters."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from idemp.errors import needs

if TYPE_CHECKING:
    from idemp.testing.app import AppTest
    from idemp.testing.broker_conformance import BrokerConformance
    from idemp.testing.conformance import SchedulerConformance, StoreConformance
    from idemp.testing.crash_points import Crash, CrashPoints, outage
    from idemp.testing.faults import Fault, NotIdempotent, TrialReport
    from idemp.testing.homes import HomeConformance
    from idemp.testing.idempotence import assert_idempotent, assert_idempotent_async
    from idemp.testing.machine import PromiseBroken, redelivery_machine, replay
    from idemp.testing.memory import MemoryBroker
    from idemp.testing.unit import context

__all__ = [
    "AppTest",
    "BrokerConformance",
    "Crash",
    "CrashPoints",
    "Fault",
    "HomeConformance",
    "MemoryBroker",
    "NotIdempotent",
    "PromiseBroken",
    "SchedulerConformance",
    "StoreConformance",
    "TrialReport",
    "assert_idempotent",
    "assert_idempotent_async",
    "context",
    "outage",
    "redelivery_machine",
    "replay",
]

MODULES = {
    "app": ("AppTest",),
    "broker_conformance": ("BrokerConformance",),
    "conformance": ("SchedulerConformance", "StoreConformance"),
    "crash_points": ("Crash", "CrashPoints", "outage"),
    "homes": ("HomeConformance",),
    "faults": ("Fault", "NotIdempotent", "TrialReport"),
    "idempotence": ("assert_idempotent", "assert_idempotent_async"),
    "machine": ("PromiseBroken", "redelivery_machine", "replay"),
    "memory": ("MemoryBroker",),
    "unit": ("context",),
}


def __getattr__(name: str) -> Any:
    """Import what is asked for: a pytest plugin is loaded with each test run, and has to be light."""
    for module, names in MODULES.items():
        if name in names:
            with needs("testing"):
                return getattr(import_module(f"idemp.testing.{module}"), name)
    raise AttributeError(name)
