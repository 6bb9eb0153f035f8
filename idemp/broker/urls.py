"""Broker URLs as people may see them, whatever the transport."""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from idemp.broker.port import Endpoint
from idemp.errors import ConfigurationError

_SYSTEMS: Final = {
    "pyamqp": ("rabbitmq", 5672),
    "amqps": ("rabbitmq", 5671),
    "stomp": ("activemq", 61613),
    "stomp+ssl": ("activemq", 61614),
    "redis": ("redis", 6379),
    "rediss": ("redis", 6379),
}


def shown(url: str) -> str:
    """A URL as it may stand in errors and logs: without user and password.

    Example:
        >>> shown("pyamqp://guest:secret@broker:5672/shop?heartbeat=5")
        'pyamqp://***@broker:5672/shop'
    """
    return ";".join(_shown_one(single) for single in url.split(";"))


def endpoint_of(url: str) -> Endpoint:
    """Return what traces call the broker of a URL; without an address if the URL names several.

    Example:
        >>> endpoint_of("pyamqp://guest:secret@mq.example.org/shop")
        Endpoint(system='rabbitmq', address='mq.example.org', port=5672)
        >>> endpoint_of("stomp://a;stomp://b:7000")
        Endpoint(system='activemq', address=None, port=None)
    """
    scheme, _, rest = url.split(";", maxsplit=1)[0].strip().partition("://")
    system, port = _SYSTEMS.get(scheme, (scheme, None))
    if ";" in url:
        return Endpoint(system)
    try:
        host = urlsplit(f"http://{rest.rpartition('@')[2]}")
        return Endpoint(system, host.hostname, (host.port or port) if host.hostname else None)
    except ValueError:
        return Endpoint(system)


def place_of(url: str) -> str:
    """Where a broker is, the same in whichever order the hosts of a failover list stand, and whoever connects.

    Example:
        >>> place_of("stomp://shop:secret@b:61613;stomp://a:61613")
        'stomp://a:61613;stomp://b:61613'
    """
    return ";".join(sorted(_shown_one(single).replace("***@", "") for single in url.split(";") if single.strip()))


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
