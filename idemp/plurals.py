"""Numbers with their nouns."""

from __future__ import annotations

__all__ = ["counted"]


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun, in the singular if there is one of it.

    Args:
        number: how many.
        noun: the singular.
        plural: the plural; default the singular with an s.

    Example:
        >>> counted(1, "output"), counted(2, "output"), counted(0, "redelivery", "redeliveries")
        ('1 output', '2 outputs', '0 redeliveries')
        >>> counted(12000, "message")
        '12000 messages'
    """
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"
