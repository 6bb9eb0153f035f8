"""How large a frame may be: the broker does not tell, it cuts the connection for one that is too large."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

_SAID: Final = re.compile(
    r"maximum (frame size|data length|header length|number of headers) was exceeded", re.IGNORECASE
)
_MEMORY_SECONDS: Final = 60.0
"""For how long a size is not tried again: the limit may be raised, or another host have another."""
_LONGEST_DATA: Final = 100 * 1024 * 1024
"""ActiveMQ's own limit of a body. What it refuses there it takes for frames, for a moment: no body may get so far."""
_ESCAPED: Final = re.compile(r"[\\\n\r:]")


def is_too_large(reason: str) -> bool:
    """Whether the broker says that it cut the connection for the size of a frame.

    Example:
        >>> is_too_large("The maximum frame size was exceeded"), is_too_large("store is full")
        (True, False)
    """
    return _SAID.search(reason) is not None


def too_large(reason: str, size: Size) -> str:
    """What to tell of a frame that is too large.

    Example:
        >>> too_large("The maximum frame size was exceeded", Size(30, 90))
        "The maximum frame size was exceeded by a frame of 90 bytes: raise it at the broker's connector"
    """
    return f"{reason} by a frame of {size.whole} bytes: raise it at the broker's connector"


@dataclass(frozen=True, slots=True)
class Size:
    """Of a frame, in bytes.

    Attributes:
        body: its body.
        whole: all of it, as it is on the wire.
    """

    body: int
    whole: int

    @classmethod
    def of(cls, command: str, headers: Mapping[str, str], body: bytes) -> Size:
        """The size of a frame that is to be sent.

        Example:
            >>> Size.of("SEND", {"a:b": "c"}, b"1")
            Size(body=1, whole=15)
        """
        texts = [part for item in headers.items() for part in item]
        escapes = sum(len(_ESCAPED.findall(text)) for text in texts)
        marks = 2 * len(headers) + len("\n\n\0")  # a colon and a line end each
        return cls(len(body), len(command) + sum(len(text.encode()) for text in texts) + escapes + marks + len(body))


class Limits:
    """The smallest sizes for which the broker cut a connection lately; shared by all connections of one broker.

    Example:
        >>> limits = Limits()
        >>> limits.forbidding(Size(30, 90))
        >>> limits.learn("The maximum frame size was exceeded", Size(30, 90))
        >>> limits.forbidding(Size(40, 95)), limits.forbidding(Size(40, 89))
        ('The maximum frame size was exceeded', None)
    """

    def __init__(self) -> None:
        self._refused: dict[str, tuple[float, Size]] = {}

    def learn(self, reason: str, size: Size) -> None:
        """The broker cut the connection for a frame of this size, and for no other's sake."""
        self._refused[reason] = (time.monotonic(), size)

    def forbidding(self, size: Size) -> str | None:
        """With which words the broker would cut the connection for a frame of this size, `None` if nothing tells."""
        if size.body > _LONGEST_DATA:
            return "The maximum data length was exceeded"
        for reason, (when, refused) in list(self._refused.items()):
            if time.monotonic() - when > _MEMORY_SECONDS:
                self._refused.pop(reason, None)
            elif ("frame size" in reason and size.whole >= refused.whole) or (
                "data length" in reason and size.body >= refused.body
            ):
                return reason
        return None
