"""Identities of whole columns: what `idemp.identity` says of each id, for 50,000 of them at once.

An id that is a UUID in its canonical text is taken apart in Arrow's own memory, without an object for it; all others are
digested one by one, exactly as there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from idemp.errors import MessageError
from idemp.identity import Key, effective_id
from idemp.messages import Message

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Octets = NDArray[np.uint8]

_MESSAGE_ID: Final = Key.message_id()
_CHARACTERS: Final = 36
_HYPHENS: Final = np.array([8, 13, 18, 23])
_DIGITS: Final = np.array([place for place in range(_CHARACTERS) if place not in {8, 13, 18, 23}])
_HYPHEN: Final = ord("-")
_NONE: Final = 255
_VALUES: Final = np.full(256, _NONE, dtype=np.uint8)
_VALUES[np.frombuffer(b"0123456789abcdef", dtype=np.uint8)] = np.arange(16)
_OWN_DIGEST: Final = 8
_TIME_ORDERED: Final = 7


class Keys:
    """The keys of a column of message ids.

    Args:
        ids: of the envelope, as text.
        message_type: of all of them, for errors.

    Attributes:
        octets: sixteen bytes for each; zeros where an id has an error.
        plain: whether the id is its key's own text.
        errors: what is wrong with an id, by its place.

    Example:
        >>> keys = Keys(pa.array(["0192c8a4-7d3e-7000-8000-000000000001", "order-17", None]))
        >>> keys.octets[0].tobytes().hex(), keys.plain.tolist(), list(keys.errors)
        ('0192c8a47d3e70008000000000000001', [True, False, False], [2])
    """

    def __init__(self, ids: pa.StringArray, message_type: str = "") -> None:
        self._message_type = message_type
        self.octets: Octets = np.zeros((len(ids), 16), dtype=np.uint8)
        self.plain: NDArray[np.bool_] = np.zeros(len(ids), dtype=np.bool_)
        self.errors: dict[int, Exception] = {}
        self._take_apart(ids)
        others = np.flatnonzero(~self.plain)
        for place, text in zip(others.tolist(), taken(ids, others).to_pylist(), strict=True):
            self._digest(place, text)

    def _take_apart(self, ids: pa.StringArray) -> None:
        """Those that are UUIDs in their canonical text, but for the version that our own digests have."""
        offsets = np.frombuffer(_buffer(ids, 1), dtype=np.int32)[ids.offset : ids.offset + len(ids) + 1]
        fitting = np.flatnonzero((np.diff(offsets) == _CHARACTERS) & _is_there(ids))
        if not len(fitting):
            return
        memory = np.frombuffer(_buffer(ids, 2), dtype=np.uint8)
        texts = memory[offsets[fitting][:, None] + np.arange(_CHARACTERS)]
        digits = _VALUES[texts[:, _DIGITS]]
        octets = (digits[:, 0::2] << 4) | (digits[:, 1::2] & 15)
        canonical = (texts[:, _HYPHENS] == _HYPHEN).all(axis=1) & (digits != _NONE).all(axis=1)
        plain = canonical & (versions(octets) != _OWN_DIGEST)
        self.octets[fitting[plain]] = octets[plain]
        self.plain[fitting[plain]] = True

    def _digest(self, place: int, text: str | None) -> None:
        try:
            if text is not None:
                effective = effective_id("envelope", text)
            else:  # it says what is wrong
                effective = _MESSAGE_ID.effective(Message(body=b"", message_id=text), None, self._message_type)
        except MessageError as error:
            self.errors[place] = error
        else:
            self.octets[place] = np.frombuffer(effective.key.bytes, dtype=np.uint8)


def versions(octets: Octets) -> NDArray[np.uint8]:
    """The versions of UUIDs; 0 for those that are not laid out as RFC 9562 says.

    Example:
        >>> versions(np.frombuffer(bytes.fromhex("0192c8a47d3e70008000000000000001"), dtype=np.uint8)[None, :]).tolist()
        [7]
    """
    found: NDArray[np.uint8] = np.where(octets[:, 8] >> 6 == 2, octets[:, 6] >> 4, 0).astype(np.uint8)  # noqa: PLR2004
    return found


def milliseconds(octets: Octets) -> NDArray[np.int64]:
    """The times in keys that carry one, in milliseconds since 1970; -1 for those that carry none."""
    padded = np.zeros((len(octets), 8), dtype=np.uint8)
    padded[:, 2:] = octets[:, :6]
    times = padded.view(">i8").astype(np.int64).ravel()
    return np.where((versions(octets) == _TIME_ORDERED) & (times < _END_OF_TIME), times, -1)


def in_order(octets: Octets) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The places of keys in the order in which all units claim, and whether each, so ordered, is the first of its key."""
    halves = np.ascontiguousarray(octets).view(">u8").astype(np.uint64)
    order = np.lexsort((halves[:, 1], halves[:, 0]))
    ordered = halves[order]
    first = np.ones(len(order), dtype=np.bool_)
    first[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    return order, first


_END_OF_TIME: Final = 253_402_300_800_000  # Python's calendar ends with the year 9999


def taken(array: Any, places: NDArray[Any]) -> Any:
    """Some of an array's values."""
    return array.take(pa.array(places, pa.int64()))


def as_mask(array: Any) -> NDArray[np.bool_]:
    """An array of booleans, none of them missing."""
    return np.asarray(array.to_numpy(zero_copy_only=False), dtype=np.bool_)


def _is_there(array: Any) -> NDArray[np.bool_]:
    return as_mask(array.is_valid())


def _buffer(array: pa.StringArray, number: int) -> Any:
    buffer = array.buffers()[number]
    return b"" if buffer is None else buffer
