"""The cleaner, beside workers that go on."""

from __future__ import annotations

import threading
import time
from uuid import UUID

import pytest
from sqlalchemy import insert, select

from idemp import Context, Idempotent, Retry
from idemp.identity import uuid7
from tests.worker.test_loop import wait_for
from tests.world import SINK, Order, Shipped, World, effect


def send_one(message: Order, ctx: Context) -> None:
    ctx.connection.execute(effect.insert(), {"what": message.order_id})
    ctx.send(Shipped(order_id=message.order_id, part=0), to=SINK)


@pytest.mark.parametrize(("expired", "deliveries"), [(3_000, 50), pytest.param(100_000, 1_000, marks=pytest.mark.slow)])
def test_expired_claims_go_while_deliveries_come(url: str, expired: int, deliveries: int) -> None:
    world = World(url, send_one, Idempotent(key="order_id", retention="1h", retry=Retry(attempts=1)))
    world.send("old")
    worker = world.worker()
    world.work(worker)
    world.send("stuck")
    worker.protocol.dispatcher.publisher = None  # its output stays pending
    worker.step(poll=0.0)
    tables, key = world.database.tables, world.database.dialect.key
    names = {row.name: row.id for row in _all(world, select(tables.name))}
    long_ago = time.time() - 7_200
    claim = {"consumer_id": names["shop"], "type_id": names["shop.Order"], "claimed_at": long_ago, "worker": "w"}
    rows = [{**claim, "message_key": key(UUID(uuid7())), "original_id": b"s:%d" % number} for number in range(expired)]
    with world.database.short() as connection:
        connection.execute(insert(tables.inbox), rows)
    world.pass_time(3_600)

    deleted: list[int] = []

    def purge() -> None:
        while more := worker.adapters.scheduler.purge():
            deleted.append(more)

    cleaner = threading.Thread(target=purge)
    ids = [f"new {number}" for number in range(deliveries)]
    world.send(*ids)
    fresh = world.worker()
    cleaner.start()
    wait_for(lambda: fresh.step(poll=0.0) == 0 and not world.rows())
    cleaner.join(300)
    assert (sum(deleted), len(deleted)) == (expired + 1, -(-(expired + 1) // 500))
    assert world.claimed() == {"stuck", *ids}  # an output of it is pending
    assert world.effects() == dict.fromkeys(["old", "stuck", *ids], 1)
    assert (world.dead(), world.rows()) == ([], [])

    world.send_raw(b'{"order_id": "old"}', {"type": "shop.Order", "message_id": "1", "timestamp": long_ago - 3_600})
    world.worker().step(poll=0.0)
    assert [each["rule"] for each in world.dead()] == ["late"]
    assert world.effects()["old"] == 1


def test_initiations_and_types_without_a_handler_are_purged_too(url: str) -> None:
    world = World(url, send_one)
    with world.app().initiate():
        pass
    world.send("1")
    world.work(world.worker())
    world.pass_time(8 * 86_400)
    other = World(url)
    assert other.app().adapters().scheduler.purge() == 2
    assert world.claims() == 0
    for each in (world, other):
        each.close()


def _all(world: World, query: object) -> list[object]:
    with world.database.engine.connect() as connection:
        return list(connection.execute(query))  # type: ignore[call-overload]
