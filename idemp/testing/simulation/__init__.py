"""Deterministic simulation: every order in which workers, relay, cleaner, broker and clock can take their steps.

The real protocol, dispatcher, consuming loop, relay and cleaner run on an inbox and a broker in memory. Each of their calls
of a port is a step; before each of them the schedule says whose step comes next, and who dies. Nothing depends on chance or
time.

>>> from idemp.testing.simulation import Simulation
>>> report = Simulation(workers=1, copies=1, relays=0, purges=0, jumps=()).explore()
>>> report.complete, report.violation
(True, None)
"""

from __future__ import annotations

from functools import cached_property

from idemp.testing.simulation.exploring import Exploring, Report
from idemp.testing.simulation.options import Options, Parts
from idemp.testing.simulation.search import Run
from idemp.testing.simulation.world import Setting

__all__ = ["Options", "Parts", "Report", "Run", "Simulation"]


class Simulation(Options, Exploring):
    """Workers, relays, a cleaner, a broker and a clock, whose steps are put into every order.

    Arguments are the attributes of `Options`.

    Raises:
        ConfigurationError: there is nothing to simulate.

    Example:
        >>> simulation = Simulation(workers=2, copies=1, relays=0, purges=0, jumps=())
        >>> simulation.explore().violation is None
        True
        >>> print(simulation.replay(["worker 1: receive", "worker 1: late before"]))
        Traceback (most recent call last):
        ...
        idemp.errors.ConfigurationError: After 1 choices 'worker 1: late before' is not possible. Possible: ...
    """

    @cached_property
    def setting(self) -> Setting:
        """What all runs of it share."""
        return Setting(self)
