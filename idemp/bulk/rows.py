"""Rows of a chunk: what a source holds of each message, and the work that follows from it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from idemp.broker.port import Delivery
from idemp.columns import MAX_POSITION_BYTES, message_of
from idemp.errors import MessageError, NotOptedIn, UndecodableMessage
from idemp.fingerprint import Fingerprint
from idemp.work import Opened, opened, work_of

if TYPE_CHECKING:
    from datetime import datetime

    import pyarrow as pa

    from idemp.messages import Message
    from idemp.work import Consumer, Work

_SURROGATES: Final = re.compile("[\ud800-\udfff]")
COLUMNS: Final = ("id", "type", "body", "headers", "time", "position")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One message, as a source holds it.

    Attributes:
        id: the message id of the envelope.
        type: message type name.
        body: the payload, as it was on the wire.
        headers: application headers, as the text of a JSON object; other properties of the message, where it has them, stand
            among them (`idemp.columns`).
        time: when the producer made the message; UTC where it has no time zone.
        position: where it stands in its source ("topic/3#1201", "s3://bucket/a.json#17"): the same whenever that is read.

    Example:
        >>> Row(id="m-1", type="stock.Reserve", headers='{"tenant": 7}').message().headers
        {'tenant': 7}
    """

    id: str | None = None
    type: str | None = None
    body: bytes | None = None
    headers: str | None = None
    time: datetime | None = None
    position: str | None = None

    def message(self) -> Message:
        """The message, as a broker would have delivered it.

        Raises:
            UndecodableMessage: the headers are no JSON object.
        """
        return message_of(self.id, self.type, self.body, self.headers, self.time)


def rows_of(chunk: pa.Table | Sequence[Row]) -> Sequence[Row]:
    """A chunk's rows, one by one.

    Raises:
        ConfigurationError: a table has other columns than those of a `Row`.
    """
    if isinstance(chunk, Sequence):
        return chunk
    from idemp.bulk.arrow import rows_in  # pyarrow is an extra

    return rows_in(chunk)


def work_from(consumer: Consumer, row: Row, *, adopt: bool) -> Work:
    """A row's work, as of a delivery: which handler, which body, which id, what to claim.

    Raises:
        MessageError: it can't be handled, ever.
        Exception: the app's own function for a key raised it.
    """
    message = row.message()
    if row.body is None:
        work = _without_body(consumer, message, adopt=adopt)
    else:
        delivery = Delivery(message=message, queue="")
        first = opened(consumer, delivery)
        _check_opted_in(first.registration.policy.idempotent, first.registration.message_type)
        work = work_of(consumer, delivery, first)
    if row.position is None:
        return work
    position = kept_position(row.position)
    return replace(work, claims=tuple(replace(claim, position=position) for claim in work.claims))


def kept_position(position: str) -> str:
    """A source position as the inbox keeps it: a digest stands for what is too long, or no text that a database takes.

    Example:
        >>> kept_position("topic/3#1201"), kept_position("x" * 300)[:19]
        ('topic/3#1201', 'sha256:0d4e2ca9e9cb')
    """
    told = position.encode("utf-8", "surrogatepass")
    if len(told) <= MAX_POSITION_BYTES and "\x00" not in position and not _SURROGATES.search(position):
        return position
    return f"sha256:{hashlib.sha256(told).hexdigest()}"


def _without_body(consumer: Consumer, message: Message, *, adopt: bool) -> Work:
    """Of a row without its body nothing can be handled; that it was handled may be said, where the id is beside it."""
    if not adopt:
        raise UndecodableMessage("The row has no body.", fix="Read the source's column with the body, too.")
    if consumer.unwrap is not None:
        message = consumer.unwrap(message)
    registration = consumer.find(message)
    _check_opted_in(registration.policy.idempotent, registration.message_type)
    if "body" in {
        registration.policy.key.scope,
        *(each.key.scope for each in registration.policy.previous if each.key),
    }:
        raise MessageError(
            f"The row has no body, and ids of type {registration.message_type!r} are read from it.",
            fix="Read the source's column with the body, too.",
        )
    unknown = registration.policy.model_copy(update={"fingerprint": Fingerprint("off"), "dated_by": None})
    nothing = Opened(message, replace(registration, policy=unknown), payload=None, canonical=b"", body=None, order=None)
    return work_of(consumer, Delivery(message=message, queue=""), nothing)


def _check_opted_in(opted_in: bool, message_type: str) -> None:
    if not opted_in:
        raise NotOptedIn(
            f"Messages of type {message_type!r} are not opted in: nobody can tell which of them were handled.",
            fix="Opt the type in (policy=Idempotent(…)), or leave its messages out of the chunk.",
        )
