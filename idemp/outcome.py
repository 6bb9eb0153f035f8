"""What became of a delivery."""

from __future__ import annotations

import enum


class Outcome(enum.Enum):
    """What became of one delivery.

    Example:
        >>> Outcome.REDISPATCHED.value
        'redispatched'
    """

    HANDLED = "handled"  #: the handler ran, its work is committed, its outputs are confirmed
    REDISPATCHED = "redispatched"  #: handled before: the handler was skipped, stored outputs were sent again
    SKIPPED = "skipped"  #: handled before, and nothing had to be sent again
    PENDING = "pending"  #: committed now or before, but some output has no confirm yet
    IN_FLIGHT = "in flight"  #: somebody else handles it right now
    RETRIED = "retried"  #: the handler failed; the message comes back after a delay
    PARKED = "parked"  #: in the dead-letter queue, with the reason

    @property
    def came_to_an_end(self) -> bool:
        """Whether the message is handled, now or before; otherwise its handler has not run to an end.

        Example:
            >>> Outcome.SKIPPED.came_to_an_end, Outcome.IN_FLIGHT.came_to_an_end
            (True, False)
        """
        return self not in {Outcome.IN_FLIGHT, Outcome.RETRIED, Outcome.PARKED}
