"""Which variants there are, and where each makes sense."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from benchmarks import limits, outside
from benchmarks.outside import Outside, several
from benchmarks.peers import PEERS, Peer
from benchmarks.plain import Bare, Batched, Naive
from benchmarks.variants import Variant, place_of
from benchmarks.wrapped import Duplicates, StatementByStatement, Wrapped, WrappedSets

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from sqlalchemy import Engine

    from benchmarks.servers import Servers
    from benchmarks.work import Place

EVERYWHERE: Final = "everywhere"
REAL: Final = "PostgreSQL with RabbitMQ"
DESIGNS: Final = "beside the design that was taken"


@dataclass(frozen=True)
class Setting:
    """Where the variants of a run do their work.

    Attributes:
        servers: that run.
        database: URL.
        engine: of it, for those with idemp that consume in this process.
        plain_engine: of it, for those without: idemp listens to what its own engine does.
        broker: URL.
    """

    servers: Servers
    database: str
    engine: Engine
    plain_engine: Engine
    broker: str


@dataclass(frozen=True)
class Entry:
    """A variant that can be made.

    Attributes:
        make: from a place and the database's URL.
        where: it makes sense.
        place: what is special about its place.
        plain: whether it has nothing of idemp.
    """

    make: Callable[[Place, str], Variant]
    where: str = EVERYWHERE
    place: Mapping[str, Any] = field(default_factory=dict)
    plain: bool = False

    def open(self, name: str, setting: Setting) -> Variant:
        """Connected and ready."""
        engine = setting.plain_engine if self.plain else setting.engine
        return self.make(place_of(name, engine, setting.broker, **self.place), setting.database)


@dataclass(frozen=True)
class PeerEntry:
    """Another framework, in a process of its own; Redis is there for what keeps its records in it."""

    peer: Peer
    where: str = REAL

    def open(self, name: str, setting: Setting) -> Variant:
        """Connected and ready."""
        elsewhere = self.peer.declares_its_queue
        place = place_of(name, setting.engine, setting.broker, queue_is_declared_elsewhere=elsewhere)
        redis = setting.servers.server("redis").url if self.peer.needs_redis else ""
        return Outside(place, self.peer.load(), setting.database, redis=redis)


@dataclass(frozen=True)
class LimitEntry:
    """What the servers and the driver can do at best."""

    make: Callable[[Setting], Variant]
    where: str = REAL

    def open(self, name: str, setting: Setting) -> Variant:
        """Connected and ready."""
        del name
        return self.make(setting)


def _wrapped(kind: type[Wrapped] = Wrapped, **options: Any) -> Callable[[Place, str], Variant]:
    return lambda place, _: kind(place, **options)


def _plain(kind: Callable[..., Variant], where: str = EVERYWHERE, **options: Any) -> Entry:
    special = options.pop("place", {})
    return Entry(lambda place, _: kind(place, **options), where=where, place=special, plain=True)


LONG: Final = {"note": 8192}

VARIANTS: Final[dict[str, Entry | PeerEntry | LimitEntry]] = {
    "bare": _plain(Bare),
    "naive": _plain(Naive),
    "one confirm at a time": Entry(_wrapped(waits=True), where=REAL),
    "window": Entry(_wrapped()),
    "batch 50": Entry(_wrapped(batch=50)),
    "batch 50, 1 % failing": Entry(_wrapped(batch=50, attempts=1), where=REAL, place={"failing": 0.01}),
    "batch 50 without idemp": _plain(Batched, size=50),
    "batch handler 200": Entry(_wrapped(WrappedSets, batch=200)),
    "batch handler 200 without idemp": _plain(Batched, size=200, set_based=True),
    "not opted in": Entry(_wrapped(idempotent=False), where=REAL),
    "duplicates": Entry(_wrapped(Duplicates)),
    "duplicates pending": Entry(_wrapped(Duplicates, redispatch="pending"), where=REAL),
    "duplicates in batches": Entry(_wrapped(Duplicates, batch=50)),
    "duplicates pending in batches": Entry(_wrapped(Duplicates, redispatch="pending", batch=50), where=REAL),
    "bare, outputs of 8 KiB": _plain(Bare, where=REAL, place=LONG),
    "window, outputs of 8 KiB": Entry(_wrapped(), where=REAL, place=LONG),
    "4 threads, bare": Entry(several(outside.bare, threads=4), where=REAL),
    "4 threads": Entry(several(outside.wrapped, threads=4), where=REAL),
    "4 processes, bare": Entry(several(outside.bare, processes=4), where=REAL),
    "4 processes": Entry(several(outside.wrapped, processes=4), where=REAL),
    **{name: PeerEntry(peer) for name, peer in PEERS.items()},
    "limit: pgbench, bare": LimitEntry(
        lambda setting: limits.PgBench(setting.servers.database("postgresql"), limits.BARE)
    ),
    "limit: pgbench, claim": LimitEntry(
        lambda setting: limits.PgBench(setting.servers.database("postgresql"), limits.CLAIM)
    ),
    "limit: py-amqp, consume and ack": LimitEntry(lambda setting: limits.Consuming(setting.engine, setting.broker)),
    "limit: py-amqp, publish and confirm": LimitEntry(
        lambda setting: limits.Publishing(setting.engine, setting.broker)
    ),
    "window, statement by statement": Entry(_wrapped(StatementByStatement), where=DESIGNS),
    "batch 50, statement by statement": Entry(_wrapped(StatementByStatement, batch=50), where=DESIGNS),
    "batch handler 50": Entry(_wrapped(WrappedSets, batch=50), where=DESIGNS),
    "batch handler 400": Entry(_wrapped(WrappedSets, batch=400), where=DESIGNS),
    "batch 200": Entry(_wrapped(batch=200), where=DESIGNS),
    "duplicates in batches of 200": Entry(_wrapped(Duplicates, batch=200), where=DESIGNS),
    "duplicates pending in batches of 200": Entry(_wrapped(Duplicates, redispatch="pending", batch=200), where=DESIGNS),
    "2 processes": Entry(several(outside.wrapped, processes=2), where=DESIGNS),
}


def names_for(database: str, broker: str, *, designs: bool = False) -> list[str]:
    """The variants that make sense there; with those that were not taken, if asked for."""
    real = (database, broker) == ("postgresql", "rabbitmq")
    wanted = {EVERYWHERE, *((REAL,) if real else ()), *((DESIGNS,) if real and designs else ())}
    return [name for name, entry in VARIANTS.items() if entry.where in wanted]
