"""The protocol.

    group ─ accept ─ execute: BEGIN, claim, handler, store outputs, COMMIT ─ dispatch: publish, confirms ─ settle: rows, ack

The confirms of one group may be on their way while the next one executes.
A crash before COMMIT leaves nothing, and the broker delivers again.
A crash after COMMIT leaves pending outputs: a redelivery is a duplicate that sends them, and so does the relay.
A crash after the confirms leaves a delivery that was not acked: its redelivery is a duplicate with nothing to send.
A failure becomes a row before the ack: a crash between them brings the delivery again, which finds the row by its digest.
A redelivery becomes a row, too, which counts the deaths of its processes: after the second one it runs alone.
A message that has ended its process too often, each time alone, becomes a dead letter: it is poison.
Nothing is acked before a commit of its id, or of its retry or dead letter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from idemp.dispatcher import Dispatcher, Sent
from idemp.executor import Executor
from idemp.handling import Handling, batches
from idemp.messages import Delivery
from idemp.settler import Settler

__all__ = ["Protocol"]


@dataclass
class Protocol:
    """Runs groups of deliveries of one consumer, one group at a time.

    Attributes:
        executor: Accepts deliveries: finds their handlers, decodes and identifies them. Then claims them and runs the handlers, up to
            COMMIT.
        dispatcher: Sends outputs and records what the broker says of them.
        settler: Turns failures into rows, and acks.
        sent: The group whose outputs were sent, and which is not settled.

    Example:
        >>> from idemp.handlers import Handlers
        >>> protocol = Protocol(Executor(Handlers(), None), None, None)
        >>> protocol.executor.accept(Delivery("billing", {"type": "shop.Pay"}, b"{}")).error
        UnknownType("no handler takes messages of type 'shop.Pay'")
    """

    executor: Executor
    dispatcher: Dispatcher
    settler: Settler
    sent: Sent | None = field(default=None, init=False)

    def handle(self, group: Sequence[Handling], *, more: bool = False) -> list[Handling]:
        """Run a group of accepted deliveries up to its acks; if more follow at once, only settle the group before.

        Returns:
            Deliveries to open the next group with, because the database takes no work.
        """
        # A crash in a batch rolls it back; those before it are committed, and their redeliveries are duplicates.
        away = self.executor.execute(batches(group))
        held = [handling for handling in group if handling.held] if away else []
        before = self.complete()
        # A crash from here on leaves pending outputs: a redelivery sends them, or the relay when their head start is over.
        self.sent = self.dispatcher.send([handling for handling in group if not handling.held] if away else group)
        return [*before, *held] if more else [*before, *self.complete(), *held]

    def complete(self) -> list[Handling]:
        """Wait for the confirms of the group that was sent, and settle it; return the deliveries that could not be settled."""
        sent, self.sent = self.sent, None
        if sent is None:
            return []
        # A crash before the confirms are recorded lets the same outputs be sent again, under the same ids.
        self.dispatcher.record(self.dispatcher.confirm(sent))
        # A crash before the rows are committed leaves all as it was; one between them and the ack makes no second row.
        return self.settler.settle(sent.handlings)

    def set_aside(self, redelivered: Sequence[Delivery]) -> list[Delivery]:
        """Move deliveries that may have ended their process into rows, undecoded; return those that could not be moved."""
        return self.settler.set_aside(redelivered)
