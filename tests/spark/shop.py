"""An app that Spark's workers import, and what tests ask of its database."""

from __future__ import annotations

import json
import os
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sqlalchemy import text

from idemp import App, Context, Idempotent, Message
from idemp.broker.memory import InMemoryBroker
from idemp.broker.port import Topology
from idemp.bulk import SqlSet
from idemp.clock import SystemClock
from idemp.inbox.sql import SqlStore, Tables, create_engine_safely
from idemp.inbox.sql.schema import upgrade
from tests.inbox.sql.unseen import end_unseen

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sqlalchemy import Engine

WHERE = "tests.spark.shop:app"
ORDER = "shop.Order"
SETS = {
    ORDER: SqlSet(
        effects=["INSERT INTO sale (order_id, sku) SELECT id, payload ->> 'sku' FROM {fresh}"],
        outputs="SELECT place, 'stock.Reserve' AS type, payload AS body, 'stock' AS queue FROM {fresh}",
    )
}


def order(message: dict[str, Any], ctx: Context) -> None:
    if message.get("poison"):
        raise ValueError("no such sku")
    if "dies" in message and once(message["dies"]):
        os.kill(os.getpid(), signal.SIGKILL)
    ctx.connection.execute(
        text("INSERT INTO sale (order_id, sku) VALUES (:id, :sku)"), {"id": ctx.message_id, "sku": message["sku"]}
    )
    if message.get("ends"):
        end_unseen(ctx.connection)
    ctx.send({"sku": message["sku"]}, to="stock", type="stock.Reserve")


def cancel(message: dict[str, Any], ctx: Context) -> None:
    ctx.connection.execute(
        text("INSERT INTO sale (order_id, sku) VALUES (:id, 'cancelled')"), {"id": str(message["order_id"])}
    )


def made(**wiring: Any) -> App:
    app = App("shop", **wiring)
    app.handler(dict, type=ORDER, policy=Idempotent(batch=100))(order)
    app.handler(dict, type="shop.Cancel", policy=Idempotent(key="order_id"))(cancel)
    return app


app = made(broker="local://unused.db")


def once(marker: str) -> bool:
    """Whether nobody asked for this marker before; several processes may ask."""
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


class Shop:
    """The database, as a test sees it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.engine: Engine = create_engine_safely(url)
        upgrade(self.engine, Tables())
        with self.engine.begin() as connection:
            connection.execute(text("CREATE TABLE sale (order_id text NOT NULL, sku text NOT NULL)"))

    def count(self, what: str) -> int:
        with self.engine.connect() as connection:
            return connection.execute(text(f"SELECT count(*) FROM {what}")).scalar_one()

    def sales(self) -> list[str]:
        """The orders that had an effect, once for each."""
        with self.engine.connect() as connection:
            return list(connection.execute(text("SELECT order_id FROM sale ORDER BY order_id")).scalars())

    def counts(self) -> tuple[int, int, int]:
        """Effects, outputs, and outputs that a relay is to send."""
        return self.count("sale"), self.count("idemp_output"), self.count("idemp_pending")

    def handle_online(self, messages: Sequence[dict[str, Any]]) -> None:
        """As the online consumer does it."""
        broker = InMemoryBroker(SystemClock())
        broker.declare(Topology(exchange="idemp", queues=("stock",)))
        protocol = made(store=SqlStore(self.engine), broker=broker).protocol(broker.publisher())
        for each in messages:
            protocol.process(Message(body=each["body"].encode(), type=each["type"], message_id=each["id"]))
        protocol.dispatcher.flush()

    def close(self) -> None:
        self.engine.dispose()


@contextmanager
def shop_in(url: str) -> Iterator[Shop]:
    shop = Shop(url)
    try:
        yield shop
    finally:
        shop.close()


def message(number: int, **body: Any) -> dict[str, Any]:
    """A row: an order by its number."""
    return {"id": f"order-{number}", "type": ORDER, "body": json.dumps({"sku": f"sku-{number}", **body})}
