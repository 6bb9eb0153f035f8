"""Effective ids in Spark SQL: the same sixteen bytes as `idemp.identity.effective_id`, without a Python worker.

Only ids of the envelope, alone or with a CloudEvents source: keys of the body need the body, and the app that reads it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as f

from idemp.canonical import encode
from idemp.errors import InvalidId, MissingId
from idemp.identity import IDENTITY_VERSION, MAX_ID_BYTES

if TYPE_CHECKING:
    from pyspark.sql import Column

_BEGINNING: Final = encode((f"idemp-id-{IDENTITY_VERSION}", "envelope", ""))
# `\z`, since Java's `$` also matches before a line's end.
_CANONICAL_UUID: Final = r"^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\z"
_OWN_DIGEST: Final = r"^.{14}8.{4}[89ab]"
_TIME_ORDERED: Final = r"^.{14}7.{4}[89ab]"
_LAST_MILLISECOND: Final = "e677d21fdbff"  # of the year 9999; ids beyond it carry no time
# What Python takes for blank, which is more than Java does.
_BLANK: Final = r"(?U)^[\s\x1c-\x1f]*\z"
_VARIANT: Final = "89ab" * 4


def envelope_key(id: Column, source: Column) -> Column:
    """The key of a message id, as 16 bytes; of a CloudEvent, where there is a source, of both together.

    Only where `envelope_fault` finds none.
    """
    alone = f.when(_is_plain(id), f.unhex(f.regexp_replace(id, "-", ""))).otherwise(_digest(id))
    return f.when(_is_event(id, source), _digest(source, id)).otherwise(alone)


def envelope_text(id: Column, source: Column) -> Column:
    """What a person would call the id."""
    return f.when(_is_event(id, source), f.concat_ws(",", source, id)).otherwise(id)


def is_own_text(id: Column, source: Column) -> Column:
    """Whether the key can be written as this very id, so that nobody has to keep it beside."""
    return _is_plain(id) & ~_is_event(id, source)


def envelope_fault(id: Column, source: Column) -> Column:
    """The error that the consumer parks such a message with, by its class; null for an id that can be used."""
    text = envelope_text(id, source)
    blank = id.rlike(_BLANK) | (_is_event(id, source) & source.rlike(_BLANK))
    return (
        f.when(id.isNull(), MissingId.__name__)
        .when(blank, InvalidId.__name__)
        .when(f.octet_length(text) > MAX_ID_BYTES, InvalidId.__name__)
        .when(f.contains(text, f.lit("\0")), InvalidId.__name__)
    )


def key_text(key: Column) -> Column:
    """A key as a UUID is written."""
    digits = f.lower(f.hex(key))
    return f.concat_ws("-", *(f.substring(digits, at, size) for at, size in _GROUPS))


_GROUPS: Final = ((1, 8), (9, 4), (13, 4), (17, 4), (21, 12))


def _is_event(id: Column, source: Column) -> Column:
    return f.coalesce((source != "") & (id != ""), f.expr("false"))


def _is_plain(id: Column) -> Column:
    return id.rlike(_CANONICAL_UUID) & ~id.rlike(_OWN_DIGEST)


def _digest(*values: Column) -> Column:
    told = f.concat(f.lit(_BEGINNING), *(part for value in values for part in _encoded(value)))
    digits = f.sha2(told, 256)
    time = f.coalesce(*map(_time, values))
    version = f.when(time.isNull(), "8").otherwise("7")
    variant = f.translate(f.substring(digits, 17, 1), "0123456789abcdef", _VARIANT)
    beginning = f.coalesce(time, f.substring(digits, 1, 12))
    laid_out = f.concat(beginning, version, f.substring(digits, 14, 3), variant, f.substring(digits, 18, 15))
    return f.unhex(laid_out)


def _encoded(text: Column) -> tuple[Column, ...]:
    """As `idemp.canonical.encode` writes a text."""
    size = f.lpad(f.hex(f.octet_length(text)), 8, "0")
    return f.lit(b"s"), f.unhex(size), text.cast("binary")


def _time(text: Column) -> Column:
    """The twelve digits that carry the time of an id; null where it carries none."""
    digits = f.concat(f.substring(text, 1, 8), f.substring(text, 10, 4))
    carries = text.rlike(_CANONICAL_UUID) & text.rlike(_TIME_ORDERED) & (digits <= _LAST_MILLISECOND)
    return f.when(carries, digits)
