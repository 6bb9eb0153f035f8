"""The small service of `tests.house`, on streams: a sale is an event of the stream of what is sold."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from idemp.broker.port import Binding, Topology
from idemp.inbox.memory import InMemoryStore
from idemp.inbox.sql import SqlStore, SqlStreams, create_engine_safely
from idemp.inbox.stream import InMemoryStreams, StreamInbox, stream_of
from idemp.testing.clock import FakeClock
from tests.house import House
from tests.inbox.sql.kept import make_tables

if TYPE_CHECKING:
    from collections.abc import Iterator

    from idemp import Context
    from idemp.inbox.port import UnitOfWork

STREAM = "A-1"
"""What `tests.house.sale` sells."""


class EventEffects:
    """Effects that are events of one stream."""

    def __init__(self, inbox: StreamInbox) -> None:
        self._inbox = inbox

    def write(self, unit: UnitOfWork, name: str) -> None:
        ctx = cast("Context", unit)
        ctx.publish({"version": stream_of(ctx).version + 1}, type=name)

    def count(self, name: str) -> int:
        stream = self._inbox.read(STREAM)
        assert [event.version for event in stream.events] == list(range(1, stream.version + 1))
        return sum(event.type == name for event in stream.events)

    def clash(self, unit: UnitOfWork) -> None:
        raise KeyError


class StreamHouse(House):
    """One consumer whose messages are about what they sell."""

    inbox: StreamInbox

    def __init__(self, inbox: StreamInbox, clock: FakeClock) -> None:
        super().__init__(inbox, EventEffects(inbox), clock)
        self.inbox = inbox
        bindings = (Binding("audit", "#"),)
        self.broker.declare(Topology(exchange="idemp", queues=("audit",), bindings=bindings))

    def sells(self, *, outputs: int = 2, **policy: Any) -> None:
        """An event, and so many outputs to the queue `stock`."""
        super().sells(outputs=outputs, **{"entity": "sku", **policy})


def memory_house() -> StreamHouse:
    clock = FakeClock()
    return StreamHouse(StreamInbox(InMemoryStreams(), InMemoryStore(clock), clock), clock)


@contextmanager
def sql_house(url: str = "sqlite://") -> Iterator[StreamHouse]:
    clock, engine = FakeClock(), create_engine_safely(url)
    make_tables(engine)
    beside = SqlStore(engine, clock=clock)
    try:
        yield StreamHouse(StreamInbox(SqlStreams(engine), beside, clock), clock)
    finally:
        beside.close()
        engine.dispose()
