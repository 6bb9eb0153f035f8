"""How far a consumer's claims have been deleted, noted in the very transaction that deletes them."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Final

from sqlalchemy import bindparam, select, update

if TYPE_CHECKING:
    from datetime import datetime

    from sqlalchemy import Connection

    from idemp.inbox.sql.tables import Tables

_NEXT: Final = timedelta(microseconds=1)


class Purged:
    """Notes deletions, one cleaner at a time, and tells of them.

    Example:
        >>> from idemp.inbox.sql.tables import Tables
        >>> purged = Purged(Tables())  # .note(connection, consumer_id, before)
    """

    def __init__(self, tables: Tables) -> None:
        consumer = tables.consumer
        self._read = select(consumer.c.purged_before).where(consumer.c.id == bindparam("consumer"))
        # Locked: at higher levels of isolation than READ COMMITTED the snapshot may be older than the claim.
        self._read_now = self._read.with_for_update(read=True)
        self._note = (
            update(consumer)
            .where(consumer.c.id == bindparam("consumer"))
            .values(purged_before=bindparam("before", type_=consumer.c.purged_before.type))
        )

    def read(self, connection: Connection, consumer_id: int) -> datetime | None:
        """The moment before which claims may be gone, `None` if none ever went."""
        found: datetime | None = connection.scalar(self._read, {"consumer": consumer_id})
        return found

    def read_after_claim(self, connection: Connection, consumer_id: int) -> datetime | None:
        """As `read`, and whatever was deleted before the claim of this transaction is in it."""
        found: datetime | None = connection.scalar(self._read_now, {"consumer": consumer_id})
        return found

    def note(self, connection: Connection, consumer_id: int, before: datetime, *, archived: bool = False) -> None:
        """Claims from before this moment have been deleted.

        Those that no archive has move the moment on in any case: nobody who knows an archive of before then goes by it.
        """
        noted = self.read(connection, consumer_id)
        if noted is not None and not archived:
            before = max(before, noted + _NEXT)
        if noted is None or noted < before:
            connection.execute(self._note, {"consumer": consumer_id, "before": before})
