"""Messages that differ from a given one in a single value, to see what depends on it."""

from __future__ import annotations

import json
import string
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from idemp.messages import Message

_MOST: Final = 12


def variations(message: Message) -> Iterator[tuple[Any, Message]]:
    """A value of the message, and the message with another one there: its id first, then each value of a JSON body.

    Example:
        >>> from idemp.messages import Message
        >>> given = Message(body=b'{"id": 7, "lines": [{"sku": "A-1"}]}', message_id="m-1")
        >>> [(value, other.message_id, other.body) for value, other in variations(given)]
        [('m-1', 'm-2', b'{"id": 7, ...'), (7, 'm-1', b'{"id": 8, ...'), ('A-1', 'm-1', b'{"id": 7, ... "A-2"}]}')]
    """
    if message.message_id is not None:
        yield message.message_id, replace(message, message_id=varied(message.message_id, 1))
    with suppress(ValueError):
        body = json.loads(message.body)
        for path, value in islice(_leaves(body, ()), _MOST):
            with suppress(TypeError):
                yield value, replace(message, body=json.dumps(_with(body, path, varied(value, 1))).encode())


def varied(value: Any, step: int) -> Any:
    """Another value of the same form.

    Raises:
        TypeError: for its type there is none.

    Example:
        >>> varied("b3f", 1), varied(7, -1)
        ('b3a', 6)
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError
    if isinstance(value, int | float):
        return value + step
    for alphabet in (string.digits, string.ascii_lowercase[:6], string.ascii_uppercase[:6], string.ascii_letters):
        if value and value[-1] in alphabet:
            return value[:-1] + alphabet[(alphabet.index(value[-1]) + 1) % len(alphabet)]
    return f"{value}-copy"


def _leaves(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(item, (*path, key))
    else:
        yield path, value


def _with(value: Any, path: tuple[Any, ...], leaf: Any) -> Any:
    if not path:
        return leaf
    copied = value.copy()
    copied[path[0]] = _with(value[path[0]], path[1:], leaf)
    return copied
