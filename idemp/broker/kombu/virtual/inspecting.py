"""A look at a live Redis: whether it forgets messages on purpose, and when it writes them to its disk."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

from idemp.broker.kombu.virtual.line import UNKNOWN_OPTION, told
from idemp.broker.urls import shown
from idemp.diagnosis import Command, Diagnosis, shell
from idemp.errors import BrokerUnavailable, ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_OLDEST: Final = 5
_SETTINGS: Final = ("maxmemory", "maxmemory-policy", "appendonly", "appendfsync")
_LOSES: Final = "A crash of Redis loses messages that it had confirmed."


def inspect(url: str, *, timeout: float) -> list[Diagnosis]:
    """All that was found.

    Raises:
        BrokerUnavailable: Redis can't be reached.
        ConfigurationError: it refuses this user, or its client is not installed.
    """
    try:
        from redis import Redis
        from redis.exceptions import AuthenticationError, RedisError, ResponseError
    except ImportError as error:
        raise ConfigurationError(f"{shown(url)}: {error}.", fix="pip install 'idemp[redis]'") from error
    with closing(Redis.from_url(url, socket_timeout=timeout, socket_connect_timeout=timeout)) as client:
        try:
            version = str(client.info("server")["redis_version"])
            found = [_version(url, version)]
            try:
                settings = {name: str(client.config_get(name).get(name, "")) for name in _SETTINGS}
            except ResponseError as error:
                detail = f"The settings can't be read: {told(error)}."
                return [
                    *found,
                    Diagnosis("warning", "redis settings", detail, f"Look at {', '.join(_SETTINGS)} yourself."),
                ]
        except AuthenticationError as error:
            raise ConfigurationError(f"{shown(url)}: {told(error)}.", fix="Check user and password.") from error
        except TypeError as error:  # the client is made at its first use
            raise ConfigurationError(f"{shown(url)}: {told(error)}.", fix=UNKNOWN_OPTION) from error
        except (RedisError, OSError) as error:
            raise BrokerUnavailable(f"No connection to {shown(url)}: {told(error)}.", fix="Check the URL.") from error
    return [*found, *_judged(settings, url)]


def _version(url: str, version: str) -> Diagnosis:
    if int(version.partition(".")[0]) < _OLDEST:
        return Diagnosis("failed", "broker", f"{shown(url)}: Redis {version} is too old.", f"Use {_OLDEST} or newer.")
    return Diagnosis("ok", "broker", f"{shown(url)}: Redis {version}")


def _judged(settings: Mapping[str, str], url: str) -> Iterator[Diagnosis]:
    policy, limit = settings["maxmemory-policy"], settings["maxmemory"]
    # Only keys without an expiry are ours: the volatile-… policies leave them alone.
    evicts = policy.startswith("allkeys-")
    if evicts:
        when = f"as soon as it has {limit} bytes" if limit != "0" else "once somebody sets maxmemory"
        yield Diagnosis(
            "failed" if limit != "0" else "warning",
            "maxmemory-policy",
            f"{policy}: Redis throws messages away {when}.",
            _LASTING,
            (_set(url, "maxmemory-policy", "noeviction"),),
        )
    else:
        yield Diagnosis("ok", "maxmemory-policy", policy)
    for name, good in (("appendonly", "yes"), ("appendfsync", "always")):
        if settings[name] == good:
            yield Diagnosis("ok", name, good)
        else:
            yield Diagnosis("warning", name, f"{settings[name]}. {_LOSES}", _LASTING, (_set(url, name, good),))


_LASTING: Final = "Set it, and write it into the configuration file as well."


def _set(url: str, name: str, value: str) -> Command:
    parts = urlsplit(url)
    tls = ("--tls",) if url.startswith("rediss") else ()
    login = ("--user", unquote(parts.username)) if parts.username else ()
    asked = ("--askpass",) if parts.password else ()
    where = ("-h", parts.hostname or "127.0.0.1", "-p", str(parts.port or 6379))
    return shell("redis-cli", *where, *tls, *login, *asked, "CONFIG", "SET", name, value)
