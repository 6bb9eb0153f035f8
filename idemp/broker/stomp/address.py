"""What a `stomp://` URL says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self
from urllib.parse import parse_qsl, unquote, urlsplit

from idemp.broker.urls import readable, shown
from idemp.errors import ConfigurationError

SCHEMES: Final = frozenset({"stomp", "stomp+ssl"})
_PORTS: Final = {"stomp": 61613, "stomp+ssl": 61614}
_OPTIONS: Final = frozenset({"ssl_ca_certs", "ssl_certfile", "ssl_keyfile"})


@dataclass(frozen=True, slots=True)
class Address:
    """Where the broker is, and who we are there.

    Attributes:
        shown: as it may stand in errors and logs.
        hosts: name and port of each, tried in turn.
        user: `None` for nobody.
        password: of the user; never shown.
        tls: whether over TLS; chain and host name of the certificate are checked.
        ca_certs: a file with the authorities to trust, instead of the system's.
        certfile: our own certificate.
        keyfile: its key.
    """

    shown: str
    hosts: tuple[tuple[str, int], ...]
    user: str | None
    password: str | None
    tls: bool
    ca_certs: str | None = None
    certfile: str | None = None
    keyfile: str | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.shown!r})"

    @classmethod
    def of(cls, url: str) -> Self:
        """Read a URL: `stomp://user:password@host:61613`, `stomp+ssl://…`, or several of one kind with `;` between.

        Raises:
            ConfigurationError: it can't be read. Never shows the password.

        Example:
            >>> Address.of("stomp://shop:secret@a;stomp://b:7000")
            Address('stomp://***@a;stomp://b:7000')
            >>> Address.of("stomp://shop:secret@a;stomp://b:7000").hosts
            (('a', 61613), ('b', 7000))
        """
        singles = [part.strip() for part in url.split(";") if part.strip()]
        schemes = {single.partition("://")[0] for single in singles}
        if len(schemes) != 1 or not schemes <= SCHEMES:
            raise ConfigurationError(
                f"{shown(url)} is no URL of ActiveMQ.", fix="Write stomp://user:password@host:61613, or stomp+ssl://…"
            )
        for single in singles:
            readable(single)
        (scheme,) = schemes
        parts = [urlsplit(f"http://{single.partition('://')[2]}") for single in singles]
        query = dict(parse_qsl(parts[0].query))
        tls = scheme == "stomp+ssl"
        if query.keys() - (_OPTIONS if tls else frozenset()):
            raise ConfigurationError(
                f"{shown(url)} has options that nobody reads there.",
                fix=f"stomp+ssl:// has {', '.join(sorted(_OPTIONS))}, stomp:// none.",
            )
        who = {(part.username, part.password, part.query) for part in parts[1:]} - {(None, None, "")}
        if who - {(parts[0].username, parts[0].password, parts[0].query)}:
            raise ConfigurationError(
                f"{shown(url)} has another user or other options at a later host.",
                fix="Give them at the first; they count for all.",
            )
        return cls(
            shown=shown(url),
            hosts=tuple((part.hostname or "127.0.0.1", part.port or _PORTS[scheme]) for part in parts),
            user=None if parts[0].username is None else unquote(parts[0].username),
            password=None if parts[0].password is None else unquote(parts[0].password),
            tls=tls,
            ca_certs=query.get("ssl_ca_certs"),
            certfile=query.get("ssl_certfile"),
            keyfile=query.get("ssl_keyfile"),
        )
