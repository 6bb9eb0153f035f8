"""Two databases in one handling: both commit, or neither does. Slow: prefer a message to the other database's consumer."""

from idemp.twophase.databases import TwoPhase, recover

__all__ = ["TwoPhase", "recover"]
