"""Rows of a chunk, and the answers to them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from idemp.context import FINGERPRINT
from idemp.messages import Delivery

if TYPE_CHECKING:
    from pyarrow import Table

PROPERTIES: Final = {
    "id": "message_id", "type": "type", "time": "timestamp", "content_type": "content_type", "correlation_id": "correlation_id",
    "reply_to": "reply_to",
}  # fmt: skip
"""Properties of a delivery, by the column that has them."""
BARE: Final = {FINGERPRINT: "none"}

__all__ = ["Answer", "Parked", "Report", "Row", "deliveries"]


@dataclass(frozen=True, slots=True)
class Row:
    """A stored message, such as a line of an archive.

    Attributes:
        body: JSON text in UTF-8; None if the body is lost; such a message can only be adopted.
        id: Id of the envelope.
        type: Message type; None means the default type of the app.
        time: When the message was made, in seconds since 1970.
        headers: Headers, as its producer set them.
        content_type: Media type of the body, such as `application/cloudevents+json`; None means JSON.
        correlation_id: Correlation id, which its outputs take over.
        reply_to: Queue for its replies.

    Example:
        >>> Row(b'{"order_id": 7}', type="shop.PlaceOrder").id is None
        True
    """

    body: bytes | None
    id: str | None = None
    type: str | None = None
    time: float | None = None
    headers: Mapping[str, Any] | None = None
    content_type: str | None = None
    correlation_id: str | None = None
    reply_to: str | None = None


class Answer(Enum):
    """Result for a row. Each row has exactly one.

    Example:
        >>> [answer.value for answer in Answer]
        ['new', 'replay', 'duplicate', 'conflict', 'parked']
    """

    NEW = "new"
    """It was handled in this chunk."""
    REPLAY = "replay"
    """It was handled in an earlier chunk of the same run, so this chunk runs again."""
    DUPLICATE = "duplicate"
    """Its id was handled by another run or a worker, or by an earlier row of this chunk."""
    CONFLICT = "conflict"
    """Another message was handled under its id; nothing was done."""
    PARKED = "parked"
    """It failed, and nothing of it is committed."""


@dataclass(frozen=True, slots=True)
class Parked:
    """A row that was not handled. The caller has to keep it.

    Attributes:
        place: Number of the row in the chunk, from 0.
        answer: `PARKED` or `CONFLICT`.
        rule: Name of the rule that decided, as in dead letters.
        error: Class and text of the error.

    Example:
        >>> Parked(0, Answer.PARKED, "unreadable", "Unreadable: the body is not JSON").place
        0
    """

    place: int
    answer: Answer
    rule: str
    error: str


@dataclass(slots=True)
class Report:
    """Answers to the rows of a chunk.

    Attributes:
        counts: Rows by answer; they add up to the rows of the chunk.
        outputs: Number of messages that new rows produced.
        parked: Rows that were not handled, conflicts among them.

    Example:
        >>> Report().counts[Answer.NEW]
        0
    """

    counts: Counter[Answer] = field(default_factory=Counter)
    outputs: int = 0
    parked: list[Parked] = field(default_factory=list)

    def add(self, other: Report) -> None:
        """Add the report about other rows of the chunk."""
        self.counts += other.counts
        self.parked += other.parked
        self.outputs += other.outputs

    def park(self, place: int, answer: Answer, rule: str, error: str) -> None:
        """Add a row that was not handled."""
        self.counts[answer] += 1
        self.parked.append(Parked(place, answer, rule, error))


def deliveries(queue: str, chunk: Sequence[Row] | Table, *, adopt: bool = False) -> Iterator[Delivery]:
    """Return the rows of a chunk as deliveries.

    Args:
        queue: Name of the consumer.
        chunk: Rows, or an Arrow table whose columns are named as those of a `Row`; headers are a map, or a JSON object as text.
        adopt: Whether rows without a body are accepted.

    Example:
        >>> next(deliveries("billing", [Row(b"{}", id="7", time=1.5)])).properties
        {'message_id': '7', 'timestamp': 1.5}
    """
    if isinstance(chunk, Sequence):
        names: Sequence[str] = tuple(PROPERTIES)
        read: list[Any] = [[getattr(row, name) for row in chunk] for name in (*names, "headers", "body")]
    else:
        filled = {name for name in chunk.column_names if chunk[name].null_count < chunk.num_rows}
        names, nothing = [name for name in PROPERTIES if name in filled], [None] * chunk.num_rows
        read = [chunk[name].to_pylist() if name in filled else nothing for name in (*names, "headers", "body")]
    known = [PROPERTIES[name] for name in names]
    for *values, headers, body in zip(*read, strict=True):
        properties = {name: value for name, value in zip(known, values, strict=True) if value is not None}
        if headers:
            properties["headers"] = _read_headers(headers)
        if body is None and adopt:
            given = properties.get("headers") or {}
            properties["headers"] = {**given, **BARE} if isinstance(given, Mapping) else given
        yield Delivery(queue, properties, body or (b"{}" if body is None and adopt else b""))


def _read_headers(headers: Any) -> Any:
    if isinstance(headers, Mapping):
        return dict(headers)
    if isinstance(headers, list) and all(isinstance(pair, tuple) for pair in headers):  # a map of Arrow
        return dict(headers)
    try:
        return json.loads(headers)
    except (TypeError, ValueError, RecursionError):
        return headers  # which `read_delivery` refuses
