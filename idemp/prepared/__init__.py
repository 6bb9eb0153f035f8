"""Prepared messages: published if, and only if, work in another database commits."""

from idemp.prepared.barrier import SqlBarrier
from idemp.prepared.messages import BarrierMissed, PreparedMessages, RolledBack, Undecided
from idemp.prepared.ports import Answer, Checker, Home, Prepared

__all__ = ["Answer", "BarrierMissed", "Checker", "Home", "Prepared", "PreparedMessages", "RolledBack", "SqlBarrier", "Undecided"]
