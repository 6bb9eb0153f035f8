"""What rows that were found under a claim's id say about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from idemp.fingerprint import fingerprints_conflict
from idemp.inbox.port import Claimed, StoredOutput, Verdict
from idemp.inbox.sql.due import EFFECTS_FROM
from idemp.messages import Output, is_erased

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sqlalchemy import Row

    from idemp.inbox.port import Claim


def verdict_of(claim: Claim, found: Sequence[Row[Any]]) -> Claimed:
    """A duplicate with its outputs, or a conflict; there is a row at least, and one for each output."""
    first = found[0]
    outputs = tuple(_outputs(found))
    original = first.original_id if first.original_id is not None else str(claim.id.key)
    since = first.claimed_at
    if original != claim.id.text:
        return Claimed(Verdict.CONFLICT, (), f"its digest belongs to {original!r}", collision=True, claimed_at=since)
    if first.message_type is not None and not claim.is_of(first.message_type):
        detail = f"it was handled as {first.message_type!r} at {since.isoformat()}"
        return Claimed(Verdict.CONFLICT, (), detail, collision=True, claimed_at=since)
    place = first.source_position
    stored = None if first.fingerprint is None else bytes(first.fingerprint)
    if fingerprints_conflict(stored, claim.fingerprint):
        return Claimed(
            Verdict.CONFLICT, outputs, f"first handled at {since.isoformat()}", claimed_at=since, position=place
        )
    return Claimed(Verdict.DUPLICATE, outputs, claimed_at=since, position=place)


def _outputs(found: Sequence[Row[Any]]) -> Iterator[StoredOutput]:
    for row in found:
        if row.output_id is not None and not (row.body == b"" and is_erased(row.envelope)):
            output = Output.restored(
                row.output_id, row.ordinal, row.kind, row.exchange, row.routing_key, row.envelope, row.body
            )
            due_at = row.due_at if row.due_at is not None and row.due_at < EFFECTS_FROM else None
            yield StoredOutput(output, pending=row.waiting is not None, due_at=due_at)
