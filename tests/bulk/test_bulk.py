"""Chunks on the inbox of online consumers: what each row comes to, what is kept, and what fails."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest

from idemp import BatchContext, Context, Idempotent, Key, Outcome, Previous
from idemp.bulk import Bulk, Report, Row
from idemp.bulk.rows import kept_position
from idemp.errors import ConfigurationError, StoreUnavailable, TransientStoreError
from idemp.identity import new_id
from idemp.testing.faulty import CommitFault
from tests.house import SELL, House, memory_house, sale

if TYPE_CHECKING:
    from collections.abc import Sequence

    from idemp.messages import Message

BODY, OTHER = b'{"sku": "A-1"}', b'{"sku": "B-2"}'


class OutOfStockError(Exception):
    """What the handler raises for some."""


class Sells:
    """The usual handler, which fails for some."""

    def __init__(self, house: House, **policy: Any) -> None:
        self.house = house
        self.runs: Counter[str] = Counter()
        self.failing: set[str] = set()
        house.app.handler(dict, type=SELL, policy=Idempotent(**policy))(self.sell)

    def sell(self, message: dict[str, Any], ctx: Context) -> None:
        assert ctx.message_id is not None
        self.runs[ctx.message_id] += 1
        self.house.effects.write(ctx, "sale")  # type: ignore[arg-type]
        ctx.send({"of": ctx.message_id}, to="stock", type="stock.Reserve")
        if ctx.message_id in self.failing:
            raise OutOfStockError(ctx.message_id)


@pytest.fixture
def shop(house: House) -> Sells:
    return Sells(house)


def row(name: str | None, position: str | None = None, **fields: Any) -> Row:
    return Row(**{"id": name, "type": SELL, "body": BODY, "position": position, **fields})


def rows(*names: str, source: str = "old.json") -> list[Row]:
    return [row(name, f"{source}#{number}") for number, name in enumerate(names)]


def counted(report: Report) -> dict[str, int]:
    return {came.value: number for came, number in report.counts.items() if number}


def as_message(of: Row, **properties: Any) -> Message:
    return sale(of.id or "", of.body, **properties)


def test_one_transaction_for_all(shop: Sells) -> None:
    bulk, house = Bulk(shop.house.app), shop.house
    bulk.start()
    house.script.calls.clear()
    report = bulk.run(rows("a", "b", "c"))
    assert house.script.calls == ["begin", "claim", "store", "commit"]
    assert (counted(report), report.outputs, report.parked) == ({"new": 3}, 3, [])
    assert house.sales() == 3


def test_what_each_row_comes_to(shop: Sells) -> None:
    """The same position is our own retry, another one a duplicate, another payload a conflict, which is kept apart."""
    bulk, first = Bulk(shop.house.app), rows("a", "b", "c")
    bulk.run(first)
    again = [*first, *rows("a", "b", source="other.json"), row("c"), row("a", "old.json#0", body=OTHER), row("d")]
    report = bulk.run(again)
    assert counted(report) == {"replay": 3, "duplicate": 3, "conflict": 1, "new": 1}
    assert report.rows == len(again)
    assert [(each.row, each.error) for each in report.parked] == [(again[6], "PayloadConflict")]
    assert shop.runs == dict.fromkeys("abcd", 1)
    assert shop.house.sales() == 4


def test_an_id_twice_in_one_chunk(shop: Sells) -> None:
    """As in two chunks: the first one is handled, those after it are judged by it."""
    twice = [row("a", "f#1"), row("b", "f#2"), row("a", "f#1"), row("a", "f#3"), row("b", "f#4", body=OTHER)]
    report = Bulk(shop.house.app).run(twice)
    assert counted(report) == {"new": 2, "replay": 1, "duplicate": 1, "conflict": 1}
    assert shop.house.sales() == 2


def test_conflicts_that_are_no_matter(house: House) -> None:
    """Where a type's policy redispatches on conflicts there is nothing to keep apart."""
    Sells(house, on_conflict="redispatch")
    bulk = Bulk(house.app)
    bulk.run([row("a")])
    report = bulk.run([row("a", body=OTHER)])
    assert (counted(report), report.parked) == ({"conflict": 1}, [])


# Online and in bulk --------------------------------------------------------------------------------------------------

KEYS: dict[str, Any] = {
    "message id": Key.message_id(),
    "header": Key.header("x-id"),
    "field": "order_id",
    "fields": ["order_id", "of.part"],
    "digest": Key.digest(),
    "cloudevent": Key.cloudevent(),
    "function": lambda body: body["order_id"] * 2,
}


def orders(number: int) -> list[Row]:
    return [
        Row(
            id=f"m-{each}" if each % 2 else str(UUID(int=each)),
            type=SELL,
            body=json.dumps({"order_id": each, "of": {"part": str(each)}}).encode(),
            headers=json.dumps({
                "x-id": f"x-{each}", "cloudEvents_specversion": "1.0", "cloudEvents_source": "/shop",
                "cloudEvents_type": SELL, "cloudEvents_id": f"e-{each}",
            }),
            position=f"orders/0#{each}",
        )
        for each in range(number)
    ]  # fmt: skip


@pytest.mark.parametrize("key", KEYS)
def test_online_and_in_bulk_are_one(house: House, key: str) -> None:
    """Handled here, a duplicate there; and their outputs have the ids that they would have had there."""
    shop = Sells(house, key=KEYS[key])
    given = orders(6)
    messages = [replace(sale(each.id or "", each.body), headers=json.loads(each.headers or "")) for each in given]
    assert [house.deliver(message) for message in messages[:3]] == [Outcome.HANDLED] * 3
    bulk = Bulk(house.app)
    assert counted(bulk.run(given)) == {"duplicate": 3, "new": 3}
    assert counted(bulk.run(given)) == {"duplicate": 3, "replay": 3}
    assert [house.deliver(message) for message in messages[3:]] == [Outcome.REDISPATCHED] * 3
    assert max(shop.runs.values()) == 1
    assert house.sales() == 6
    alone = memory_house()
    Sells(alone, key=KEYS[key])
    for message in messages:
        alone.deliver(message)
    assert sorted(set(house.sent())) == sorted(alone.sent())


def test_outputs_are_the_relays(shop: Sells) -> None:
    """Nothing is sent by the chunk itself, and nothing twice."""
    house = shop.house
    report = Bulk(house.app).run(rows("a", "b"))
    assert (report.outputs, house.sent(), house.pending()) == (2, [], 2)
    assert house.relay().confirmed == 2
    assert house.pending() == 0


def test_outputs_that_are_never_sent(shop: Sells) -> None:
    house = shop.house
    assert Bulk(house.app, dispatch="never").run(rows("a", "b")).outputs == 2
    assert (house.pending(), house.relay().taken) == (0, 0)
    assert house.deliver(as_message(row("a"))) is Outcome.REDISPATCHED


def test_batch_handlers_get_no_more_than_they_asked_for(house: House) -> None:
    sizes: list[int] = []

    @house.app.batch_handler(dict, type=SELL, policy=Idempotent(batch=4))
    def sell(messages: list[dict[str, Any]], ctx: BatchContext) -> None:
        sizes.append(len(messages))
        for each in ctx.each:
            house.effects.write(ctx, "sale")  # type: ignore[arg-type]
            each.send({}, to="stock", type="stock.Reserve")

    names = [f"m{number}" for number in range(10)]
    assert counted(Bulk(house.app).run(rows(*names))) == {"new": 10}
    assert sizes == [4, 4, 2]
    assert house.sales() == 10


# Rows that can't be handled ------------------------------------------------------------------------------------------


def test_bad_rows_are_parked_with_the_reason(house: House) -> None:
    """And the others are handled all the same; the counts add up."""
    Sells(house)
    house.app.handler(dict, type="shop.Look")(lambda message: None)
    bad = {
        "MissingId": row(None),
        "InvalidId": row("  "),
        "UndecodableMessage": row("b", body=b"{"),
        "OversizedMessage": row("c", body=b'"%s"' % (b"x" * 9 * 2**20)),
        "UnknownMessageType": row("d", type="shop.Nothing"),
        "NotOptedIn": row("e", type="shop.Look"),
    }
    more = [row("f", body=None), row("g", headers="[]"), row("h", headers="{"), row("i" * 256), row("j", type=None)]
    given = [row("good"), *bad.values(), *more, row("better")]
    report = Bulk(house.app).run(given)
    assert counted(report) == {"new": 2, "parked": len(bad) + len(more)}
    assert [each.row for each in report.parked] == given[1:-1]
    assert [each.error for each in report.parked[: len(bad)]] == list(bad)
    assert [each.error for each in report.parked[len(bad) :]] == [
        "UndecodableMessage", "UndecodableMessage", "UndecodableMessage", "InvalidId", "UnknownMessageType",
    ]  # fmt: skip
    assert all(each.reason for each in report.parked)
    assert house.sales() == 2


def test_a_key_function_that_raises_is_the_rows_fault(house: House) -> None:
    Sells(house, key=lambda body: body["order"])
    report = Bulk(house.app).run([row("a"), row("b", body=b'{"order": 1}')])
    assert (counted(report), report.parked[0].error) == ({"parked": 1, "new": 1}, "KeyError")


def test_poison_is_found_and_parked(shop: Sells) -> None:
    """Those beside it are handled, exactly; when it is mended, a further run handles it alone."""
    names = [f"m{number}" for number in range(60)]
    shop.failing = {"m0", "m31", "m32", "m59"}
    bulk = Bulk(shop.house.app)
    report = bulk.run(rows(*names))
    assert counted(report) == {"new": 56, "parked": 4}
    assert {each.row.id for each in report.parked} == shop.failing
    assert {each.error for each in report.parked} == {"OutOfStockError"}
    assert shop.house.sales() == 56
    assert shop.house.pending() == 56
    shop.failing = {"m59"}
    report = bulk.run(rows(*names))
    assert counted(report) == {"replay": 56, "new": 3, "parked": 1}
    assert shop.house.sales() == 59


def test_one_row_alone(shop: Sells) -> None:
    shop.failing = {"b"}
    bulk = Bulk(shop.house.app)
    assert [counted(bulk.run([row(name)])) for name in "aba"] == [{"new": 1}, {"parked": 1}, {"duplicate": 1}]
    assert counted(bulk.run([])) == {}


def test_late_rows_are_parked(house: House) -> None:
    """Whether they were handled is no longer known; those that are still in the inbox are duplicates."""
    old, known = str(new_id(house.clock.now())), str(new_id(house.clock.now()))
    Sells(house, retention="5m")
    bulk = Bulk(house.app)
    bulk.run([row(known)])
    house.consume_for_ten_minutes()
    stamped = row("stamped", time=datetime(2025, 12, 1))
    report = Bulk(house.app).run([row(old), stamped, row(known), row("a")])
    assert counted(report) == {"parked": 2, "duplicate": 1, "new": 1}
    assert [each.error for each in report.parked] == ["LateMessage"] * 2
    forced = [row(old, headers='{"idemp-forced": 1}')]
    assert counted(bulk.run(forced)) == {"new": 1}


def test_positions_of_every_length_and_text(shop: Sells) -> None:
    """What a database can't keep is kept as its digest, and known again."""
    bulk = Bulk(shop.house.app)
    places = ["x" * 255, "x" * 256, "ü" * 200, "\x00", "\udce4", " blank "]
    given = [row(f"m{number}", place) for number, place in enumerate(places)]
    assert counted(bulk.run(given)) == {"new": len(places)}
    assert counted(bulk.run(given)) == {"replay": len(places)}
    assert len({kept_position(place) for place in places}) == len(places)


# Adoption, dry runs, former identities -------------------------------------------------------------------------------


def test_what_is_adopted_counts_as_handled(house: House) -> None:
    """No handler runs, however old it is, and a body is only needed where ids are read from it."""
    shop = Sells(house, retention="5m")
    house.consume_for_ten_minutes()
    adopting = Bulk(house.app, adopt=True)
    given = [row("a", time=datetime(2025, 1, 1, tzinfo=UTC)), row("b", body=None), row(None)]
    report = adopting.run(given)
    assert (counted(report), report.outputs) == ({"new": 2, "parked": 1}, 0)
    assert counted(adopting.run(given[:2])) == {"duplicate": 2}
    assert [house.deliver(sale(name, BODY)) for name in "ab"] == [Outcome.SKIPPED] * 2
    assert (shop.runs, house.sales()) == ({}, 0)


def test_adoption_without_bodies_needs_ids_beside_them(house: House) -> None:
    Sells(house, key="order_id")
    report = Bulk(house.app, adopt=True).run([row("a", body=None), row("b", body=b'{"order_id": 1}')])
    assert (counted(report), report.parked[0].error) == ({"parked": 1, "new": 1}, "MessageError")


def test_a_dry_run_says_what_would_be(shop: Sells) -> None:
    """The same as the run itself, and leaves nothing behind."""
    house = shop.house
    Bulk(house.app).run(rows("a", "b"))
    given = [*rows("a"), *rows("b", source="o"), row("c", "f#1"), row("c", "f#1"), row("c", "f#2"), row("d", body=b"{")]
    given += [row("a", body=OTHER), row("c", body=OTHER)]
    shop.runs.clear()
    dry = Bulk(house.app, dry_run=True).run(given)
    assert shop.runs == {}
    assert counted(dry) == {"replay": 2, "duplicate": 2, "new": 1, "parked": 1, "conflict": 2}
    wet = Bulk(house.app).run(given)
    assert wet.counts == dry.counts
    assert [each.row for each in wet.parked] == [each.row for each in dry.parked]


def test_former_identities_count(house: House) -> None:
    """Message by message, as in a worker: where a former id was handled, the present one stays free."""
    shop = Sells(house, key="order_no", previous=[Previous(key=Key.message_id())])
    given = [row(f"m{number}", f"f#{number}", body=b'{"order_no": %d}' % number) for number in range(3)]
    bulk = Bulk(house.app)
    assert counted(bulk.run(given)) == {"new": 3}
    assert counted(Bulk(house.app, dry_run=True).run(given)) == {"replay": 3}
    other = [replace(each, body=b'{"order_no": 7%d}' % number) for number, each in enumerate(given)]
    assert counted(bulk.run(other)) == {"conflict": 3}
    assert shop.house.sales() == 3


# The database --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["lost, committed", "lost, not committed", "transient"])
def test_commit_without_an_answer(shop: Sells, fault: CommitFault) -> None:
    """It is run again as a whole; what was committed is then a replay of our own."""
    house = shop.house
    house.script.commit_faults = [fault]
    report = Bulk(house.app).run(rows("a", "b", "c"))
    assert counted(report) == {"replay" if fault == "lost, committed" else "new": 3}
    assert (house.sales(), house.pending()) == (3, 3)


def test_the_database_goes_away(shop: Sells, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said, and nothing is lost: what was committed before is a replay in the next run."""
    house, names = shop.house, [f"m{number}" for number in range(20)]
    shop.failing = {"m7"}
    bulk = Bulk(house.app)
    bulk.start()
    monkeypatch.setattr(bulk._steps, "obstacle", lambda: StoreUnavailable("away"))
    monkeypatch.setattr(bulk._steps, "_pause", lambda seconds: None)
    house.script.store_faults = [None, None, *[StoreUnavailable("away") for _ in range(6)]]
    with pytest.raises(StoreUnavailable):
        bulk.run(rows(*names))
    assert house.sales() == 7
    assert counted(bulk.run(rows(*names))) == {"replay": 7, "new": 12, "parked": 1}
    assert house.sales() == 19


def test_somebody_holds_an_id() -> None:
    """The others are handled; when that goes on for too long it is said, and the rest is done in the next run."""
    house = memory_house()
    shop = Sells(house, claim_wait="1ms")
    bulk, given = Bulk(house.app), rows("a", "b", "c")
    member = house.worker().arrive(_delivery(as_message(given[1]))).member
    assert member is not None
    with house.store.begin() as other:
        other.claim(member.work.claims[0])
        with pytest.raises(TransientStoreError, match="held the id 'b'"):
            bulk.run(given)
    assert counted(bulk.run(given)) == {"replay": 2, "new": 1}
    assert shop.runs == {"a": 1, "b": 1, "c": 1}


def _delivery(message: Message) -> Any:
    from idemp.broker.port import Delivery

    return Delivery(message=message, queue="shop")


def test_wrong_set_handlers_are_refused(house: House) -> None:
    house.app.handler(dict, type="shop.Look")(lambda message: None)
    for name in ("shop.Look", "shop.Nothing"):
        with pytest.raises(ConfigurationError):
            Bulk(house.app, sets={name: Nothing()})


class Nothing:
    """Handles a set by doing nothing."""

    def handle(self, messages: Sequence[Any], ctx: BatchContext) -> None:
        """Nothing."""


def test_many(shop: Sells) -> None:
    """More ids than fit into one statement, some of them known."""
    names = [f"m{number}" for number in range(2_500)]
    bulk = Bulk(shop.house.app)
    assert counted(bulk.run(rows(*names[::10]))) == {"new": 250}
    report = bulk.run(rows(*names, source="other"))
    assert counted(report) == {"new": 2_250, "duplicate": 250}
    assert shop.house.sales() == shop.house.pending() == 2_500
