"""Secrets of effects: given to the one who sends, asked for at each run, never stored with an effect and never shown."""

from __future__ import annotations

from collections.abc import Callable

Secret = str | Callable[[], str]
"""A secret, or a function that answers it: read from a vault, a file or the environment when it is needed."""


def revealed(secret: Secret | None) -> str:
    """The secret itself, empty for none.

    Example:
        >>> revealed(lambda: "from a vault"), revealed(None)
        ('from a vault', '')
    """
    if secret is None:
        return ""
    return secret if isinstance(secret, str) else secret()


def without(secret: str, text: str) -> str:
    """A text that somebody else wrote, without the secret that they may have repeated.

    Example:
        >>> without("s3cret", "535 no such password: s3cret"), without("", "all of it")
        ('535 no such password: ***', 'all of it')
    """
    return text.replace(secret, "***") if secret else text
