"""Handlers that take all new rows of a chunk at once, on each kind of database."""

from __future__ import annotations

import gc
import json
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import Engine, text

from idemp import Context, Idempotent
from idemp.broker.port import Binding, Topology
from idemp.bulk import ArrowSet, Bulk, Row, SqlSet
from idemp.errors import ConfigurationError
from tests.house import House, memory_house

if TYPE_CHECKING:
    from collections.abc import Iterator

    from idemp.context import BatchContext

BOOK = "shop.Book"
PAID = {
    "sqlite": "payload ->> '$.amount'", "postgresql": "payload ->> 'amount'", "mariadb": "JSON_VALUE(payload, '$.amount')",
}  # fmt: skip
ANSWER = {
    "sqlite": "json_object('amount', {paid})", "mariadb": "JSON_OBJECT('amount', {paid})",
    "postgresql": "jsonb_build_object('amount', {paid})",
}  # fmt: skip


@pytest.fixture
def booking(house: House, engine: Engine | None) -> tuple[House, Engine]:
    """A type whose messages are booked, each in a row of its own."""
    if engine is None:
        pytest.skip("sets need a database")
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE IF EXISTS booking"))
        connection.execute(text("CREATE TABLE booking (id VARCHAR(100) PRIMARY KEY, amount INTEGER NOT NULL)"))
    declare(house)
    return house, engine


@pytest.fixture
def uncollected() -> Iterator[None]:
    """What an error's traceback refers to stays, as it may until the garbage is next collected."""
    gc.disable()
    yield
    gc.enable()


def declare(house: House) -> None:
    def book(message: dict[str, Any], ctx: Context) -> None:
        ctx.publish({"amount": str(message["amount"])}, type="shop.Booked")
        ctx.send({"amount": str(message["amount"])}, to="stock", type="shop.Audit", headers={"of": ctx.message_id})

    house.broker.declare(
        Topology(exchange="idemp", queues=("stock", "booked"), bindings=(Binding("booked", "shop.Booked"),))
    )
    house.app.handler(dict, type=BOOK, policy=Idempotent())(book)


def sql_set(engine: Engine) -> SqlSet:
    paid = PAID[engine.dialect.name]
    answer = ANSWER[engine.dialect.name].replace("{paid}", paid)
    headers = ANSWER[engine.dialect.name].replace("{paid}", "id").replace("amount", "of")
    return SqlSet(
        effects=[f"INSERT INTO booking (id, amount) SELECT id, CAST({paid} AS DECIMAL) FROM {{fresh}}"],
        outputs=f"SELECT place, 'shop.Booked' AS type, {answer} AS body, NULL AS queue, NULL AS headers FROM {{fresh}} "
        f"UNION ALL SELECT place, 'shop.Audit', {answer}, 'stock', {headers} FROM {{fresh}} ORDER BY place, type DESC",
    )


def arrow_set() -> ArrowSet:
    import pyarrow as pa

    def book(table: pa.Table, ctx: BatchContext) -> pa.Table:
        outputs = []
        for row in table.to_pylist():
            amount = json.loads(row["body"])["amount"]
            ctx.connection.execute(
                text("INSERT INTO booking VALUES (:id, :amount)"), {"id": row["id"], "amount": amount}
            )
            body = json.dumps({"amount": str(amount)})
            outputs += [
                {"place": row["place"], "type": "shop.Booked", "body": body, "queue": None, "headers": None},
                {
                    "place": row["place"], "type": "shop.Audit", "body": body, "queue": "stock",
                    "headers": json.dumps({"of": row["id"]}),
                },
            ]  # fmt: skip
        return pa.Table.from_pylist(outputs)

    return ArrowSet(book)


def bookings(*names: str) -> list[Row]:
    return [
        Row(id=name, type=BOOK, body=json.dumps({"amount": number}).encode(), position=f"f#{number}")
        for number, name in enumerate(names)
    ]


def booked(engine: Engine) -> dict[str, int]:
    with engine.connect() as connection:
        return {row.id: row.amount for row in connection.execute(text("SELECT id, amount FROM booking"))}


def as_json(house: House) -> list[Any]:
    """What was sent, for comparison: layouts of JSON differ between databases."""
    return sorted(
        [output.id.hex, output.message.type, output.routing_key, str(json.loads(output.message.body)["amount"]),
         dict(output.message.headers), output.message.correlation_id]
        for output in house.publisher.sent
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["sql", "arrow"])
def test_effects_and_outputs(booking: tuple[House, Engine], kind: str) -> None:
    """Outputs are those of a handler of single messages, ids and all."""
    house, engine = booking
    if kind == "arrow":
        pytest.importorskip("pyarrow")
    handler = sql_set(engine) if kind == "sql" else arrow_set()
    bulk = Bulk(house.app, sets={BOOK: handler})
    report = bulk.run(bookings("a", "b", "c"))
    assert ({came.value: n for came, n in report.counts.items()}, report.outputs) == ({"new": 3}, 6)
    assert booked(engine) == {"a": 0, "b": 1, "c": 2}
    assert {came.value for came in bulk.run(bookings("a", "b", "c")).counts} == {"replay"}
    house.relay()
    alone = memory_house()
    declare(alone)
    for each in bookings("a", "b", "c"):
        alone.deliver(each.message())
    assert as_json(house) == as_json(alone)


def test_poison_in_a_set(booking: tuple[House, Engine]) -> None:
    """A row that the statements can't take is found by halves, and parked; the others are in."""
    house, engine = booking
    names = [f"m{number}" for number in range(30)]
    given = bookings(*names)
    given[7] = Row(id="m7", type=BOOK, body=b'{"amount": null}')
    given[8] = Row(id="m8", type=BOOK, body=b"[")
    report = Bulk(house.app, sets={BOOK: sql_set(engine)}).run(given)
    assert {came.value: n for came, n in report.counts.items()} == {"new": 28, "parked": 2}
    assert {each.row.id for each in report.parked} == {"m7", "m8"}
    assert set(booked(engine)) == set(names) - {"m7", "m8"}
    assert report.outputs == house.pending() == 56


def test_sets_beside_handlers(booking: tuple[House, Engine]) -> None:
    """Types of one chunk are handled each in its way, in one transaction."""
    house, engine = booking
    house.sells(outputs=1)
    bulk = Bulk(house.app, sets={BOOK: sql_set(engine)})
    bulk.start()
    house.script.calls.clear()
    sales = [Row(id=f"s{number}", type="shop.Sell", body=b"{}") for number in range(3)]
    report = bulk.run([*bookings("a", "b"), *sales])
    assert house.script.calls == ["begin", "claim", "store", "commit"]
    assert (report.rows, report.outputs) == (5, 7)
    assert (len(booked(engine)), house.sales()) == (2, 3)


@pytest.mark.parametrize(
    "outputs",
    [
        "SELECT place, id AS body FROM {fresh}",
        "SELECT place, 'a.B' AS type, 'x' AS body FROM {fresh}",
        "SELECT place + 1 AS place, 'a.B' AS type, '{}' AS body FROM {fresh}",
        "SELECT place, 'a.B' AS type, '{}' AS body, 1 AS colour FROM {fresh}",
    ],
)
def test_outputs_that_are_none(booking: tuple[House, Engine], outputs: str, uncollected: None) -> None:
    """Nothing of such a set is kept, nor does its SELECT hold a lock."""
    house, engine = booking
    handler = SqlSet(effects=["INSERT INTO booking SELECT id, 1 FROM {fresh}"], outputs=outputs)
    report = Bulk(house.app, sets={BOOK: handler}).run(bookings("a"))
    assert [each.error for each in report.parked] == ["OutputError"]
    assert booked(engine) == {}
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE booking"))


def test_statements_that_see_nothing_new_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="does not mention"):
        SqlSet(effects=["INSERT INTO booking SELECT 1"])
