"""The protocol.

    group ─ accept ─ execute: BEGIN, claim, handler, store outputs, COMMIT ─ read back ─ dispatch: publish, confirms
          ─ settle: rows, ack

The worker accepts deliveries, by the executor, and groups them. The confirms of one group may be on their way while the next one
executes. Of types that are opted in:

A crash before COMMIT leaves nothing, and the broker delivers again.
A crash after COMMIT leaves pending outputs: the relay sends them, or a redelivery, which is a duplicate.
A crash of the database after a lazy COMMIT may lose it: the claims are read back before anything is sent or acked.
A crash after the confirms leaves a delivery that was not acked: its redelivery is a duplicate with nothing to send.
A failure becomes a row before the ack: a crash between them brings the delivery again, whose failure joins the row by its digest.
A redelivery becomes a row, too, which counts the deaths of its processes: after the second one it runs alone.
A message that has ended its process too often, each time alone, becomes a dead letter: it is poison.
Nothing is acked before a commit of its id, or of its retry or dead letter.

A type that is not opted in has no claim: its handler runs again after a crash at any line.
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
        """Run a group of accepted deliveries and send its outputs; settle it, unless more deliveries follow at once.

        Then its confirms and acks wait for the next call.

        Returns:
            Deliveries that are to be accepted anew and to open the next group, because the database takes no work.
        """
        # A crash in a batch rolls it back; those before it are committed, and their redeliveries are duplicates.
        transactions = batches(group)
        self.executor.lazy = len(transactions) > 1  # together they wait for the disk once
        away = self.executor.execute(transactions)
        # A crash of the database before this loses lazy commits, of which nothing was sent or acked.
        away = self.executor.read_back(group) or away
        held = [handling for handling in group if handling.held] if away else []
        before = self.complete()  # first, because a publisher has one list of outputs on its way
        # A crash from here on leaves pending outputs, which the relay sends when the head start of this worker is over.
        self.sent = self.dispatcher.send([handling for handling in group if not handling.held] if away else group)
        return [*before, *held] if more else [*before, *self.complete(), *held]

    def complete(self) -> list[Handling]:
        """Wait for the confirms of the group that was sent, and settle it; return the deliveries that could not be settled."""
        sent, self.sent = self.sent, None
        if sent is None:
            return []
        self.dispatcher.confirm(sent)
        # A crash between the confirms and their record lets the same outputs be sent again, under the same ids.
        self.dispatcher.record(sent)
        # A crash before the rows are committed leaves a failed run uncounted, and one between them and the ack a row that copies join.
        return self.settler.settle(sent.handlings)

    def set_aside(self, redelivered: Sequence[Delivery]) -> list[Delivery]:
        """Move deliveries that may have ended their process into rows, undecoded; return those that could not be moved."""
        return self.settler.set_aside(redelivered)
