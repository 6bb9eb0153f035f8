"""A durable spool for queues whose messages can be read once only: drained into a table, and read there by offset.

A message of a classic or quorum queue is gone once it is acked, and comes again in another order if it is not: nothing that
may run twice can read it. The spooler takes messages out of the queue, commits them to a table, and acks them then.
"""

from __future__ import annotations

from idemp.spool.spooler import Spooler, Tally
from idemp.spool.store import Level, SpoolStore

__all__ = ["Level", "SpoolStore", "Spooler", "Tally"]
