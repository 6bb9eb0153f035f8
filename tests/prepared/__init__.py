"""A shop that keeps its orders in one database and its messages in another."""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import Column, MetaData, String, Table, create_engine, func, make_url, select

from idemp import App, Settings
from idemp.prepared import PreparedMessages, SqlBarrier
from idemp.sql.broker import SqlBroker
from idemp.sql.engine import Database, spelt
from idemp.sql.scheduler import SqlScheduler
from idemp.testing.app import let_pass
from idemp.worker.relay import Relay

metadata = MetaData()
# No unique constraint: it would hide work that is done twice.
order = Table("orders", metadata, Column("id", String(50)))
SINK, TYPE = "stock", "stock.Reserve"


class Shop:
    """Everything of one process."""

    def __init__(self, url: str, shop: str, **options: Any) -> None:
        made, arguments = spelt(make_url(shop))
        self.engine = create_engine(made, **arguments)
        self.barrier = SqlBarrier(self.engine)
        self.database = Database(url)
        self.app = App("orders", settings=Settings(database_url=url))
        self.messages = PreparedMessages(self.app, **{"checker": self.barrier, **options})

    def create(self) -> Shop:
        metadata.create_all(self.engine)
        self.barrier.create()
        SqlBroker(self.database, "producer").declare(SINK, [])
        return self

    def place(self, key: str, *, fails: bool = False) -> bool:
        def work(session: Any) -> None:
            session.execute(order.insert(), {"id": key})
            if fails:
                raise RuntimeError("no")

        return self.messages.prepare({"order_id": key}, to=SINK, type=TYPE, key=key).submit(work)

    def relay(self) -> None:
        """Let all waits run out, and a worker's relay do what is to be done."""
        parts: Any = self.app.adapters()
        publisher = parts.broker.publisher()
        relay = Relay(SqlScheduler(self.database, "relay"), publisher, 10.0)
        for _ in range(2):
            let_pass(self.database, 3600)
            while self.messages.check() or relay.turn():
                pass
        publisher.close()

    def orders(self) -> list[str]:
        with self.engine.connect() as connection:
            return sorted(connection.scalars(select(order.c.id)))

    def published(self) -> dict[str, set[str]]:
        """Return the ids of the messages of each order."""
        message, found = self.database.tables.message, dict[str, set[str]]()
        with self.database.queue_engine.connect() as connection:
            for row in connection.execute(select(message).where(message.c.queue == SINK)):
                found.setdefault(json.loads(row.body)["order_id"], set()).add(json.loads(row.headers)["message_id"])
        return found

    def waiting(self) -> int:
        pending = self.database.tables.pending
        with self.database.engine.connect() as connection:
            return int(connection.scalar(select(func.count()).select_from(pending)) or 0)

    def close(self) -> None:
        self.app.close()
        self.database.close()
        self.engine.dispose()
