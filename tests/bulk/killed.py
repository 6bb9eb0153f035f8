"""A process that handles one chunk, and is killed right before or right after its COMMIT: `python -m tests.bulk.killed`."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any, NoReturn

from sqlalchemy import Engine, text

from idemp import App, Context, Idempotent, Settings
from idemp.broker.memory import InMemoryBroker
from idemp.bulk import Bulk, Row, SqlSet
from idemp.inbox.sql import SqlStore, create_engine_safely
from idemp.inbox.sql.unit import SqlUnit

NUMBER = 200
SALE = "shop.Sale"
SET = SqlSet(
    effects=["INSERT INTO sale (id) SELECT id FROM {fresh}"],
    outputs="SELECT place, 'stock.Reserve' AS type, jsonb_build_object('of', id) AS body, 'stock' AS queue FROM {fresh}",
)


def bulk_of(engine: Engine, *, by_set: bool) -> Bulk:
    """The service, on a database whose tables are there."""
    app = App("shop", store=SqlStore(engine), broker=InMemoryBroker(), settings=Settings())

    def sell(message: dict[str, Any], ctx: Context) -> None:
        ctx.connection.execute(text("INSERT INTO sale (id) VALUES (:id)"), {"id": ctx.message_id})
        ctx.send({"of": ctx.message_id}, to="stock", type="stock.Reserve")

    app.handler(dict, type=SALE, policy=Idempotent())(sell)
    return Bulk(app, sets={SALE: SET} if by_set else {})


def chunk(*, by_set: bool) -> Any:
    """The same rows each time."""
    rows = [Row(id=f"m{number}", type=SALE, body=b"{}", position=f"f#{number}") for number in range(NUMBER)]
    if not by_set:
        return rows
    import pyarrow as pa

    return pa.table({name: [getattr(row, name) for row in rows] for name in ("id", "type", "body", "position")})


def main(url: str, lane: str, point: str) -> None:
    """Handle the chunk, and die."""
    commit = SqlUnit.commit

    def dying(unit: SqlUnit) -> NoReturn:
        if point == "after":
            commit(unit)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    SqlUnit.commit = dying  # type: ignore[method-assign]
    by_set = lane == "set"
    bulk_of(create_engine_safely(url), by_set=by_set).run(chunk(by_set=by_set))


if __name__ == "__main__":
    main(*sys.argv[1:])
