"""A message as SQS takes it: text that XML could hold, and one attribute with all else."""

from __future__ import annotations

import base64
import re
from typing import TYPE_CHECKING, Final

from idemp.prepared.carried import CARRIED_HEADER, Carried
from idemp.prepared.sqs.queue import LARGEST

if TYPE_CHECKING:
    from collections.abc import Mapping

ENCODING_ATTRIBUTE: Final = "idemp-encoding"
_BASE64: Final = "base64"
_TYPE: Final = "String"
# Anything else would be refused; an empty text, too.
_PLAIN: Final = re.compile("[\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]+")
KEPT_FREE: Final = 1000
"""Bytes by which copies may grow: a reason, and the count of checks."""


def packed(carried: Carried) -> tuple[str, dict[str, str]]:
    """Body and attributes.

    Example:
        >>> from uuid import UUID
        >>> from idemp.messages import Message, Output, OutputKind
        >>> from idemp.prepared.port import Prepared
        >>> where = {"kind": OutputKind.SEND, "exchange": "", "routing_key": "stock"}
        >>> def body(said):
        ...     output = Output(id=UUID(int=7), ordinal=0, message=Message(body=said), **where)
        ...     return packed(Carried(Prepared.of(output)))[0]
        >>> body('{"sku":"é"}'.encode()), body(bytes([0, 255]))
        ('{"sku":"é"}', 'AP8=')
    """
    attributes = {CARRIED_HEADER: carried.text()}
    body = carried.prepared.message.body
    text = _as_text(body)
    if text is None:
        # Never empty: SQS takes no message without a body.
        return base64.b64encode(body).decode() or "=", {**attributes, ENCODING_ATTRIBUTE: _BASE64}
    return text, attributes


def unpacked(text: str, attributes: Mapping[str, str]) -> Carried:
    """What was packed.

    Raises:
        ValueError: somebody else wrote it.
    """
    if attributes.get(ENCODING_ATTRIBUTE) == _BASE64:
        return Carried.read(attributes.get(CARRIED_HEADER), base64.b64decode(text.lstrip("=")))
    return Carried.read(attributes.get(CARRIED_HEADER), text.encode())


def size_of(text: str, attributes: Mapping[str, str]) -> int:
    """Bytes by which SQS counts: of the body, and of each attribute's name, type and value.

    Example:
        >>> size_of("é", {"a": "b"})
        10
    """
    return len(text.encode()) + sum(len(name) + len(_TYPE) + len(value.encode()) for name, value in attributes.items())


def room_for(text: str, attributes: Mapping[str, str]) -> bool:
    """Whether SQS takes this, and every copy that may be made of it."""
    return size_of(text, attributes) + KEPT_FREE <= LARGEST


def _as_text(body: bytes) -> str | None:
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError:
        return None
    return text if _PLAIN.fullmatch(text) else None
