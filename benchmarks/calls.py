"""Count the Python functions of idemp that run for one delivery: `python -m benchmarks.calls [--list]`.

A group of one on SQLite, from receive to ack: one output, an opted-in type with a key in the body. SQLAlchemy and pydantic are not
counted. Counts do not depend on the machine, so a test can keep them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

from pydantic import BaseModel
from sqlalchemy import text

import idemp
from idemp import App, Context, Idempotent, Settings
from idemp.identity import uuid7
from idemp.messages import Output
from idemp.sql.engine import Database
from idemp.sql.schema import upgrade
from idemp.worker import Worker

PACKAGE = str(Path(idemp.__file__).parent)


class Order(BaseModel):
    __message_type__ = "bench.Order"
    order_id: int


class Placed(BaseModel):
    __message_type__ = "bench.Placed"
    order_id: int


def place(message: Order, ctx: Context) -> None:
    ctx.connection.execute(text("INSERT INTO effect VALUES (:id)"), {"id": message.order_id})
    ctx.send(Placed(order_id=message.order_id), to="bench.sink")


def record(deliveries: int = 10) -> list[str]:
    """Return the functions of idemp in the order of their calls, as `file:name`, for a number of deliveries, each a group of one."""
    calls: list[str] = []

    def called(frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls.append(f"{Path(frame.f_code.co_filename).relative_to(PACKAGE)}:{frame.f_code.co_qualname}")

    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/calls.db"
        database = Database(url)
        upgrade(database)
        with database.short() as connection:
            connection.execute(text("CREATE TABLE effect (id INTEGER)"))
        app = App("bench", settings=Settings(database_url=url, group=1))
        app.handler(Order, policy=Idempotent(key="order_id"))(place)
        worker = Worker(app)
        broker = app.adapters().broker
        broker.declare("bench.sink", [])
        orders = [
            Output("", "send", "", "bench", {"message_id": uuid7(), "type": "bench.Order"}, b'{"order_id":%d}' % n)
            for n in range(deliveries + 3)
        ]
        broker.publisher().publish(orders, 10.0)
        for _ in range(3):  # statements are compiled once
            worker.step()
        worker.intake._next_rows = worker._next_beat = float("inf")  # four times a second, whatever the load
        sys.setprofile(called)
        try:
            for _ in range(deliveries):
                assert worker.step() == 1
        finally:
            sys.setprofile(None)
        worker.close()
        app.close()
        database.close()
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="name the functions")
    arguments = parser.parse_args()
    deliveries = 10
    calls = record(deliveries)
    if arguments.list:
        for name, times in Counter(calls).most_common():
            print(f"{times / deliveries:6.1f}  {name}")
    files = [call.partition(":")[0] for call in calls]
    changes = sum(one != other for one, other in pairwise(files))
    print(f"{len(calls) / deliveries:.1f} calls and {changes / deliveries:.1f} changes of file a delivery")


if __name__ == "__main__":
    main()
