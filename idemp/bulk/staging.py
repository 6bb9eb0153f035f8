"""Rows of one type as columns: what the inbox has to know of each, and the bytes in which a server takes them.

Nothing is decided here that `idemp.work` would decide otherwise: rows that are more than an id and a body (they have
headers, or their ids are read from elsewhere) are decoded by it, one by one; of the others it is known what it would say.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from idemp.bulk.arrow import in_one_piece
from idemp.bulk.keys import Keys, as_mask, milliseconds, taken
from idemp.bulk.rows import COLUMNS, Row, kept_position, work_from
from idemp.columns import MAX_POSITION_BYTES
from idemp.emitting import carried_headers
from idemp.errors import OversizedMessage, UndecodableMessage
from idemp.messages import FORCED_HEADER, parse_body

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from idemp.work import Consumer, Registration

_OF_CLAIMS: Final = ("fingerprint", "original_id", "source_position")
_OF_ENVELOPES: Final = ("id", "body", "headers", "time")
_SIGNATURE: Final = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_TRAILER: Final = b"\xff\xff"
_SINCE_2000: Final = 946_684_800_000_000  # microseconds
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)
_NO_VALUE: Final = -1  # the length of a NULL


@dataclass(frozen=True)
class Staged:
    """Rows of one type, decoded; a few arrays, however many rows.

    Attributes:
        places: in the chunk.
        octets: their keys, sixteen bytes each.
        moments: when each was made, milliseconds since 1970; -1 where it is not known, or its age is no matter.
        columns: what the stage has beside place and key, in its order.
    """

    places: NDArray[np.int64]
    octets: NDArray[np.uint8]
    moments: NDArray[np.int64]
    columns: pa.Table

    def __len__(self) -> int:
        return len(self.places)

    def take(self, wanted: NDArray[Any]) -> Staged:
        """Some of them, in this order."""
        columns = taken(self.columns, wanted)
        return Staged(self.places[wanted], self.octets[wanted], self.moments[wanted], columns)

    def claimed_only(self) -> Staged:
        """Without what only handlers need."""
        return Staged(self.places, self.octets, self.moments, self.columns.select(list(_OF_CLAIMS)))

    @property
    def copied(self) -> list[str]:
        """The columns of `payload`: those that have a value."""
        return ["place", "message_key", *(name for name in self.columns.column_names if not self._is_empty(name))]

    @cached_property
    def payload(self) -> bytes:
        """All of them as the bytes of a binary COPY."""
        columns = [self.columns.column(name) for name in self.copied[2:]]
        return binary_copy([pa.array(self.places, pa.int32()), _of_one_width(self.octets), *columns])

    def shown(self) -> pa.Table:
        """What a function of new rows gets to see of them, in the order of the chunk."""
        ordered = self.take(np.argsort(self.places))
        columns: dict[str, Any] = {name: ordered.columns.column(name) for name in _OF_ENVELOPES}
        return pa.table({"place": pa.array(ordered.places, pa.int64()), **columns})

    def _is_empty(self, name: str) -> bool:
        return bool(self.columns.column(name).null_count == len(self))


def staged(
    consumer: Consumer, registration: Registration, columns: Mapping[str, Any], places: NDArray[Any], *, adopt: bool
) -> tuple[Staged, dict[int, Exception]]:
    """Decode rows of one type.

    Args:
        consumer: whose they are.
        registration: of their type.
        columns: of the whole chunk, as `as_columns` makes them.
        places: of these rows in it.
        adopt: whether rows without a body will do.

    Returns:
        Those that can be handled; and of the others, by their places, why they can't.
    """
    decoder = _Decoder(consumer, registration, {name: taken(each, places) for name, each in columns.items()}, adopt)
    plain = decoder.plain_lane()
    decoder.read_plain(np.flatnonzero(plain))
    for row in np.flatnonzero(~plain).tolist():
        decoder.read_other(row)
    whole = Staged(np.asarray(places, dtype=np.int64), decoder.octets, decoder.moments(), decoder.table())
    if not decoder.errors:
        return whole, {}
    good = np.array([row for row in range(len(places)) if row not in decoder.errors], dtype=np.int64)
    return whole.take(good), {int(places[row]): error for row, error in decoder.errors.items()}


class _Decoder:
    """Decodes rows of one type.

    Attributes:
        octets: the keys.
        errors: what is wrong with a row.
    """

    def __init__(self, consumer: Consumer, registration: Registration, columns: dict[str, Any], adopt: bool) -> None:
        self._consumer = consumer
        self._registration = registration
        self._columns = columns
        self._adopt = adopt
        self._count = len(columns["id"])
        self.octets: NDArray[np.uint8] = np.zeros((self._count, 16), dtype=np.uint8)
        self.errors: dict[int, Exception] = {}
        self._prints: list[bytes | None] = [None] * self._count
        self._original = pa.nulls(self._count, pa.string())
        self._made: dict[int, int] = {}  # in milliseconds since 1970
        self._said_otherwise: dict[str, dict[int, Any]] = {
            name: {} for name in ("original_id", "carried", *_OF_ENVELOPES)
        }

    def plain_lane(self) -> NDArray[np.bool_]:
        """Which rows are an id and a body and nothing else, so that all that decoding them does is known."""
        policy = self._registration.policy
        if policy.key.name != "message_id" or any((policy.ordered_by, policy.entity, policy.dated_by)):
            return np.zeros(self._count, dtype=np.bool_)
        return as_mask(self._columns["headers"].is_null())

    def read_plain(self, rows: NDArray[Any]) -> None:
        """Keys at once, and fingerprints one by one; the latter say as well whether a body can be read."""
        keys = Keys(taken(self._columns["id"], rows), self._registration.message_type)
        self.octets[rows] = keys.octets
        is_plain = np.ones(self._count, dtype=np.bool_)
        is_plain[rows] = keys.plain
        self._original = pc.if_else(pa.array(is_plain), pa.scalar(None, pa.string()), self._columns["id"])
        self.errors |= {int(rows[number]): error for number, error in keys.errors.items()}
        bodies = taken(self._columns["body"], rows)
        if self._adopt and bodies.null_count == len(bodies):
            return
        for row, body in zip(rows.tolist(), bodies.to_pylist(), strict=True):
            try:
                if row not in self.errors:
                    self._prints[row] = self._print_of(body)
            except MemoryError:
                raise
            except Exception as error:  # noqa: BLE001 - a message class may have code of its own
                self.errors[row] = error

    def read_other(self, row: int) -> None:
        """As a delivery is read."""
        given = Row(**{name: self._columns[name][row].as_py() for name in COLUMNS})
        try:
            work = work_from(self._consumer, given, adopt=self._adopt)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - the app's own functions for keys may raise anything
            self.errors[row] = error
            return
        claim, message = work.claims[0], work.message
        self.octets[row] = np.frombuffer(claim.id.key.bytes, dtype=np.uint8)
        self._prints[row] = claim.fingerprint
        forced = message.headers.get(FORCED_HEADER)
        self._made[row] = -1 if work.made_at is None or forced else max(0, (work.made_at - _EPOCH) // _MILLISECOND)
        carried = json.dumps(carried_headers(message.message_id or claim.id.text, message))
        said: dict[str, Any] = {
            "original_id": None if claim.id.text == str(claim.id.key) else claim.id.text,
            "carried": carried,
        }
        if message != given.message():  # its headers, or its body, are an envelope
            said |= {
                "id": message.message_id,
                "body": message.body,
                "headers": json.dumps(dict(message.headers)),
                "time": message.timestamp,
            }
        for name, value in said.items():
            self._said_otherwise[name][row] = value

    def moments(self) -> NDArray[np.int64]:
        """When each was made, as `made_at` says: by its id, which is its key, else by its time."""
        of_keys = milliseconds(self.octets)
        micro: Any = self._column("time").cast(pa.int64()).fill_null(-1000).to_numpy(zero_copy_only=False)
        found: NDArray[np.int64] = np.where(of_keys >= 0, of_keys, micro // 1000)
        found[list(self._made)] = list(self._made.values())
        return found

    def table(self) -> pa.Table:
        """What the stage has beside place and key."""
        return pa.table({
            "fingerprint": pa.array(self._prints, pa.binary()),
            "original_id": self._column("original_id"),
            "source_position": _kept_positions(self._columns["position"]),
            **{name: self._column(name) for name in _OF_ENVELOPES},
            "carried": self._column("carried"),
        })  # fmt: skip

    def _print_of(self, body: bytes | None) -> bytes | None:
        if body is None:
            if self._adopt:
                return None
            raise UndecodableMessage("The row has no body.", fix="Read the source's column with the body, too.")
        if len(body) > self._consumer.max_body_bytes:
            raise OversizedMessage(
                f"The body has {len(body)} bytes; {self._consumer.max_body_bytes} is the limit.",
                fix="Raise max_body_bytes, or have the producer send a reference.",
            )
        payload, canonical = parse_body(body)
        self._registration.codec.decode(payload, canonical)
        return self._registration.policy.fingerprint.of(payload, canonical)

    def _column(self, name: str) -> Any:
        """A column, with what single rows say otherwise."""
        column = (
            self._original if name == "original_id" else self._columns.get(name, pa.nulls(self._count, pa.string()))
        )
        if not (said := self._said_otherwise[name]):
            return column
        values = column.to_pylist()
        for row, value in said.items():
            values[row] = value
        return pa.array(values, column.type)


def _kept_positions(column: Any) -> Any:
    """As `kept_position` says; nearly all of them are kept as they are."""
    too_long: Any = pc.greater(pc.binary_length(column), pa.scalar(MAX_POSITION_BYTES))
    unsayable: Any = pc.match_substring(column, "\x00")
    if not pc.any(pc.or_(too_long, unsayable)).as_py():
        return column
    return pa.array([None if each is None else kept_position(each) for each in column.to_pylist()], pa.string())


def binary_copy(columns: Sequence[Any]) -> bytes:
    """Columns of texts, bytes, whole numbers (of 32 bits) or times, as what PostgreSQL takes for a binary COPY."""
    pieces: list[Any] = [pa.scalar(len(columns).to_bytes(2, "big"), pa.large_binary())]
    for column in columns:
        octets = _as_octets(in_one_piece(column)).cast(pa.large_binary())
        lengths: Any = pc.fill_null(pc.binary_length(octets), _NO_VALUE).to_numpy(zero_copy_only=False)
        pieces += [_in_network_order(lengths, ">i4"), pc.fill_null(octets, pa.scalar(b"", pa.large_binary()))]
    joined: Any = pc.binary_join_element_wise(*pieces, pa.scalar(b"", pa.large_binary()))
    return _SIGNATURE + _octets_of(joined) + _TRAILER


def _as_octets(column: Any) -> Any:
    """A column's values as the server takes them."""
    if pa.types.is_timestamp(column.type):
        since_2000 = column.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False) - _SINCE_2000
        octets = _in_network_order(since_2000, ">i8")
    elif pa.types.is_integer(column.type):
        octets = _in_network_order(column.fill_null(0).to_numpy(zero_copy_only=False), ">i4")
    else:
        return column.cast(pa.binary())
    return pc.if_else(column.is_valid(), octets, pa.scalar(None, pa.large_binary()))


def _in_network_order(numbers: NDArray[Any], kind: str) -> Any:
    octets = numbers.astype(kind).view(np.uint8).reshape(len(numbers), np.dtype(kind).itemsize)
    return _of_one_width(octets).cast(pa.binary()).cast(pa.large_binary())


def _of_one_width(rows: NDArray[np.uint8]) -> Any:
    """An array of bytes whose values are the rows of a matrix."""
    count, width = rows.shape
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(width), count, [None, pa.py_buffer(rows.tobytes())])


def _octets_of(array: Any) -> bytes:
    """All values of a binary array, one after the other."""
    whole = in_one_piece(array)
    buffer = whole.buffers()[2]
    if buffer is None:
        return b""
    offsets = np.frombuffer(whole.buffers()[1], dtype=np.int64)[whole.offset : whole.offset + len(whole) + 1]
    return memoryview(buffer)[int(offsets[0]) : int(offsets[-1])].tobytes() if len(whole) else b""
