"""Inboxes for tests of what reads and archives them: with few rows that are known, or many that are counted."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from sqlalchemy import text

from idemp.identity import EffectiveId, effective_id
from idemp.inbox.port import Claim, Mark
from idemp.inbox.sql import SqlStore, create_engine_safely
from idemp.inbox.sql.schema import upgrade
from idemp.messages import Message, Output, OutputKind
from idemp.testing.clock import FakeClock

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from uuid import UUID

START = datetime(2026, 3, 1, 12, tzinfo=UTC)
_MANY = text(
    """
    INSERT INTO idemp_inbox (message_key, consumer_id, type_id, worker_id, claimed_at, fingerprint, original_id)
    SELECT gen_random_uuid(), :consumer, :type, :worker, CAST(:since AS timestamptz) + number * interval '1 second',
           decode(lpad(to_hex(number), 64, '0'), 'hex'), 'order-' || number
    FROM generate_series(CAST(:first AS int), CAST(:last AS int)) AS number
    """
)


@dataclass
class Inbox:
    """An inbox with a clock that tests move, and the file that tells Spark's tasks where it is."""

    store: SqlStore
    clock: FakeClock
    url_file: str
    url: str
    claims: list[Claim] = field(default_factory=list)

    def handle(
        self,
        id_: str,
        *,
        consumer: str = "shop",
        message_type: str = "shop.Order",
        outputs: int = 0,
        confirmed: bool = True,
        position: str | None = None,
    ) -> EffectiveId:
        """A handling, at the clock's time."""
        claim = Claim(
            consumer=consumer,
            id=effective_id("envelope", id_),
            message_type=message_type,
            fingerprint=id_.encode().ljust(32, b".")[:32],
            wait=timedelta(seconds=1),
            position=position,
        )
        made = [_output(claim.id.key, number) for number in range(outputs)]
        with self.store.begin([claim]) as unit:
            unit.claim(claim)
            unit.store_outputs(claim, made, timedelta(seconds=30))
            unit.commit()
        if confirmed and made:
            self.store.record([Mark(claim, tuple(each.id for each in made))])
        self.claims.append(claim)
        return claim.id

    def consume(self, time: timedelta, consumer: str = "shop") -> None:
        """The consumer consumes without a break."""
        end = self.clock.now() + time
        while self.clock.now() < end:
            self.clock.advance(min(timedelta(seconds=30), end - self.clock.now()))
            self.store.upkeep.beat("w", relay=False, consumers=[consumer])

    def consumed_for(self, time: timedelta, consumer: str = "shop") -> None:
        """As `consume`, at once."""
        interval = {"started_at": self.clock.now(), "ended_at": self.clock.now() + time}
        values = {"consumer_id": self.store.names.id("consumer", consumer), **interval}
        with self.store.engine.begin() as connection:
            connection.execute(self.store.tables.activity.insert(), values)
        self.clock.advance(time)

    def fill(self, first: int, last: int, *, consumer: str = "shop", message_type: str = "shop.Order") -> None:
        """Many claims, `order-<number>`, a second apart (PostgreSQL)."""
        names = self.store.names
        values: dict[str, Any] = {
            "consumer": names.id("consumer", consumer),
            "type": names.id("message_type", message_type),
            "worker": names.id("worker", self.store.worker),
            "since": START,
            "first": first,
            "last": last,
        }
        with self.store.engine.begin() as connection:
            connection.execute(_MANY, values)

    def count(self, table: str = "inbox") -> int:
        """Rows of a table."""
        with self.store.engine.connect() as connection:
            return int(connection.scalar(text(f"SELECT count(*) FROM idemp_{table}")) or 0)


def _output(key: UUID, ordinal: int) -> Output:
    from idemp.identity import output_id

    id_ = output_id("idemp", "shop", key, ordinal)
    message = Message(body=b'{"n": %d}' % ordinal, type="stock.Reserve", message_id=str(id_))
    return Output(id=id_, ordinal=ordinal, kind=OutputKind.SEND, exchange="", routing_key="stock", message=message)


@contextmanager
def inbox_at(url: str, folder: Path) -> Iterator[Inbox]:
    """An empty inbox in this database."""
    engine = create_engine_safely(url)
    clock = FakeClock(START)
    store = SqlStore(engine, clock=clock, worker="host-1")
    upgrade(engine, store.tables)
    file = folder / "url"
    file.write_text(url, encoding="utf-8")
    try:
        yield Inbox(store, clock, str(file), url)
    finally:
        store.close()
        engine.dispose()
