"""A prepared message in the hands of its producer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from idemp.prepared.port import Decision

if TYPE_CHECKING:
    from uuid import UUID

    from idemp.prepared.port import Prepared
    from idemp.prepared.producing import PreparedMessages


class Half:
    """A prepared message whose fate its producer is about to decide.

    Attributes:
        prepared: the message.
        decided: whether the producer has decided.
    """

    def __init__(self, messages: PreparedMessages, prepared: Prepared) -> None:
        self.prepared = prepared
        self.decided = False
        self._messages = messages

    @property
    def id(self) -> UUID:
        """The id of the final message."""
        return self.prepared.id

    def pass_barrier(self, work: Any) -> None:
        """Write the barrier's row in the transaction of the local work, as its first statement best.

        Args:
            work: its session or connection.

        Raises:
            RolledBack: the checker was first; end the transaction, it must not commit.
            AlreadyPassed: the work of this key was committed before; end the transaction, and commit the message.
        """
        self._messages.needed_barrier().pass_(work, self.id)

    def commit(self) -> bool:
        """The local work is committed: publish the message. Errors and result as of `PreparedMessages.decide`."""
        confirmed = self._messages.decide(self.prepared, Decision.COMMIT)
        self.decided = True
        return confirmed

    def rollback(self) -> None:
        """The local work is not committed and never will be. Errors as of `PreparedMessages.decide`."""
        self._messages.decide(self.prepared, Decision.ROLLBACK)
        self.decided = True
