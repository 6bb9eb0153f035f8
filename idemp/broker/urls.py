"""Broker URLs as people may see them, whatever the transport."""

from __future__ import annotations

from urllib.parse import urlsplit

from idemp.errors import ConfigurationError


def shown(url: str) -> str:
    """A URL as it may stand in errors and logs: without user and password.

    Example:
        >>> shown("pyamqp://guest:secret@broker:5672/shop?heartbeat=5")
        'pyamqp://***@broker:5672/shop'
    """
    return ";".join(_shown_one(single) for single in url.split(";"))


def readable(url: str) -> None:
    """Check that host and port of a URL can be told from its password.

    Raises:
        ConfigurationError: they can't. Never shows the password.
    """
    try:
        host = urlsplit(f"http://{url.partition('://')[2]}")
        _ = host.port
    except ValueError:
        # Its text may hold a part of the password.
        raise ConfigurationError(
            f"The broker URL {url.partition('://')[0]}://… can't be read.",
            fix="Escape /, :, @ and # in user and password: %2F %3A %40 %23.",
        ) from None


def _shown_one(url: str) -> str:
    scheme, separator, rest = url.strip().partition("://")
    if not separator:
        return "***"
    # From the right: a password that nobody escaped may hold an @ or a slash of its own.
    secret, at, place = rest.rpartition("@")
    place = place.partition("?")[0]
    return f"{scheme}://{'***@' if at or secret else ''}{place}"
