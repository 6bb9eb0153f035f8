"""Many chunks in one transaction: nothing is seen before its COMMIT, and what fails costs nobody else anything."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import Engine, text

from idemp import App, Context, Idempotent
from idemp.bulk import Bulk, Came, Report, Row, SqlSet
from idemp.errors import StoreUnavailable, TransactionEnded, TransientStoreError
from idemp.inbox.sql import SqlStore, Tables
from idemp.inbox.sql.whole import Whole
from tests.inbox.sql import kept
from tests.inbox.sql.unseen import end_unseen

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SELL = "shop.Sell"


@pytest.fixture(scope="module")
def engine(postgresql: Any) -> Iterator[Engine]:
    with kept.database(postgresql) as made:
        with made.begin() as connection:
            connection.execute(text("CREATE TABLE sku (name text PRIMARY KEY)"))
            connection.execute(
                text(
                    "CREATE TABLE sale (id text, sku text, FOREIGN KEY (sku) REFERENCES sku DEFERRABLE INITIALLY DEFERRED)"
                )
            )
        yield made


@pytest.fixture
def store(engine: Engine) -> Iterator[SqlStore]:
    with engine.begin() as connection:
        connection.execute(text("TRUNCATE sale, sku"))
    kept.empty(engine, Tables())
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO sku VALUES ('tea')"))
    made = SqlStore(engine)
    yield made
    made.close()


def sell(message: dict[str, Any], ctx: Context) -> None:
    if message.get("how") == "raises":
        raise ValueError("no such tea")
    if message.get("how") == "breaks a statement":
        with suppress(Exception):
            ctx.connection.execute(text("SELECT 1 / 0"))
    ctx.connection.execute(text("INSERT INTO sale VALUES (:id, :sku)"), {"id": ctx.message_id, "sku": message["sku"]})
    if message.get("how") == "commits":
        ctx.session.commit()
    if message.get("how") == "rolls back, and goes on":
        ctx.session.execute(text("SELECT 1"))
        with suppress(Exception):
            ctx.session.rollback()
    if message.get("how") == "leaves a savepoint":
        ctx.session.begin_nested()
        ctx.session.execute(text("INSERT INTO sku VALUES ('coffee')"))
    if message.get("how") == "commits behind our back":
        end_unseen(ctx.connection)
    if message.get("how") == "ends its own backend":
        ctx.connection.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))
    ctx.send({"sku": message["sku"]}, to="stock", type="stock.Reserve")


def app_on(store: SqlStore) -> App:
    app = App("shop", store=store, broker="local://unused.db")
    app.handler(dict, type=SELL, policy=Idempotent(batch=100, claim_wait="50ms"))(sell)
    return app


def sales(numbers: range, **others: str) -> list[Row]:
    """Rows; the others say of a number how it goes wrong."""
    return [
        Row(
            id=f"m-{number}",
            type=SELL,
            body=json.dumps({"sku": "tea", "how": others.get(f"m{number}")}).encode(),
            position=f"f#{number}",
        )
        for number in numbers
    ]


def bulk_on(whole: Whole, store: SqlStore, **options: Any) -> Bulk:
    made = Bulk(app_on(store), store=whole, **options)
    made._steps._pause = lambda _: None
    return made


def through(store: SqlStore, *chunks: Sequence[Row] | Any, **options: Any) -> Report:
    """All of them in one transaction."""
    whole = Whole(store)
    bulk = bulk_on(whole, store, **options)
    report = Report()
    with whole:
        for chunk in chunks:
            report.add(bulk.run(chunk))
        assert counts(store.engine) == (0, 0, 0, 0), "nobody sees anything before COMMIT"
        whole.commit()
    return report


def counts(engine: Engine) -> tuple[int, ...]:
    """Claims, effects, outputs, outputs for a relay."""
    with engine.connect() as connection:
        return tuple(
            connection.scalar(text(f"SELECT count(*) FROM {table}"))
            for table in ("idemp_inbox", "sale", "idemp_output", "idemp_pending")
        )


def test_chunks_come_together(store: SqlStore) -> None:
    report = through(store, sales(range(20)), sales(range(10, 40)), sales(range(5)))
    assert report.counts == {Came.NEW: 40, Came.REPLAY: 15}
    assert counts(store.engine) == (40, 40, 40, 40)


def test_nothing_stays_without_commit(store: SqlStore) -> None:
    whole = Whole(store)
    with whole:
        assert bulk_on(whole, store).run(sales(range(20))).counts == {Came.NEW: 20}
    assert counts(store.engine) == (0, 0, 0, 0)
    assert not whole.is_open


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("raises", "ValueError"),
        ("breaks a statement", "InternalError"),
        ("commits", "TransactionEnded"),
        ("rolls back, and goes on", "TransactionEnded"),
    ],
)
def test_one_that_fails_is_parked_and_the_others_stay(store: SqlStore, how: str, error: str) -> None:
    report = through(store, sales(range(20), m7=how), sales(range(20, 30)))
    assert [(each.row.id, each.error) for each in report.parked] == [("m-7", error)]
    assert report.counts == {Came.NEW: 29, Came.PARKED: 1}
    assert counts(store.engine) == (29, 29, 29, 29)


def test_what_waits_for_commit_is_told_of_the_message_that_caused_it(store: SqlStore) -> None:
    bad = Row(id="bad", type=SELL, body=b'{"sku": "no such sku"}')
    report = through(store, [*sales(range(20)), bad])
    assert [(each.row.id, each.error) for each in report.parked] == [("bad", "IntegrityError")]
    assert counts(store.engine) == (20, 20, 20, 20)


def test_savepoints_that_handlers_leave_open_are_kept(store: SqlStore) -> None:
    through(store, sales(range(20), m7="leaves a savepoint"), sales(range(20, 30)))
    assert counts(store.engine) == (30, 30, 30, 30)
    with store.engine.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM sku")) == 2


def test_handler_that_commits_behind_our_back_leaves_no_claim_without_its_work(store: SqlStore) -> None:
    """What came before it is committed, and complete; its own claim is withdrawn; nothing comes after."""
    whole = Whole(store)
    bulk = bulk_on(whole, store)
    with pytest.raises((StoreUnavailable, TransactionEnded)), whole:
        bulk.run(sales(range(10)))
        bulk.run(sales(range(10, 20), m15="commits behind our back"))
        bulk.run(sales(range(20, 30)))
        whole.commit()
    claims, _, outputs, pending = counts(store.engine)
    assert claims == outputs == pending == 10


def test_connection_that_breaks_ends_all_of_it_at_once(store: SqlStore) -> None:
    whole = Whole(store)
    bulk = bulk_on(whole, store)
    with pytest.raises(StoreUnavailable), whole:
        bulk.run(sales(range(10)))
        bulk.run(sales(range(10, 20), m15="ends its own backend"))
    assert counts(store.engine) == (0, 0, 0, 0)


def test_held_by_another_is_an_error_of_all(store: SqlStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("idemp.bulk.core._WAITS_ALONE", 1)
    whole, other = Whole(store), Whole(store)
    bulk = bulk_on(whole, store)
    bulk.start()
    with other:
        bulk_on(other, store).run(sales(range(5, 6)))
        with pytest.raises(TransientStoreError), whole:
            bulk.run(sales(range(10)))
        other.commit()
    with whole:
        assert bulk.run(sales(range(10))).counts == {Came.NEW: 9, Came.REPLAY: 1}
        whole.commit()
    assert counts(store.engine) == (10, 10, 10, 10)


def test_sets_of_several_chunks(store: SqlStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their temporary tables hold one chunk, though no COMMIT empties them; and a set that fails costs its own rows."""
    pa = pytest.importorskip("pyarrow")
    monkeypatch.setattr("idemp.bulk.setwise.FEW", 2)
    book = SqlSet(
        effects=["INSERT INTO sale SELECT id, payload ->> 'sku' FROM {fresh}"],
        outputs="SELECT place, 'stock.Reserve' AS type, payload AS body, 'stock' AS queue FROM {fresh}",
    )

    def table(rows: list[Row]) -> Any:
        return pa.table({name: [getattr(row, name) for row in rows] for name in ("id", "type", "body", "position")})

    bad = Row(id="bad", type=SELL, body=b'{"sku": "no such sku"}')
    chunks = [table(sales(range(20))), table([*sales(range(10, 40)), bad]), table(sales(range(50)))]
    report = through(store, *chunks, sets={SELL: book})
    assert report.counts == {Came.NEW: 50, Came.REPLAY: 50, Came.PARKED: 1}
    assert counts(store.engine) == (50, 50, 50, 50)
