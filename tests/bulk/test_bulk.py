"""Chunks of rows: five answers that add up, and the same inbox as online."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
from pydantic import BaseModel
from sqlalchemy import event, func, insert, select

from idemp import App, AsyncContext, ConfigurationError, Context, Idempotent, InFlight, Policy, Retry, Settings
from idemp.bulk import Bulk, Report, Row, SqlSet
from idemp.errors import Unavailable
from idemp.identity import uuid7
from idemp.sql.engine import Database
from tests.conftest import every_database
from tests.world import effect, let_pass, metadata

ORDER: Final = "shop.Order"
SET: Final = SqlSet(
    effects=["INSERT INTO effect (what) SELECT body ->> 'order_id' FROM {fresh} WHERE 1 / (length(body ->> 'order_id') - 5) < 9"],
    outputs="SELECT place, 'shop.Shipped' AS type, jsonb_build_object('order_id', body ->> 'order_id', 'part', part) AS body, "
    "'sink' AS queue FROM {fresh}, generate_series(0, 1) AS part ORDER BY place, part",
)
"""Fails for ids of five characters, as the handler does."""
sets = pytest.mark.parametrize("kind", ["postgresql"], indirect=True)


class Order(BaseModel):
    __message_type__ = ORDER
    order_id: str


class Shipped(BaseModel):
    __message_type__ = "shop.Shipped"
    order_id: str
    part: int


def ship(message: Order, ctx: Context) -> None:
    if len(message.order_id) == 5:
        raise ZeroDivisionError
    ctx.session.execute(insert(effect).values(what=message.order_id))
    for part in range(2):
        ctx.send(Shipped(order_id=message.order_id, part=part), to="sink")


class Shop:
    """An app, its tables and chunks of rows."""

    def __init__(self, url: str, handler: Callable[..., Any] = ship, policy: Policy | None = None, **options: Any) -> None:
        self.database = Database(url)
        metadata.create_all(self.database.engine)
        self.app = App("shop", settings=Settings(database_url=url))
        self.app.handler(Order, policy=policy or Idempotent(retention="7d"))(handler)
        self.options = options

    def run(self, rows: list[Row], *, run: str = "first", **options: Any) -> Report:
        with Bulk(self.app, run=run, **{**self.options, **options}) as bulk:
            report = bulk.run(rows)
        assert sum(report.counts.values()) == len(rows)
        return report

    def effects(self) -> list[str]:
        with self.database.engine.connect() as connection:
            return sorted(connection.scalars(select(effect.c.what)))

    def count(self, table: str) -> int:
        with self.database.engine.connect() as connection:
            return int(connection.scalar(select(func.count()).select_from(getattr(self.database.tables, table))) or 0)


@pytest.fixture
def open_shop(url: str) -> Iterator[Callable[..., Shop]]:
    shops: list[Shop] = []

    def open_shop(*arguments: Any, at: str = url, **options: Any) -> Shop:
        shops.append(Shop(at, *arguments, **options))
        return shops[-1]

    yield open_shop
    for shop in shops:
        shop.app.close()
        shop.database.close()
        shop.database.close()


@pytest.fixture
def shop(request: pytest.FixtureRequest, open_shop: Callable[..., Shop]) -> Shop:
    """A shop whose rows go through its handler, or through a set."""
    return open_shop(**({"sets": {Order: SET}} if request.param == "sets" else {}))


every_way = pytest.mark.parametrize(
    ("kind", "shop"), [("sqlite", "rows"), ("postgresql", "rows"), ("postgresql", "sets")], indirect=True
)


def order(number: object, id: str | None = None, **fields: Any) -> Row:
    return Row(json.dumps({"order_id": str(number), **fields}).encode(), id=id or f"id-{number}", type=ORDER)


def answers(report: Report) -> dict[str, int]:
    return {answer.value: count for answer, count in report.counts.items() if count}


@every_way
def test_each_row_has_one_of_five_answers(shop: Shop) -> None:
    shop.run([order("online")], run="online")
    rows = [order(n) for n in range(30)]
    rows += [
        order(1),
        order("other", "id-2"),
        order("online"),
        order("alien", "id-online"),
        Row(b"{", id="x", type=ORDER),
        order("break"),
    ]
    report = shop.run(rows)
    assert answers(report) == {"new": 30, "duplicate": 2, "conflict": 2, "parked": 2}
    assert {(each.place, each.rule) for each in report.parked} == {
        (31, "conflict"),
        (33, "conflict"),
        (34, "unreadable"),
        (35, "handler"),
    }
    assert answers(shop.run(rows)) == {"replay": 30, "duplicate": 2, "conflict": 2, "parked": 2}
    assert answers(shop.run(rows, run="second")) == {"duplicate": 32, "conflict": 2, "parked": 2}
    assert shop.effects() == sorted(["online", *map(str, range(30))])
    assert (report.outputs, shop.count("output"), shop.count("pending")) == (60, 62, 62)


@every_way
def test_rows_that_fail_are_found_among_many(shop: Shop) -> None:
    rows = [order(n) for n in range(9_980, 10_020)] + [order(n) for n in range(3_000)]
    report = shop.run(rows)
    assert [each.place for each in sorted(report.parked, key=lambda each: each.place)] == list(range(20, 40))
    assert (answers(report), len(shop.effects())) == ({"new": 3_020, "parked": 20}, 3_020)


@sets
def test_a_set_stores_what_its_handler_would(open_shop: Callable[..., Shop], new_url: Callable[[], str]) -> None:
    rows = [Row(order(n).body, id=uuid7() if n % 2 else f"id-{n}", type=ORDER, headers={"x": 1}) for n in range(50)]
    stored = []
    for options in ({}, {"at": new_url(), "sets": {ORDER: SET}}):
        shop = open_shop(**options)
        shop.run(rows)
        output = shop.database.tables.output
        with shop.database.engine.connect() as connection:
            found = connection.execute(select(output).order_by(output.c.message_key, output.c.ordinal)).all()
        kept = []
        for row in found:
            properties = json.loads(row.headers)
            assert properties.pop("timestamp") > 1_700_000_000
            kept.append((*row[1:9], properties, json.loads(row.body)))
        stored.append(kept)
    assert stored[0] == stored[1]
    assert len(stored[0]) == 100


@sets
def test_a_function_of_an_arrow_table_is_a_set(open_shop: Callable[..., Shop]) -> None:
    pa = pytest.importorskip("pyarrow")

    def ship_all(fresh: Any, connection: Any) -> Any:
        ids = [json.loads(body)["order_id"] for body in fresh["body"].to_pylist()]
        if "break" in ids:
            raise ZeroDivisionError
        connection.execute(insert(effect), [{"what": id} for id in ids])
        return pa.table(
            {"place": fresh["place"], "type": ["shop.Shipped"] * len(ids), "body": [json.dumps({"id": id}) for id in ids]}
        )

    shop = open_shop(sets={Order: ship_all})
    report = shop.run([order(n) for n in range(20)] + [order("break"), order(3)])
    assert (answers(report), report.outputs, len(shop.effects())) == ({"new": 20, "parked": 1, "duplicate": 1}, 20, 20)


@pytest.mark.parametrize(
    ("statements", "said"),
    [
        ({"effects": ["INSERT INTO effect (what) SELECT 'x' FROM {fresh}", "COMMIT; SELECT 1 FROM {fresh}"]}, "TransactionEnded"),
        ({"outputs": "SELECT place FROM {fresh}"}, "place, type, body"),
        ({"outputs": "SELECT place + 1 AS place, 'shop.Shipped' AS type, body FROM {fresh}"}, "no new message"),
        ({"outputs": "SELECT place, 'shop.Shipped' AS type, '{' AS body FROM {fresh}"}, "json"),
        ({"outputs": "SELECT place, NULL AS type, body, 'stock' AS queue FROM {fresh}"}, "the type of an output"),
        ({"outputs": "SELECT place, ' ' AS type, body FROM {fresh}"}, "the type of an output"),
        ({"outputs": "SELECT place, 'shop.Shipped' AS type, body, '' AS queue FROM {fresh}"}, "the queue of an output"),
        ({"outputs": "SELECT place, 'x' AS type, jsonb_build_object('n', 1 / 3.0) AS body FROM {fresh}"}, "cannot be read back"),
    ],
)
@sets
def test_a_set_that_is_wrong_parks_its_rows(open_shop: Callable[..., Shop], statements: Any, said: str) -> None:
    shop = open_shop(sets={Order: SqlSet(**statements)})
    report = shop.run([order(n) for n in range(2)])
    assert (answers(report), shop.count("inbox"), shop.effects()) == ({"parked": 2}, 0, [])
    assert said in report.parked[0].error


@sets
def test_a_function_that_commits_by_itself_parks_all_rows_of_its_transaction(open_shop: Callable[..., Shop]) -> None:
    def commit(fresh: Any, connection: Any) -> None:
        connection.execute(insert(effect).values(what="half"))
        connection.connection.driver_connection.commit()

    shop = open_shop(sets={Order: commit})
    shop.run([order("before")], sets=None)
    report = shop.run([*(order(n) for n in range(4)), order("before")])
    assert (answers(report), {each.rule for each in report.parked}) == ({"parked": 4, "replay": 1}, {"transaction ended"})
    assert "commit" in report.parked[0].error
    assert (shop.effects(), shop.count("output")) == (["before", "half"], 2)


@every_way
def test_outputs_wait_for_a_relay_or_are_never_sent(shop: Shop) -> None:
    shop.run([order(1)])
    shop.run([order(2)], dispatch="never")
    assert (shop.count("output"), shop.count("pending")) == (4, 2)


@every_way
def test_the_past_is_adopted_without_its_handler(shop: Shop) -> None:
    old = [Row(None, id="bare", type=ORDER, time=1.0), Row(b'{"strange": true}', id="strange", type=ORDER, time=1.0), order(1)]
    shop.options.pop("sets", None)
    assert answers(shop.run([*old, order(1)], adopt=True)) == {"new": 3, "duplicate": 1}
    assert answers(shop.run([order("now", "bare"), Row(b'{"strange": true}', id="strange", type=ORDER)])) == {
        "replay": 1,
        "parked": 1,
    }
    assert answers(shop.run([order(1)], run="other")) == {"duplicate": 1}
    assert (shop.effects(), shop.count("output")) == ([], 0)


@every_way
def test_a_row_without_a_body_is_parked(shop: Shop) -> None:
    assert shop.run([Row(None, id="bare", type=ORDER)]).parked[0].rule == "unreadable"


@every_way
def test_rows_older_than_the_window_are_parked_unless_the_inbox_has_them(shop: Shop) -> None:
    rows = [Row(order(n).body, id=f"id-{n}", type=ORDER, time=1.6e9) for n in range(3)]
    assert answers(shop.run(rows[:2], dispatch="never")) == {"new": 2}  # what is pending is not purged
    let_pass(shop.database, 8 * 86_400)
    assert shop.app.adapters().scheduler.purge() == 2
    shop.run([order("new")])
    report = shop.run([*rows, order(7), order("new")])
    assert (answers(report), {each.rule for each in report.parked}) == ({"parked": 3, "new": 1, "replay": 1}, {"late"})
    assert len(shop.effects()) == 4
    old = [Row(order(n).body, id=f"old-{n}", type=ORDER, time=1.6e9) for n in range(600)]
    with Bulk(shop.app, **shop.options) as bulk:
        begun: list[object] = []
        event.listen(bulk._database.engine, "begin", begun.append)
        assert answers(bulk.run(old)) == {"parked": 600}
        assert len(begun) < 10
    assert answers(shop.run(rows, adopt=True, sets=None)) == {"new": 3}
    assert answers(shop.run(rows)) == {"replay": 3}
    assert answers(shop.run(rows, run="second")) == {"duplicate": 3}


@every_way
def test_a_dry_run_says_what_would_be_and_leaves_nothing(shop: Shop) -> None:
    shop.run([order(1)])
    rows = [order(1), order(2), order(2), order(3), order("other", "id-3"), Row(b"{}", id="x", type=ORDER)]
    report = shop.run(rows, run="second", dry_run=True)
    assert answers(report) == {"new": 2, "duplicate": 2, "conflict": 1, "parked": 1}
    assert (shop.effects(), shop.count("inbox")) == (["1"], 1)


@pytest.mark.parametrize(("kind", "shop"), [("postgresql", "rows"), ("postgresql", "sets")], indirect=True)
def test_an_id_that_somebody_holds_is_waited_for_and_then_the_chunk_runs_again(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    from idemp.bulk import core, sets
    from idemp.sql import postgresql

    monkeypatch.setattr(core, "WAITS", 1)
    monkeypatch.setattr(sets, "WAITS", 1)
    for module in (postgresql, sets):
        monkeypatch.setattr(module, "CLAIM_SECONDS", 0.2)
    rows = [order(n) for n in range(3)]
    store = shop.app.adapters().store
    with store.connect() as tx:
        claim = shop.app.handlers[ORDER].identify(next(iter(_deliveries(rows[1:2]))))
        assert claim is not None
        store.claim(tx, [claim])
        with pytest.raises(InFlight, match="run the chunk again"):
            shop.run(rows)
    assert answers(shop.run(rows)).keys() <= {"new", "replay"}
    assert shop.effects() == ["0", "1", "2"]
    shop.app.close()


def _deliveries(rows: list[Row]) -> Any:
    from idemp.bulk.rows import deliveries

    return deliveries("shop", rows)


@every_way
def test_a_database_that_is_away_raises_and_nothing_is_parked(shop: Shop) -> None:
    def refuse(*_: Any) -> None:
        raise OSError("gone")

    with Bulk(shop.app, **shop.options) as bulk:
        event.listen(bulk._database.units, "before_cursor_execute", _lose)
        bulk._executor.store.probe = lambda: False  # type: ignore[method-assign]
        with pytest.raises(Unavailable, match="run the chunk again"):
            bulk.run([order(1), order(2)])
    assert answers(shop.run([order(1), order(2)])) == {"new": 2}


def _lose(connection: Any, *_: Any) -> None:
    from sqlalchemy.exc import DBAPIError

    raise DBAPIError.instance(
        "x", None, connection.dialect.dbapi.OperationalError("gone"), Exception, connection_invalidated=True
    )


@every_database
def test_handlers_may_be_asynchronous_or_take_lists(kind: str, open_shop: Callable[..., Shop]) -> None:
    async def one(message: Order, ctx: AsyncContext) -> None:
        await ctx.session.execute(insert(effect).values(what=message.order_id))
        ctx.send(Shipped(order_id=message.order_id, part=0), to="sink")

    def many(messages: list[Order], contexts: list[Context]) -> None:
        contexts[0].session.execute(insert(effect), [{"what": each.order_id} for each in messages])

    for number, (handler, policy) in enumerate([(one, Idempotent()), (many, Idempotent(batch=100))]):
        shop = open_shop(handler, policy)
        report = shop.run([order(f"{number}-{n}") for n in range(250)], run=f"run-{number}", dispatch="never")
        assert (answers(report), len(shop.effects())) == ({"new": 250}, 250 * (number + 1))
        assert (shop.count("output"), shop.count("pending")) == (250, 0)


def test_types_that_are_not_opted_in_or_unknown_are_parked(open_shop: Callable[..., Shop]) -> None:
    shop = open_shop(policy=Policy(retry=Retry(attempts=3)))
    report = shop.run([order(1), Row(b"{}", id="1", type="shop.Unknown"), Row(b"{}", id="2")])
    assert (answers(report), shop.effects()) == ({"parked": 3}, [])
    assert "not opted in" in report.parked[0].error


def test_arguments_of_no_use_are_refused(open_shop: Callable[..., Shop]) -> None:
    shop = open_shop()
    for options, said in (
        ({"sets": {Order: SET}}, "sets need PostgreSQL"),
        ({"dispatch": "later"}, "'relay' or 'never'"),
        ({"run": "r" * 81}, "80 characters"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            Bulk(shop.app, **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="effects='SELECT 1 FROM {fresh}' has to be a list"):
        SqlSet(effects="SELECT 1 FROM {fresh}")
    with pytest.raises(ConfigurationError, match="does not mention"):
        SqlSet(effects=["DELETE FROM stock"])


@sets
def test_a_set_of_an_unknown_type_is_refused(open_shop: Callable[..., Shop]) -> None:
    shop = open_shop()
    with pytest.raises(ConfigurationError, match="needs a handler"):
        Bulk(shop.app, sets={"shop.Nothing": SET})


@sets
def test_ten_thousand_rows_of_a_set_take_few_statements(open_shop: Callable[..., Shop]) -> None:
    shop = open_shop(sets={Order: SET})
    with Bulk(shop.app, sets={Order: SET}) as bulk:
        statements: list[str] = []
        event.listen(bulk._database.units, "before_cursor_execute", lambda *each: statements.append(each[2]))
        bulk.run([order(n + 100_000) for n in range(9_000)])
    assert len(statements) <= 6


@sets
@pytest.mark.parametrize("function", [SET, lambda fresh, connection: None], ids=["SQL", "Arrow"])
def test_a_set_gets_no_row_that_its_handler_would_refuse(open_shop: Callable[..., Shop], function: Any) -> None:
    bodies = [b'{"order_id": null}', b"[]", b'{"sku": "A"}', b'{"order_id": "1", "order_id": "2"}', b'{"order_id": NaN}', b"\xff"]
    refused = [Row(body, id=f"bad-{number}", type=ORDER) for number, body in enumerate(bodies)]
    marked = Row(
        b"\xef\xbb\xbf" + order("marked").body, id="marked", type=ORDER
    )  # with a byte order mark, as some producers write
    report = open_shop(sets={ORDER: function}).run([*refused, marked, order(1)])
    assert (answers(report), {each.rule for each in report.parked}) == ({"parked": 6, "new": 2}, {"unreadable"})


@every_way
def test_a_row_with_odd_headers_is_parked_alone(shop: Shop) -> None:
    """As online, whatever reads them: a key, a CloudEvent, the chunk."""
    event = b'{"specversion": "1.0", "id": "e", "source": "/shop", "type": "shop.Order", "data": {"order_id": "e"}}'
    odd: list[Any] = ["abc", 5, {5: "x"}, [["a", "b"]], ["ce-specversion"], "[1]"]
    rows = [Row(event, headers=each, content_type="application/cloudevents+json") for each in odd]
    rows += [Row(order("x").body, id=f"x-{number}", type=ORDER, headers=each) for number, each in enumerate(odd)]
    for options in ({}, {"adopt": True, "sets": None}):
        report = shop.run([*rows, order(1 + len(options))], **options)
        assert (answers(report), {each.rule for each in report.parked}) == ({"parked": 12, "new": 1}, {"unreadable"})
