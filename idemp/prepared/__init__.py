"""Prepared messages, for a producer whose local work is in another store than its messages.

>>> from idemp.prepared import InMemoryBarrier, InMemoryHome
>>> InMemoryHome().decides
True
"""

from __future__ import annotations

from idemp.prepared.checking import Round
from idemp.prepared.half import Half
from idemp.prepared.memory import InMemoryBarrier, InMemoryHome
from idemp.prepared.port import Answer, Barrier, Decision, Home, Prepared, Record, State, Taken
from idemp.prepared.producing import PreparedMessages

__all__ = [
    "Answer",
    "Barrier",
    "Decision",
    "Half",
    "Home",
    "InMemoryBarrier",
    "InMemoryHome",
    "Prepared",
    "PreparedMessages",
    "Record",
    "Round",
    "State",
    "Taken",
]
