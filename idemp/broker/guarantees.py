"""What each transport promises, in one table: what may lose messages is refused unless the user insists."""

from __future__ import annotations

from difflib import get_close_matches
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from idemp.broker.port import Guarantees

if TYPE_CHECKING:
    from collections.abc import Mapping

_MINUTE, _HOUR, _DAY = 60.0, 3600.0, 86_400.0
_TIERS = "one queue a delay"
_NONE = "none"


def _safe(name: str, delays: str, horizon: float, remarks: str, *, single_active: bool = False) -> Guarantees:
    return Guarantees(
        name=name,
        at_least_once=True,
        confirms=True,
        delays=delays,
        horizon_seconds=horizon,
        remarks=remarks,
        single_active=single_active,
    )


def _lossy(name: str, horizon: float, remarks: str, *, delays: str = _NONE) -> Guarantees:
    return Guarantees(
        name=name, at_least_once=False, confirms=False, delays=delays, horizon_seconds=horizon, remarks=remarks
    )


_TABLE = (
    _safe(
        "pyamqp",
        _TIERS,
        _HOUR,
        "RabbitMQ 3.10 or newer with quorum queues; consumer_timeout (30 min) redelivers",
        single_active=True,
    ),
    _safe(
        "local",
        "in place",
        _HOUR,
        "one machine, one file; what a dead process held comes back at once, else when its lease runs out",
    ),
    _safe(
        "stomp",
        "beside the queue",
        _HOUR,
        "ActiveMQ 5.16 or newer over STOMP; what a worker held comes back when its connection ends, or is silent for 30 s; "
        "of priorities it keeps ten, where its policy says so",
        single_active=True,
    ),
    _safe("sqs", "DelaySeconds", 14 * _DAY, "by its documentation; redelivers until the retention period ends"),
    _safe("azureservicebus", "scheduled", 14 * _DAY, "by its documentation; peek-lock mode"),
    _safe("gcpubsub", _NONE, 7 * _DAY, "by its documentation; redelivers until the retention period ends"),
    _safe("pgmq", "delay", _HOUR, "by its documentation; visibility timeout"),
    _lossy("amqp", _HOUR, "takes librabbitmq where it is installed, which has no confirms"),
    _lossy("librabbitmq", _HOUR, "has no confirms"),
    _lossy(
        "redis",
        _HOUR,
        "a dead worker's messages come again after visibility_timeout (1 h), later with no worker left to look; Redis "
        "takes a message before its disk or replica has it, so that a crash, failover or eviction there loses some; ttl "
        "has no effect, and of priorities the lower goes first",
        delays="a sorted set",
    ),
    _lossy("kafka", 7 * _DAY, "an ack commits the whole position, and errors of produce are swallowed"),
    _lossy("memory", _MINUTE, "lives in one process, for tests only; what is given back comes last", delays="a queue"),
    _lossy("sqlalchemy", _MINUTE, "a crash between taking and acknowledging loses the message"),
    _lossy("filesystem", _MINUTE, "a crash between taking and acknowledging loses the message"),
    _lossy("mongodb", _MINUTE, "a crash between taking and acknowledging loses the message"),
    _lossy("etcd", _MINUTE, "a crash between taking and acknowledging loses the message"),
    _lossy("zookeeper", _MINUTE, "a crash between taking and acknowledging loses the message"),
    _lossy("consul", _MINUTE, "a crash between taking and acknowledging loses the message"),
    _lossy("azurestoragequeues", _MINUTE, "a crash between taking and acknowledging loses the message"),
    _lossy("qpid", _HOUR, "not examined"),
    _lossy("pyro", _MINUTE, "lives in one process"),
    _lossy("slmq", _HOUR, "not examined"),
)
_ALIASES = {
    "amqps": "pyamqp",  # always py-amqp, over TLS
    "rediss": "redis",
    "sentinel": "redis",
    "confluentkafka": "kafka",
    "sqla": "sqlalchemy",
}

#: The transports that idemp has an adapter for.
SUPPORTED: Final = frozenset({"pyamqp", "local", "stomp", "redis", "memory"})

_WITH_ADAPTER: Final = (*sorted(SUPPORTED), "amqps", "rediss")

#: The table, by the scheme of the broker URL.
GUARANTEES: Final[Mapping[str, Guarantees]] = MappingProxyType({row.name: row for row in _TABLE})


def guarantees_of(url: str) -> Guarantees:
    """What the transport of a broker URL promises; of several hosts, the weakest. Unknown ones promise nothing.

    Example:
        >>> guarantees_of("pyamqp://guest:secret@broker/shop").at_least_once
        True
        >>> guarantees_of("redis://cache").at_least_once
        False
        >>> guarantees_of("carrierpigeon://roof").remarks
        'unknown to idemp'
    """
    rows = [_of_one(part.strip()) for part in url.split(";") if part.strip()]
    return min(rows or [_of_one("")], key=lambda row: row.at_least_once)


def misspelt(url: str) -> tuple[str, str] | None:
    """Return an unknown scheme and the one with an adapter that was probably meant.

    Example:
        >>> misspelt("pyampq://broker/shop"), misspelt("carrierpigeon://roof"), misspelt("redis://cache")
        (('pyampq', 'pyamqp'), None, None)
    """
    for part in url.split(";"):
        scheme = _scheme(part.strip())
        if scheme not in GUARANTEES and scheme not in _ALIASES:
            for meant in get_close_matches(scheme, _WITH_ADAPTER, n=1):
                return scheme, meant
    return None


def markdown() -> str:
    """The table for the README.

    Example:
        >>> print(markdown().splitlines()[2])
        | `pyamqp` | yes | yes | yes | yes | one queue a delay | 1 h | RabbitMQ 3.10 or newer with quorum queues; \
consumer_timeout (30 min) redelivers |
    """
    lines = [
        "| transport | adapter | at least once | confirms | order per key | delays | redelivers for up to | remarks |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += ["| " + " | ".join(_cells(row)) + " |" for row in GUARANTEES.values()]
    return "\n".join(lines) + "\n"


def _cells(row: Guarantees) -> tuple[str, ...]:
    return (
        f"`{row.name}`",
        "yes" if row.name in SUPPORTED else "not yet",
        _yes(row.at_least_once),
        _yes(row.confirms),
        "yes" if row.single_active else "no",
        row.delays,
        _duration(row.horizon_seconds),
        row.remarks,
    )


def _of_one(url: str) -> Guarantees:
    scheme = _scheme(url)
    name = _ALIASES.get(scheme, scheme)
    return GUARANTEES.get(name) or _lossy(name or "(none)", _DAY, "unknown to idemp")


def _scheme(url: str) -> str:
    return url.partition("://")[0].partition("+")[0].lower() if "://" in url else ""


def _yes(value: bool) -> str:
    return "yes" if value else "**no**"


def _duration(seconds: float) -> str:
    for unit, size in (("d", _DAY), ("h", _HOUR)):
        if seconds >= size:
            return f"{seconds / size:g} {unit}"
    return f"{seconds / _MINUTE:g} min"
