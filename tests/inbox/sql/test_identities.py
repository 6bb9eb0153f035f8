"""A deploy that changes what makes two messages the same is refused, until `previous=` covers it or the window is over."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import select, update

from idemp.errors import IdentityChanged
from idemp.inbox.port import Identity
from idemp.inbox.sql.upkeep import SqlUpkeep

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from idemp.inbox.sql.tables import Tables
    from tests.inbox.sql.conftest import MovedClock
    from tests.inbox.sql.rows import Rows

TYPE = "orders.Place"
HOUR = timedelta(hours=1)
OLD = Identity(TYPE, "field:order_no")
NEW = Identity(TYPE, "field:order_id")
OFF = Identity(TYPE, "off")


class Deploys:
    """Starts one app after another on the same database."""

    def __init__(self, upkeep: SqlUpkeep) -> None:
        self._upkeep = upkeep

    def start(
        self, *current: Identity, consumer: str = "orders", queue: str = "orders", covers: tuple[Identity, ...] = ()
    ) -> None:
        covered = {identity.message_type: covers for identity in current}
        retention = {identity.message_type: HOUR for identity in current}
        self._upkeep.agree_identities(consumer, queue, current, covered, retention)


@pytest.fixture
def deploys(engine: Engine, tables: Tables, clock: MovedClock) -> Deploys:
    return Deploys(SqlUpkeep(engine, tables, clock, "host-1"))


def test_first_start_stores_and_the_same_again_changes_nothing(deploys: Deploys, rows: Rows) -> None:
    deploys.start(OLD)
    deploys.start(OLD)
    assert rows.count(rows.tables.identity) == 1


CHANGES = [
    pytest.param(OLD, NEW, OLD, "previous=[Previous(key='order_no')]", id="key"),
    pytest.param(
        Identity(TYPE, "message_id"), NEW, Identity(TYPE, "message_id"), "Previous(key=Key.message_id())", id="envelope"
    ),
    pytest.param(
        Identity(TYPE, "header:x-id"),
        NEW,
        Identity(TYPE, "header:x-id"),
        "Previous(key=Key.header('x-id'))",
        id="header",
    ),
    pytest.param(
        Identity(TYPE, "field:a,b"), NEW, Identity(TYPE, "field:a,b"), "Previous(key=['a', 'b'])", id="several fields"
    ),
    pytest.param(OFF, NEW, OFF, "Previous(opted_in=False)", id="opted in"),
    pytest.param(OLD, OFF, OLD, "Previous(key='order_no')", id="opted out"),
    pytest.param(
        OLD,
        Identity("orders.PlaceOrder", "field:order_no", aliases=(TYPE,)),
        OLD,
        "Previous(type='orders.Place')",
        id="type renamed",
    ),
    pytest.param(
        OLD,
        Identity("orders.PlaceOrder", "field:order_id", aliases=(TYPE,)),
        OLD,
        "Previous(key='order_no', type='orders.Place')",
        id="type renamed and key",
    ),
]


@pytest.mark.parametrize(("before", "after", "cover", "advice"), CHANGES)
def test_change_is_refused_until_covered(
    deploys: Deploys, before: Identity, after: Identity, cover: Identity, advice: str
) -> None:
    deploys.start(before)
    for _ in range(2):  # a refusal stores nothing
        with pytest.raises(IdentityChanged) as caught:
            deploys.start(after)
    assert advice in caught.value.fix
    assert before.descriptor in caught.value.message
    deploys.start(after, covers=(cover,))
    deploys.start(after, covers=(cover,))


@pytest.mark.parametrize(("before", "after", "cover", "advice"), CHANGES)
def test_cover_is_needed_for_one_window_of_consuming(
    deploys: Deploys, clock: MovedClock, rows: Rows, before: Identity, after: Identity, cover: Identity, advice: str
) -> None:
    deploys.start(before)
    deploys.start(after, covers=(cover,))
    rows.consumed(clock, minutes=59)
    clock.move(days=3)  # downtime does not count
    with pytest.raises(IdentityChanged):
        deploys.start(after)
    rows.consumed(clock, minutes=2)
    deploys.start(after)
    assert rows.count(rows.tables.identity) == 1


def test_other_cover_does_not_do(deploys: Deploys) -> None:
    deploys.start(OLD)
    with pytest.raises(IdentityChanged):
        deploys.start(NEW, covers=(Identity(TYPE, "field:number"), Identity("orders.Other", "field:order_no")))


def test_two_changes_inside_one_window_are_both_to_be_covered(deploys: Deploys) -> None:
    deploys.start(OLD)
    deploys.start(NEW, covers=(OLD,))
    third = Identity(TYPE, "message_id")
    with pytest.raises(IdentityChanged):
        deploys.start(third, covers=(NEW,))
    with pytest.raises(IdentityChanged):
        deploys.start(third, covers=(OLD,))
    deploys.start(third, covers=(OLD, NEW))


def test_rollback_to_what_the_successor_covers(deploys: Deploys) -> None:
    deploys.start(OLD)
    deploys.start(NEW, covers=(OLD,))
    deploys.start(OLD)  # an old process restarted in the middle of a deploy: the new ones claim both ids
    deploys.start(NEW, covers=(OLD,))
    with pytest.raises(IdentityChanged):
        deploys.start(NEW)


def test_rollback_to_off_is_refused(deploys: Deploys) -> None:
    deploys.start(OFF)
    deploys.start(NEW, covers=(OFF,))
    with pytest.raises(IdentityChanged):
        deploys.start(OFF)


def test_rename_is_harmless_to_ids_of_the_envelope(deploys: Deploys) -> None:
    deploys.start(Identity(TYPE, "message_id", scoped_by_type=False))
    deploys.start(Identity("orders.PlaceOrder", "message_id", aliases=(TYPE,), scoped_by_type=False))


def test_new_types_and_vanished_ones_are_nobodys_concern(deploys: Deploys) -> None:
    cancel = Identity("orders.Cancel", "field:order_id")
    deploys.start(OLD)
    deploys.start(OLD, cancel)
    deploys.start(cancel)
    deploys.start(OLD, cancel)


def test_vanished_type_that_returns_with_another_key_is_refused(deploys: Deploys) -> None:
    deploys.start(OLD)
    deploys.start()
    with pytest.raises(IdentityChanged):
        deploys.start(NEW)


def test_renamed_consumer_is_refused_until_covered(deploys: Deploys, clock: MovedClock, rows: Rows) -> None:
    deploys.start(OLD)
    with pytest.raises(IdentityChanged, match="the queue's consumer was 'orders'") as caught:
        deploys.start(OLD, consumer="shop")
    assert "Previous(consumer='orders')" in caught.value.fix
    cover = (Identity(TYPE, "field:order_no", consumer="orders"),)
    deploys.start(OLD, consumer="shop", covers=cover)
    deploys.start(OLD, consumer="orders")  # an old process restarted meanwhile
    deploys.start(OLD, consumer="shop", covers=cover)
    with pytest.raises(IdentityChanged):
        deploys.start(OLD, consumer="shop")
    rows.consumed(clock, minutes=61, consumer="shop")
    deploys.start(OLD, consumer="shop")


def test_consumers_of_other_queues_do_not_matter(deploys: Deploys) -> None:
    deploys.start(OLD)
    deploys.start(NEW, consumer="billing", queue="billing")


def test_renamed_consumer_is_refused_through_each_of_its_queues(deploys: Deploys) -> None:
    for number in (0, 1, 2, 0):
        deploys.start(OLD, queue=f"orders.{number}")
    for number in range(3):
        with pytest.raises(IdentityChanged, match="the queue's consumer was 'orders'"):
            deploys.start(OLD, consumer="shop", queue=f"orders.{number}")
    cover = (Identity(TYPE, "field:order_no", consumer="orders"),)
    for number in range(3):
        deploys.start(OLD, consumer="shop", queue=f"orders.{number}", covers=cover)
    deploys.start(OLD, consumer="shop", queue="orders.3", covers=cover)  # one more than there were
    with pytest.raises(IdentityChanged):
        deploys.start(OLD, consumer="shop", queue="orders.0")


def test_queue_that_a_consumer_left_is_free_after_a_window_of_its_consuming(
    deploys: Deploys, clock: MovedClock, rows: Rows
) -> None:
    deploys.start(OLD, queue="orders.0")
    deploys.start(OLD, queue="orders.1")
    rows.consumed(clock, minutes=59)
    clock.move(days=3)  # downtime does not count
    with pytest.raises(IdentityChanged):
        deploys.start(OLD, consumer="shop", queue="orders.0")
    rows.consumed(clock, minutes=2)
    deploys.start(OLD, consumer="shop", queue="orders.0")


def test_queue_in_use_is_never_left(engine: Engine, tables: Tables, clock: MovedClock) -> None:
    """However long ago its worker started, and whoever of the same consumer started since."""
    workers = [SqlUpkeep(engine, tables, clock, f"host-{number}") for number in range(3)]
    for number in (0, 1, 2):
        Deploys(workers[number]).start(OLD, queue=f"orders.{number}")
    for _ in range(3 * 60):
        clock.move(seconds=50)
        for worker in (workers[0], workers[2]):
            worker.beat(relay=False, consumers=["orders"])
    renamed = Deploys(SqlUpkeep(engine, tables, clock, "host-4"))
    with pytest.raises(IdentityChanged):
        renamed.start(OLD, consumer="shop", queue="orders.0")
    renamed.start(OLD, consumer="shop", queue="orders.1")


def test_queues_of_the_former_release_count(deploys: Deploys, engine: Engine, clock: MovedClock, rows: Rows) -> None:
    """It keeps the latest one, in the consumer's own row, and reads no other."""
    deploys.start(OLD)
    deploys.start(OLD, queue="orders.1")
    with engine.connect() as connection:
        assert connection.scalar(select(rows.tables.consumer.c.queue)) == "orders.1", "it is written for it, too"
    with engine.begin() as connection:  # as it leaves a start
        connection.execute(update(rows.tables.consumer).values(queue="former"))
    with pytest.raises(IdentityChanged):
        deploys.start(OLD, consumer="shop", queue="former")
    deploys.start(OLD, queue="orders.1")
    rows.consumed(clock, minutes=59)
    with pytest.raises(IdentityChanged):
        deploys.start(OLD, consumer="shop", queue="former")
    rows.consumed(clock, minutes=2)
    deploys.start(OLD, consumer="shop", queue="former")


def test_processes_that_start_at_once_do_not_fail_each_other(
    engine: Engine, tables: Tables, clock: MovedClock, rows: Rows
) -> None:
    types = [Identity(f"orders.T{number}", "field:order_no") for number in range(4)]

    def start(number: int) -> None:
        Deploys(SqlUpkeep(engine, tables, clock, f"host-{number}")).start(*types)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(start, range(8)))
    assert rows.count(tables.identity) == 4


def test_two_names_for_one_queue_at_once_let_one_in(engine: Engine, tables: Tables, clock: MovedClock) -> None:
    def start(consumer: str) -> bool:
        try:
            Deploys(SqlUpkeep(engine, tables, clock, "host-1")).start(OLD, consumer=consumer)
        except IdentityChanged:
            return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(start, ["a", "b", "c", "d"])) == 1
