"""Which bindings a routing key matches, by the rules of AMQP topic exchanges."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

ONE_WORD: Final = "*"
ANY_WORDS: Final = "#"


@lru_cache(maxsize=8192)
def matches(pattern: str, routing_key: str) -> bool:
    """Whether a binding's pattern takes a routing key: `*` is exactly one word, `#` any number of words, also none.

    Words stand between dots. The empty key has no words; a wildcard is one only as a word of its own. The effort is
    at most (words of the pattern) x (words of the key), whatever the pattern.

    Example:
        >>> matches("orders.*", "orders.Placed"), matches("orders.*", "orders.eu.Placed")
        (True, False)
        >>> matches("orders.#", "orders"), matches("#.Placed", "orders.eu.Placed"), matches("orders.P*", "orders.P1")
        (True, True, False)
    """
    words = _words(pattern)
    reached = _with_skips(words, {0})
    for word in _words(routing_key):
        stepped = {position for position in reached if words[position : position + 1] == (ANY_WORDS,)}
        stepped |= {position + 1 for position in reached if _takes(words, position, word)}
        reached = _with_skips(words, stepped)
    return len(words) in reached


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split(".")) if text else ()


def _takes(words: tuple[str, ...], position: int, word: str) -> bool:
    """Whether the pattern's word at this position stands for exactly this word."""
    if position == len(words) or words[position] == ANY_WORDS:
        return False
    return words[position] in {ONE_WORD, word}


def _with_skips(words: tuple[str, ...], positions: set[int]) -> set[int]:
    """The positions, and those behind a `#` that stands for no word."""
    reached = set(positions)
    for start in positions:
        position = start
        while position < len(words) and words[position] == ANY_WORDS:
            position += 1
            reached.add(position)
    return reached
