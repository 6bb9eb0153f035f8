"""Secrets of effects: given to the one who sends, asked for at each run, never stored with an effect and never shown."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from typing import Final
from urllib.parse import quote

Secret = str | Callable[[], str]
"""A secret, or a function that answers it: read from a vault, a file or the environment when it is needed."""


_LONG: Final = 6
_BASE64: Final = re.compile(r"[A-Za-z0-9+/_-]{2,}={0,2}")
_URL_SAFE: Final = str.maketrans("-_", "+/")


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
    """Return what a server said without the secret that it may have repeated, as it stands or encoded.

    A long secret is replaced wherever it occurs, a short one only where it stands by itself: it may be a part of words.

    Example:
        >>> without("s3cret", "535 no such password: s3cret"), without("", "all of it")
        ('535 no such password: ***', 'all of it')
        >>> without("x", "550 'x' does not exist")
        "550 '***' does not exist"
        >>> without("s3cret", "535 AUTH PLAIN AHNob3AAczNjcmV0 refused")
        '535 AUTH PLAIN *** refused'
    """
    if not secret:
        return text
    for form in sorted({secret, quote(secret, safe=""), repr(secret)[1:-1], json.dumps(secret)[1:-1]}, key=len)[::-1]:
        mark = re.escape(form)
        text = re.sub(mark if len(secret) >= _LONG else rf"(?<!\w){mark}(?!\w)", "***", text)
    return _BASE64.sub(lambda word: "***" if _holds(word[0], secret.encode()) else word[0], text)


def _holds(word: str, secret: bytes) -> bool:
    """Tell whether a word is base64 of a secret, or of a user and a secret, as in AUTH PLAIN and in Basic."""
    bare = word.rstrip("=").translate(_URL_SAFE)
    try:
        decoded = base64.b64decode(bare + "=" * (-len(bare) % 4))
    except ValueError:
        return False
    return (
        decoded == secret
        or decoded.endswith((b"\0" + secret, b":" + secret))
        or (len(secret) >= _LONG and secret in decoded)
    )
