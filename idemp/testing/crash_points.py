"""Where a process can die while it handles a message: the points at which the test kit kills.

Each point is before or after a call of a port. `in_process` a `Crash` is raised there, which nothing may swallow; `for_real`
the process gets a SIGKILL (see `idemp.testing.killing`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


class Crash(BaseException):
    """The process dies here: nothing catches it, and nothing of this process happens after it.

    Example:
        >>> issubclass(Crash, Exception)
        False
    """


@dataclass(frozen=True, slots=True)
class CrashPoint:
    """A point in the life of a delivery.

    Attributes:
        name: "before" or "after", and a call of a port.
        committed: whether the handling is committed when the process dies there.
        meaning: what was done by then, and what has to happen next.

    Example:
        >>> CrashPoint("after commit", True, "…").call
        'commit'
    """

    name: str
    committed: bool
    meaning: str

    @property
    def when(self) -> str:
        """Either "before" or "after"."""
        return self.name.partition(" ")[0]

    @property
    def call(self) -> str:
        """The port's call."""
        return self.name.partition(" ")[2]


_NOTHING: Final = "nothing happened: the message is delivered again and handled"
_ROLLED_BACK: Final = "the database rolls back: the message is delivered again and handled"
_STORED: Final = "the outputs are stored: the redelivery is a duplicate and sends them, or the relay does"
_SENT: Final = "all is done but the ack: the redelivery is a duplicate, and what it sends has the same ids"

CRASH_POINTS: Final = (
    CrashPoint("before begin", committed=False, meaning=_NOTHING),
    CrashPoint("after begin", committed=False, meaning=_ROLLED_BACK),
    CrashPoint("before claim", committed=False, meaning=_ROLLED_BACK),
    CrashPoint("after claim", committed=False, meaning=_ROLLED_BACK),
    CrashPoint("after handler", committed=False, meaning=_ROLLED_BACK),
    CrashPoint("before store", committed=False, meaning=_ROLLED_BACK),
    CrashPoint("after store", committed=False, meaning=_ROLLED_BACK),
    CrashPoint("before claim and store", committed=False, meaning=_ROLLED_BACK),
    CrashPoint("after claim and store", committed=False, meaning=_ROLLED_BACK),
    CrashPoint("before commit", committed=False, meaning=_ROLLED_BACK),
    CrashPoint("after commit", committed=True, meaning=_STORED),
    CrashPoint("before publish", committed=True, meaning=_STORED),
    CrashPoint("after publish", committed=True, meaning=_SENT),
    CrashPoint("before settle", committed=True, meaning=_SENT),
    CrashPoint(
        "after settle", committed=True, meaning="the delivery has ended; marks that were not recorded cost a redispatch"
    ),
    CrashPoint("before record", committed=True, meaning="confirmed outputs may be sent once more, under the same ids"),
    CrashPoint("after record", committed=True, meaning="nothing is left to do"),
)
"""All of them. "claim and store" is what a late claim calls instead of "claim" and "store"."""
