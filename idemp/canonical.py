"""The bytes that ids are derived from: the same for equal values, and for no others.

They are versioned with the ids (`idemp.identity`): stored rows and ids on the wire depend on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, datetime
from decimal import Decimal
from functools import lru_cache
from uuid import UUID

from idemp.errors import InvalidId


def encode(values: Sequence[object]) -> bytes:
    """A typed, length-prefixed encoding: no two different sequences share one.

    Raises:
        InvalidId: a value that can't be part of an id.

    Example:
        >>> encode(("a", "bc")) == encode(("ab", "c"))
        False
    """
    parts: list[bytes] = []
    for value in values:
        tag, data = _encode_one(value)
        parts.append(tag + len(data).to_bytes(4, "big") + data)
    return b"".join(parts)


@lru_cache(maxsize=256)
def encoded_texts(*texts: str) -> bytes:
    """The beginning of what many ids are derived from: an encoding is that of its parts, one after the other."""
    return encode(texts)


def _encode_one(value: object) -> tuple[bytes, bytes]:
    match value:
        case bool():
            return b"b", b"\x01" if value else b"\x00"
        case str():
            return b"s", value.encode("utf-8")
        case int():
            return b"i", str(value).encode("ascii")
        case UUID():
            return b"u", value.bytes
        case datetime():
            return b"t", value.isoformat().encode("ascii")
        case date():
            return b"d", value.isoformat().encode("ascii")
        case Decimal():
            return b"n", plain_decimal(value).encode("ascii")
    raise InvalidId(f"A value of type {type(value).__name__} can't be (part of) an id.")


def plain_decimal(value: Decimal) -> str:
    """The same text for equal values, exactly: `normalize()` alone would round to the context's precision."""
    sign, digits, exponent = value.as_tuple()
    significant = "".join(map(str, digits)).lstrip("0")
    if not significant:
        return "0"
    stripped = significant.rstrip("0")
    exponent = int(exponent) + len(significant) - len(stripped)
    return f"{'-' if sign else ''}{stripped}{f'E{exponent:+d}' if exponent else ''}"
