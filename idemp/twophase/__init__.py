"""Two databases in one handling: both commit, or none does. Slow: send a message to the other database's consumer if you can."""

from idemp.twophase.databases import TwoPhase, recover

__all__ = ["TwoPhase", "recover"]
