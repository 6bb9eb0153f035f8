"""Broker URLs: which ones kombu's adapter takes."""

from __future__ import annotations

from typing import Final
from urllib.parse import parse_qsl, urlsplit

from idemp.broker.urls import readable, shown
from idemp.errors import ConfigurationError

_TLS_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
AMQP_SCHEMES: Final = frozenset({"pyamqp", "amqps"})
VIRTUAL_SCHEMES: Final = frozenset({"redis", "rediss", "redis+socket", "memory"})


def hosts_of(url: str) -> list[str]:
    """The single URLs of a failover list `a;b`, each checked.

    Raises:
        ConfigurationError: it is no URL, or of a scheme that might take another library. Never shows the password.

    Example:
        >>> hosts_of("pyamqp://a;pyamqp://b:5673/shop")
        ['pyamqp://a', 'pyamqp://b:5673/shop']
        >>> hosts_of("amqp://guest:secret@broker")
        Traceback (most recent call last):
        ...
        idemp.errors.ConfigurationError: amqp://***@broker may use librabbitmq, which has no confirms. Write pyamqp://…
    """
    urls = [part.strip() for part in url.split(";") if part.strip()]
    if not urls:
        raise ConfigurationError("The broker URL is empty.", fix="Write pyamqp://user:password@host:5672/vhost")
    for single in urls:
        _check(single)
    return urls


def tls_options(url: str) -> dict[str, str | None]:
    """How to check the broker's certificate, for `amqps://` URLs; empty for others.

    Chain and host name are checked. Files stand in the URL's query: `ssl_ca_certs`, `ssl_certfile`, `ssl_keyfile`.

    Example:
        >>> tls_options("amqps://broker/shop?ssl_ca_certs=/etc/ca.pem")
        {'server_hostname': None, 'ca_certs': '/etc/ca.pem'}
        >>> tls_options("pyamqp://broker")
        {}
    """
    scheme, _, rest = url.partition("://")
    if scheme != "amqps":
        return {}
    query = dict(parse_qsl(urlsplit(f"http://{rest}").query))
    files = {name.removeprefix("ssl_"): query[name] for name in _TLS_FILES if name in query}
    # None stands for the URL's own host; left out, kombu would accept a certificate of any host.
    return {"server_hostname": None, **files}


def _check(url: str) -> None:
    scheme = url.partition("://")[0] if "://" in url else ""
    if scheme == "amqp":
        raise ConfigurationError(f"{shown(url)} may use librabbitmq, which has no confirms.", fix="Write pyamqp://…")
    if scheme not in AMQP_SCHEMES:
        raise ConfigurationError(f"{shown(url)} is no URL of RabbitMQ.", fix="Write pyamqp://user:password@host/vhost")
    readable(url)
