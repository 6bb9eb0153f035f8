"""Claims and outputs back from an archive, as they were: handled, and with nothing pending."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import bindparam, insert, select
from sqlalchemy.exc import IntegrityError

from idemp.errors import TransientStoreError
from idemp.inbox.sql.claiming import only
from idemp.inbox.sql.short import Short

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from sqlalchemy import Connection

    from idemp.inbox.sql.claiming import ClaimDialect
    from idemp.inbox.sql.store import SqlStore

_ATTEMPTS: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchivedClaim:
    """A claim as an archive has it, with its outputs.

    Attributes:
        consumer: whose.
        key: the effective id's.
        original_id: what a person calls the id.
        message_type: canonical type name.
        worker: who handled it, where that is known.
        claimed_at: when.
        fingerprint: of the payload.
        source_position: where the message stood in its source.
        outputs: rows of the table of outputs, without the columns of the key.
    """

    consumer: str
    key: UUID
    original_id: str
    message_type: str
    worker: str | None
    claimed_at: datetime
    fingerprint: bytes | None
    source_position: str | None
    outputs: Sequence[Mapping[str, Any]] = ()


class Restoring:
    """Puts claims back where they are missing.

    Example:
        >>> from idemp.inbox.sql import SqlStore, create_engine_safely
        >>> Restoring(SqlStore(create_engine_safely("sqlite://"))).put_back([])
        0
    """

    def __init__(self, store: SqlStore) -> None:
        self._store = store
        self._short = Short(store.engine)

    def put_back(self, claims: Sequence[ArchivedClaim]) -> int:
        """In one transaction, those whose ids nobody has; how many it were. Some hundreds at once.

        A claim that is there stays as it is, with its outputs, whoever made it.

        Raises:
            TransientStoreError: the same ids are being claimed, time and again.
            StoreUnavailable: the database can't be reached.
        """
        if not claims:
            return 0
        store = self._store
        store.places.look()
        rows = {claim.key: self._row(claim) for claim in claims}
        outputs = {claim.key: claim.outputs for claim in claims}
        placed = store.places.by_place(list(rows.values()))

        def work(connection: Connection) -> int:
            return sum(self._put_back(connection, place, own, outputs) for place, own in placed)

        for _ in range(_ATTEMPTS):
            try:
                return self._short.run(work)
            except IntegrityError:  # somebody claims one of them right now
                continue
        raise TransientStoreError("The same ids are being claimed by others.", fix="Try again later.")

    def _row(self, claim: ArchivedClaim) -> dict[str, Any]:
        names = self._store.names
        return {
            "message_key": claim.key,
            "consumer_id": names.id("consumer", claim.consumer),
            "type_id": names.id("message_type", claim.message_type),
            "worker_id": names.id("worker", claim.worker) if claim.worker is not None else None,
            "claimed_at": claim.claimed_at,
            "fingerprint": claim.fingerprint,
            "original_id": None if claim.original_id == str(claim.key) else claim.original_id,
            "source_position": claim.source_position,
        }

    @staticmethod
    def _put_back(
        connection: Connection,
        place: ClaimDialect,
        rows: Sequence[Mapping[str, Any]],
        outputs: Mapping[UUID, Sequence[Mapping[str, Any]]],
    ) -> int:
        inbox, output = place.tables.inbox, place.tables.output
        there = only(select(inbox.c.message_key), inbox).where(
            inbox.c.consumer_id == rows[0]["consumer_id"],
            inbox.c.message_key.in_(bindparam("keys", expanding=True)),
        )
        known = set(connection.scalars(there, {"keys": [row["message_key"] for row in rows]}))
        missing = [row for row in rows if row["message_key"] not in known]
        if missing:
            connection.execute(insert(inbox), missing)
        produced = [
            {"consumer_id": row["consumer_id"], "message_key": row["message_key"], **each}
            for row in missing
            for each in outputs[row["message_key"]]
        ]
        if produced:
            connection.execute(insert(output), produced)
        return len(missing)
