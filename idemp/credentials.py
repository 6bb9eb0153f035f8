"""Texts of drivers and servers without credentials."""

from __future__ import annotations

import re
from typing import Final

_PASSWORD: Final = re.compile(r"(passw(?:or)?d=)('[^']*'|\"[^\"]*\"|[^\s,;&)]+)", re.IGNORECASE)

__all__ = ["without_credentials"]


def without_credentials(text: str) -> str:
    """Return a text without the passwords of its URLs and connection strings; nothing else is replaced.

    A password is found by its place, not by its letters: a short one may occur in other words.

    Example:
        >>> without_credentials('connection to "postgresql://me:secret@db/shop" failed: role "secret" does not exist')
        'connection to "postgresql://me:***@db/shop" failed: role "secret" does not exist'
        >>> without_credentials("missing option after host=db password=secret")
        'missing option after host=db password=***'
    """
    if "://" in text:
        text = "".join(map(_without_userinfo, re.split(r"(\s)", text)))
    return _PASSWORD.sub(r"\1***", text)


def _without_userinfo(word: str) -> str:
    scheme, separator, rest = word.partition("://")
    # From the right: a password that was not escaped may hold an @ or a slash of its own.
    userinfo, at, place = rest.rpartition("@")
    if not separator or not at:
        return word
    user, colon, _ = userinfo.partition(":")
    return f"{scheme}://{user if colon else '***'}{':***' if colon else ''}@{place}"
