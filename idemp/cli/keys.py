"""From what a person calls a message's id to the keys that the inbox may have it under."""

from __future__ import annotations

from contextlib import suppress
from datetime import date, datetime
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING
from uuid import UUID

from idemp.errors import InvalidId
from idemp.identity import effective_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from idemp.identity import KeyValue

_MARK = "#"


def candidate_keys(text: str, message_types: Iterable[str]) -> list[UUID]:
    """The keys that an id may stand for: of the envelope, of an initiation, of the body of any message type.

    A body key may be written as `42` or, for one type, as `orders.PlaceOrder#42`; several fields as `acme,42`. The key
    itself, which lists show, is one of the candidates.

    Example:
        >>> types = ["orders.PlaceOrder", "orders.CancelOrder"]
        >>> place = effective_id("body", 42, "orders.PlaceOrder").key
        >>> place in candidate_keys("42", types), place in candidate_keys("orders.PlaceOrder#42", types)
        (True, True)
        >>> place in candidate_keys("orders.CancelOrder#42", types)
        False
    """
    return list(dict.fromkeys(_candidates(text, sorted(message_types))))


def _candidates(text: str, message_types: list[str]) -> Iterator[UUID]:
    with suppress(ValueError):
        yield UUID(text)
    for value in _values(text):
        with suppress(InvalidId):
            yield effective_id("envelope", value).key
    with suppress(InvalidId):
        yield effective_id("initiation", text).key
    for message_type in message_types:
        named, mark, rest = text.partition(_MARK)
        yield from _of_body(text, message_type)
        if mark and named == message_type:
            yield from _of_body(rest, message_type)


def _of_body(text: str, message_type: str) -> Iterator[UUID]:
    for value in _values(text):
        with suppress(InvalidId):
            yield effective_id("body", value, message_type).key


def _values(text: str) -> Iterator[KeyValue | tuple[KeyValue, ...]]:
    """What a field may have held that is written so."""
    yield from _single(text)
    parts = text.split(",")
    if len(parts) > 1:
        yield tuple(parts)
        yield tuple(next(iter(list(_single(part))[1:]), part) for part in parts)


def _single(text: str) -> Iterator[KeyValue]:
    yield text
    readings: tuple[Callable[[str], KeyValue], ...] = (int, UUID, datetime.fromisoformat, date.fromisoformat, Decimal)
    for reading in readings:
        with suppress(ValueError, InvalidOperation):
            yield reading(text)
    if text in {"True", "False"}:
        yield text == "True"
