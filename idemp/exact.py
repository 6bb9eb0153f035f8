"""JSON numbers with all of their digits: a float if a float holds the number, else a `Decimal`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, NoReturn

from idemp.canonical import plain_decimal

if TYPE_CHECKING:
    from collections.abc import Callable

_SAFE_CHARACTERS: Final = 16
"""A number of at most 15 digits, without an exponent, comes back from a float as it was written."""
_SHOWN_CHARACTERS: Final = 40
_CANONICAL_DECIMAL: Final = re.compile(rb"\dE[+-]\d")


class ExactEncoder:
    """A JSON encoder that writes a `Decimal` as a number.

    Args:
        number: returns the text of a finite `Decimal`.
        options: as of `json.JSONEncoder`; NaN and infinity are always refused.

    Example:
        >>> ExactEncoder(str).encode({"price": Decimal("1.10")})
        '{"price": 1.10}'
    """

    def __init__(self, number: Callable[[Decimal], str], **options: Any) -> None:
        self._number = number
        self._plain = json.JSONEncoder(default=_default, allow_nan=False, **options)

    def encode(self, value: Any) -> str:
        """Return the JSON text of a value.

        Raises:
            TypeError: JSON has no such value.
            ValueError: a number is not finite.
        """
        try:
            return self._plain.encode(value)
        except _DecimalFoundError:  # rare: the C encoder takes no Decimal
            return self._encoded(value)

    def _encoded(self, value: Any) -> str:
        plain = self._plain
        if isinstance(value, Decimal):
            if not value.is_finite():
                raise ValueError(f"{value} is no JSON number")
            return self._number(value)
        if isinstance(value, dict):
            items = sorted(value.items()) if plain.sort_keys else value.items()
            pairs = (f"{plain.encode({name: None})[1:-5]}{self._encoded(item)}" for name, item in items)
            return f"{{{plain.item_separator.join(pairs)}}}"
        if isinstance(value, list | tuple):
            return f"[{plain.item_separator.join(map(self._encoded, value))}]"
        return plain.encode(value)


class _DecimalFoundError(TypeError):
    """The value to encode contains a `Decimal`."""


def read_number(text: str) -> float | Decimal:
    """Return a JSON number with a fraction or an exponent: a float if that has the same decimal value, else a `Decimal`.

    Raises:
        ValueError: it is beyond the range of a float: an exponent may stand for any number of digits.

    Example:
        >>> read_number("1.10"), read_number("0.1234567890123456789")
        (1.1, Decimal('0.1234567890123456789'))
    """
    number = float(text)
    if len(text) <= _SAFE_CHARACTERS and "e" not in text and "E" not in text:
        return number
    written = repr(number)
    if written == text:
        return number
    if math.isinf(number):
        raise ValueError(f"the number {_shortened(text)} is too large for a float")
    if number == 0:
        if text.lower().partition("e")[0].strip("-0."):
            raise ValueError(f"the number {_shortened(text)} is too small for a float")
        return number
    exact = Decimal(text)
    return number if exact == Decimal(written) else exact


def read_whole(text: str) -> int | float | Decimal:
    """`read_number`, with whole numbers as `int`: equal numbers are one, however they are written.

    Example:
        >>> read_whole("1e3"), read_whole("100000000000000000001.0"), read_whole("1.5")
        (1000, 100000000000000000001, 1.5)
    """
    number = read_number(text)
    if isinstance(number, float):
        return int(Decimal(text)) if number.is_integer() else number
    return int(number) if number == number.to_integral_value() else number


def write_canonically(number: Decimal) -> str:
    """Return the one text of a number: a float's, if that holds it, else digits and an exponent.

    Example:
        >>> write_canonically(Decimal("1.50")), write_canonically(Decimal("0.12345678901234567890"))
        ('1.5', '1234567890123456789E-19')
    """
    found = read_number(str(number))
    if isinstance(found, float):
        return repr(found)
    text = plain_decimal(found)
    return text if "E" in text else f"{text}E+0"  # not to be read as a whole number


def has_decimals(payload: Any, canonical: bytes) -> bool:
    """Return whether a parsed payload has numbers that no float holds.

    Args:
        payload: the JSON value.
        canonical: its `idemp.messages.canonical_json`.

    Example:
        >>> has_decimals([Decimal("0.12345678901234567890")], b"[1234567890123456789E-19]")
        True
    """
    return _CANONICAL_DECIMAL.search(canonical) is not None and _contains_decimal(payload)


def rounded(value: Any) -> Any:
    """Return a JSON value with a float for each `Decimal`: for headers, whose numbers brokers carry as floats.

    Example:
        >>> rounded({"a": [Decimal("0.12345678901234567890")]})
        {'a': [0.12345678901234568]}
    """
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(value) if isinstance(value, Decimal) else value


def _contains_decimal(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_contains_decimal, value.values()))
    if isinstance(value, list):
        return any(map(_contains_decimal, value))
    return isinstance(value, Decimal)


def _default(value: object) -> NoReturn:
    if isinstance(value, Decimal):
        raise _DecimalFoundError
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
