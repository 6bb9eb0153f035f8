"""Chunks that never become objects, on PostgreSQL: the same verdicts, claims and outputs as row by row."""

from __future__ import annotations

import json
import logging
import random
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest
from pydantic import BaseModel, field_validator
from sqlalchemy import Engine, event, select, text

from idemp import Context, Idempotent, Key, Previous
from idemp.broker.port import Binding, Topology
from idemp.bulk import ArrowSet, Bulk, Came, Report, Row, SqlSet
from idemp.errors import ConfigurationError, TransientStoreError
from idemp.identity import new_id
from idemp.inbox.sql import SqlStore, Tables
from idemp.messages import Message
from idemp.testing.clock import FakeClock
from idemp.testing.store_bench import Background, SqlEffects
from tests.house import House, memory_house, sql_house
from tests.inbox.sql import days, kept
from tests.servers.fixtures import pooler

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from idemp.bulk.sets import SetHandler
    from idemp.context import BatchContext

pa = pytest.importorskip("pyarrow")
pytest.importorskip("numpy")

from idemp.bulk import setwise  # noqa: E402 - it needs both
from idemp.bulk.emitting import SetContext  # noqa: E402

BOOK = "shop.Book"
BOOKING = SqlSet(
    effects=["INSERT INTO booking (id, amount) SELECT id, (payload ->> 'amount')::int FROM {fresh}"],
    outputs="SELECT place, 'shop.Booked' AS type, jsonb_build_object('amount', payload ->> 'amount') AS body FROM {fresh} "
    "UNION ALL SELECT place, 'shop.Audit', payload FROM {fresh} WHERE (payload ->> 'amount')::int % 2 = 0 "
    "ORDER BY place, type DESC",
)


@pytest.fixture(scope="module")
def engine(postgresql: Any) -> Iterator[Engine]:
    with kept.database(postgresql) as made:
        with made.begin() as connection:
            connection.execute(text("CREATE TABLE booking (id TEXT PRIMARY KEY, amount INTEGER NOT NULL)"))
        yield made


@pytest.fixture
def house(engine: Engine) -> Iterator[House]:
    clock = FakeClock()
    kept.empty(engine, Tables())
    store = SqlStore(engine, clock=clock)
    yield House(store, SqlEffects(engine), clock)
    store.close()


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets of any size."""
    monkeypatch.setattr(setwise, "FEW", 2)


def declare(house: House, **policy: Any) -> None:
    def book(message: dict[str, Any], ctx: Context) -> None:
        ctx.publish({"amount": str(message["amount"])}, type="shop.Booked")
        if message["amount"] % 2 == 0:
            ctx.publish(message, type="shop.Audit")

    bindings = tuple(Binding("booked", name) for name in ("shop.Booked", "shop.Audit", "a.B"))
    house.broker.declare(Topology(exchange="idemp", queues=("stock", "booked"), bindings=bindings))
    house.app.handler(dict, type=BOOK, policy=Idempotent(**policy))(book)


def table(rows: Sequence[Row]) -> Any:
    """Rows as a table in several pieces."""
    columns = {
        name: [getattr(row, name) for row in rows] for name in ("id", "type", "body", "headers", "time", "position")
    }
    kinds = {"id": pa.string(), "type": pa.string(), "body": pa.binary(), "headers": pa.string(), "position": pa.string(),
             "time": pa.timestamp("us", tz="UTC")}  # fmt: skip
    whole = pa.table({name: pa.array(values, kinds[name]) for name, values in columns.items()})
    middle = len(rows) // 2
    return pa.concat_tables([whole.slice(0, middle), whole.slice(middle)])


def laid_out(number: int, version: int) -> str:
    return str(UUID(int=number & ~(0xF << 76) & ~(0x3 << 62) | version << 76 | 0x2 << 62))


def bookings(number: int, *, source: str = "f") -> list[Row]:
    """Ids of every kind."""
    kinds = (lambda n: f"m-{n}", lambda n: str(UUID(int=n + 1)), lambda n: f"ü {n}", lambda n: laid_out(n, 8),
             lambda n: laid_out((1_767_225_600_000 + n) << 80 | n, 7))  # fmt: skip
    return [
        Row(id=kinds[n % len(kinds)](n), type=BOOK, body=json.dumps({"amount": n}).encode(), position=f"{source}#{n}")
        for n in range(number)
    ]


def counted(report: Report) -> dict[str, int]:
    return {came.value: number for came, number in report.counts.items() if number}


def booked(engine: Engine) -> int:
    with engine.connect() as connection:
        return connection.scalar(text("SELECT count(*) FROM booking")) or 0


def claims(house: House) -> dict[UUID, tuple[Any, ...]]:
    """What the inbox knows, by key."""
    store: SqlStore = house.store.inner
    inbox, kind = store.tables.inbox, store.tables.message_type
    with store.engine.connect() as connection:
        found = connection.execute(select(inbox, kind.c.name).join(kind, kind.c.id == inbox.c.type_id))
        return {
            row.message_key: (row.name, row.fingerprint, row.original_id or str(row.message_key), row.source_position)
            for row in found
        }


def sent(house: House) -> list[Any]:
    return sorted(
        [output.id.hex, output.ordinal, output.kind, output.exchange, output.routing_key, output.mandatory, output.delay,
         json.loads(output.message.body), output.message.type, dict(output.message.headers), output.message.correlation_id]
        for output in house.publisher.sent
    )  # fmt: skip


@contextmanager
def statements(engine: Engine) -> Iterator[list[str]]:
    said: list[str] = []

    def listen(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        said.append(statement)

    event.listen(engine, "before_cursor_execute", listen)
    yield said
    event.remove(engine, "before_cursor_execute", listen)


HEADED = json.dumps({"traceparent": "00-1-2-01", "idemp-hops": 3, "tenant": 7})
EVENT = json.dumps({
    "cloudEvents_specversion": "1.0", "cloudEvents_source": "/s", "cloudEvents_type": BOOK, "cloudEvents_id": "e-1",
})  # fmt: skip


def of_every_kind() -> list[Row]:
    rows = bookings(20)
    rows[3] = replace(rows[3], headers=HEADED, time=datetime(2026, 1, 1, 5, tzinfo=UTC))
    rows[4] = replace(rows[4], headers=EVENT)
    rows[5] = replace(rows[5], body=b'{"amount": 5, "amount": 5}')
    rows[6] = replace(rows[6], id=" ")
    rows[7] = replace(rows[7], id=None)
    rows[8] = replace(rows[8], headers="[")
    rows[9] = replace(rows[9], body=b"[]")
    rows[10] = replace(rows[10], position="x" * 300)
    rows[11] = replace(rows[11], position=None)
    rows[12] = replace(rows[12], id="x" * 256)
    rows[13] = replace(rows[13], type="shop.Unknown")
    rows[14] = replace(rows[14], type=None)
    rows[15] = replace(rows[15], headers='{"idemp-correlation-id": "c-1", "tenant": 7}')
    rows[16] = replace(rows[16], headers='{"idemp-content-type": "text/plain"}')
    return rows


def book_table(given: Any, ctx: BatchContext) -> Any:
    """What `BOOKING` does, as a function."""
    assert isinstance(ctx, SetContext) or len(given) == 1, "all were to be done by sets, but for one with properties"
    rows = [(row, json.loads(row["body"])) for row in given.to_pylist()]
    ctx.connection.execute(
        text("INSERT INTO booking (id, amount) VALUES (:id, :amount)"),
        [{"id": row["id"], "amount": body["amount"]} for row, body in rows],
    )
    booked = [{"place": row["place"], "type": "shop.Booked", "body": json.dumps({"amount": str(body["amount"])}).encode()}
              for row, body in rows]  # fmt: skip
    audited = [{"place": row["place"], "type": "shop.Audit", "body": row["body"]}
               for row, body in rows if body["amount"] % 2 == 0]  # fmt: skip
    return pa.Table.from_pylist([*booked, *audited])


def test_ids_of_another_type_are_no_duplicates(house: House, engine: Engine) -> None:
    """They are parked; those of a renamed type are duplicates."""
    house.app.handler(dict, type="shop.Reserve", policy=Idempotent(fingerprint="off"))(lambda message: None)
    rows = bookings(12)
    assert counted(Bulk(house.app).run([replace(row, type="shop.Reserve", position=None) for row in rows[:4]])) == {
        "new": 4
    }
    declare(house, fingerprint="off")
    for dry_run in (True, False):
        report = Bulk(house.app, sets={BOOK: BOOKING}, dry_run=dry_run).run(table(rows))
        assert sum(counted(report).get(came, 0) for came in ("conflict", "parked")) == 4, counted(report)
        assert counted(report)["new"] == 8
    assert booked(engine) == 8


@pytest.mark.parametrize("handler", [BOOKING, ArrowSet(book_table)], ids=["sql", "arrow"])
def test_a_set_is_what_single_messages_are(house: House, engine: Engine, handler: SetHandler) -> None:
    """Claims and outputs, byte for byte where bytes are kept, and what is wrong with the others."""
    declare(house)
    rows, alone = of_every_kind(), memory_house()
    declare(alone)
    report = Bulk(house.app, sets={BOOK: handler}).run(table(rows))
    expected = Bulk(alone.app).run(rows)
    assert counted(report) == counted(expected) == {"new": 11, "parked": 9}
    assert sorted((str(each.row), each.error, each.reason) for each in report.parked) == sorted(
        (str(each.row), each.error, each.reason) for each in expected.parked
    )
    assert claims(house) == {
        key: (each.claim.message_type, each.claim.fingerprint, each.claim.id.text, each.claim.position)
        for (_, key), each in alone.store.inner.content.handlings.items()
    }
    assert report.outputs == expected.outputs
    house.relay()
    alone.relay()
    assert sent(house) == sent(alone)
    assert {each[-1] for each in sent(house)} >= {"c-1", rows[17].id}
    assert booked(engine) == 11


@pytest.mark.parametrize(
    "key", [Key.header("x-id"), "amount", ["amount", "of"], Key.digest(), lambda body: body["amount"]]
)
def test_ids_from_elsewhere(house: House, engine: Engine, key: Any) -> None:
    declare(house, key=key)
    alone = memory_house()
    declare(alone, key=key)
    rows = [
        replace(row, headers=json.dumps({"x-id": f"x{n}"}), body=json.dumps({"amount": n, "of": str(n)}).encode())
        for n, row in enumerate(bookings(10))
    ]
    Bulk(alone.app).run(rows)
    bulk = Bulk(house.app, sets={BOOK: BOOKING})
    assert [counted(bulk.run(table(rows))) for _ in range(2)] == [{"new": 10}, {"replay": 10}]
    house.relay()
    alone.relay()
    assert [each[0] for each in sent(house)] == [each[0] for each in sent(alone)]
    assert claims(house).keys() == {key for _, key in alone.store.inner.content.handlings}


def test_it_is_done_by_sets(house: House, engine: Engine) -> None:
    """A few statements, however many rows."""
    declare(house)
    bulk = Bulk(house.app, sets={BOOK: BOOKING})
    bulk.run(table(bookings(10)))
    with statements(engine) as said:
        report = bulk.run(table(bookings(2_000)))
    assert counted(report) == {"new": 1_990, "replay": 10}
    assert (report.outputs, booked(engine)) == (1_990 + 995, 2_000)
    assert len(said) <= 6, said


def test_pieces(house: House, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transaction each: what one piece handled is a replay in those after it, and what is wrong is wrong in its own."""
    monkeypatch.setattr(setwise, "PIECE", 7)
    declare(house)
    rows = [*bookings(30), *bookings(30, source="g")[:10], *bookings(12)[5:]]
    rows[9] = replace(rows[9], body=b"[")
    bulk = Bulk(house.app, sets={BOOK: BOOKING})
    bulk.start()
    house.script.calls.clear()
    assert counted(bulk.run(table(rows))) == {"new": 30, "replay": 6, "duplicate": 10, "parked": 1}
    assert booked(engine) == len(claims(house)) == 30
    assert counted(Bulk(house.app, sets={BOOK: BOOKING}, dry_run=True).run(table(rows))) == {
        "replay": 36, "duplicate": 10, "parked": 1,
    }  # fmt: skip


def test_what_is_wrong_with_a_piece_is_no_matter_of_the_one_before() -> None:
    """It is decoded while that one's transaction is open."""

    def decode(part: Any) -> Any:
        if part == "second":
            raise TransientStoreError("the window was read too long ago")
        return part

    pieces: Any = iter(ahead := setwise._OneAhead(decode, ["first", "second"]))
    assert next(pieces) == "first"
    ahead.prepare()
    with pytest.raises(TransientStoreError):
        next(pieces)


def test_functions_that_need_messages_go_row_by_row(house: House, engine: Engine) -> None:
    """With nothing left of the first call."""
    declare(house)
    contexts = []

    def book(asks: str, given: Any, ctx: BatchContext) -> Any:
        contexts.append(type(ctx).__name__)
        ctx.connection.execute(text("INSERT INTO booking SELECT :asks, 1"), {"asks": asks})
        rows = [
            {"place": row["place"], "type": "a.B", "body": b"{}", "headers": '{"n": 1}'} for row in given.to_pylist()
        ]
        if asks == "headers":
            return pa.Table.from_pylist(rows)
        with suppress(Exception if asks == "swallowed" else ()):
            for row in rows:
                ctx.each[row["place"]].emit_encoded(b"{}", type="a.B")
        return None

    for times, asks in enumerate(("headers", "raised", "swallowed"), start=1):
        report = Bulk(house.app, sets={BOOK: ArrowSet(partial(book, asks))}).run(table(bookings(5 * times)))
        assert (report.counts[Came.NEW], report.outputs, house.pending()) == (5, 5, 5 * times)
        assert (contexts, booked(engine)) == (["SetContext", "BatchContext"] * times, times)


def test_tables_of_outputs_that_are_none(house: House, engine: Engine) -> None:
    declare(house)

    def book(wrong: dict[str, Any], _given: Any, ctx: BatchContext) -> Any:
        ctx.connection.execute(text("INSERT INTO booking SELECT 'never', 1"))
        return pa.Table.from_pylist([wrong])

    for wrong in (
        {"place": 99, "type": "a.B", "body": b"{}"},
        {"place": 0, "type": "a.B", "body": b'{"a": 1, "a": 2}'},
        {"place": 0, "type": "a.B", "body": None},
        {"place": 0, "type": "a.B", "body": b"{}", "colour": 1},
    ):
        report = Bulk(house.app, sets={BOOK: ArrowSet(partial(book, wrong))}).run(table(bookings(3)))
        assert {each.error for each in report.parked} == {"OutputError"}
        assert (counted(report), booked(engine)) == ({"parked": 3}, 0)


def test_what_each_row_comes_to(house: House, engine: Engine) -> None:
    """As row by row: repeats inside of the chunk, and of other sources; conflicts; other ids under one digest."""
    declare(house)
    bulk, first = Bulk(house.app, sets={BOOK: BOOKING}), bookings(20)
    assert counted(bulk.run(table(first))) == {"new": 20}
    other = [replace(row, body=b'{"amount": 77}') for row in first[:2]]
    again = [
        *first,
        *bookings(10, source="g"),
        *other,
        *bookings(25)[20:],
        *bookings(25)[20:],
        *bookings(22, source="h")[20:],
    ]
    random.Random(7).shuffle(again)
    report = bulk.run(table(again))
    expected = {"replay": 25, "duplicate": 12, "conflict": 2, "new": 5}
    counts = counted(report)
    # The first of an id in the chunk is the one that is new, and in any order the others are judged by it.
    assert counts["new"] == expected["new"]
    assert counts["conflict"] == expected["conflict"]
    assert counts["replay"] + counts["duplicate"] == 37
    assert {each.error for each in report.parked} == {"PayloadConflict"}
    assert booked(engine) == 25
    with engine.begin() as connection:
        connection.execute(text("UPDATE idemp_inbox SET original_id = 'another' WHERE original_id = 'm-0'"))
    report = bulk.run(table(first[:6]))
    assert counted(report) == {"conflict": 1, "replay": 5}
    assert "another" in report.parked[0].reason


@pytest.mark.parametrize("adopt", [True, False])
def test_a_dry_run_says_what_would_be(house: House, engine: Engine, adopt: bool) -> None:
    declare(house)
    sets = {BOOK: BOOKING}
    Bulk(house.app, sets=sets).run(table(bookings(10)))
    rows = [*of_every_kind()[:13], *bookings(25), *bookings(22, source="g")]
    before, effects = claims(house), booked(engine)
    dry = Bulk(house.app, sets=sets, dry_run=True, adopt=adopt).run(table(rows))
    assert (claims(house), booked(engine)) == (before, effects)
    wet = Bulk(house.app, sets=sets, adopt=adopt).run(table(rows))
    assert counted(dry) == counted(wet)
    assert dry.rows == len(rows)


def test_a_dry_run_of_repeats_alone(house: House, engine: Engine) -> None:
    """None of them is judged as a set: what comes twice is looked at row by row."""
    declare(house)
    rows = [*bookings(3), *bookings(3, source="g")]
    dry = Bulk(house.app, sets={BOOK: BOOKING}, dry_run=True).run(table(rows))
    assert counted(dry) == {"new": 3, "duplicate": 3}
    assert booked(engine) == 0


def test_adoption(house: House, engine: Engine) -> None:
    """Ids alone will do, and nothing runs."""
    declare(house)
    rows = [replace(row, body=None) for row in bookings(30)]
    report = Bulk(house.app, adopt=True).run(table(rows).select(["id", "type", "position"]))
    assert (counted(report), report.outputs, booked(engine)) == ({"new": 30}, 0, 0)
    assert counted(Bulk(house.app, sets={BOOK: BOOKING}).run(table(bookings(31)))) == {"replay": 30, "new": 1}


def test_poison_is_found_by_halves(house: House, engine: Engine) -> None:
    declare(house)
    rows = bookings(300)
    for place in (17, 18, 250):
        rows[place] = replace(rows[place], body=b'{"amount": "many"}')
    rows[100] = replace(rows[100], body=b'{"amount": 1, "nul": "\\u0000"}')
    bulk = Bulk(house.app, sets={BOOK: BOOKING})
    report = bulk.run(table(rows))
    assert counted(report) == {"new": 296, "parked": 4}
    assert {each.row.position for each in report.parked} == {"f#17", "f#18", "f#250", "f#100"}
    assert booked(engine) == len(claims(house)) == 296
    assert counted(bulk.run(table(rows))) == {"replay": 296, "parked": 4}


def test_late_rows(house: House, engine: Engine) -> None:
    """Those that may have been purged are parked unless they are still there; policies may say otherwise."""
    declare(house, retention="5m")
    old = [
        replace(row, id=str(new_id(house.clock.now() + timedelta(milliseconds=n)))) for n, row in enumerate(bookings(6))
    ]
    stamped = replace(bookings(1)[0], id="stamped", time=datetime(2025, 12, 1, tzinfo=UTC))
    bulk = Bulk(house.app, sets={BOOK: BOOKING})
    bulk.run(table(old[:2]))
    house.consume_for_ten_minutes()
    forced = [replace(old[5], headers='{"idemp-forced": 1}')]
    report = Bulk(house.app, sets={BOOK: BOOKING}).run(table([*old[:5], stamped, *forced, *bookings(4)[:3]]))
    assert counted(report) == {"replay": 2, "parked": 4, "new": 4}
    assert {each.error for each in report.parked} == {"LateMessage"}


def test_late_rows_that_are_handled_all_the_same(house: House, caplog: pytest.LogCaptureFixture) -> None:
    declare(house, retention="5m", late="handle")
    old = [
        replace(row, id=str(new_id(house.clock.now() + timedelta(milliseconds=n)))) for n, row in enumerate(bookings(6))
    ]
    house.consume_for_ten_minutes()
    with caplog.at_level(logging.WARNING, "idemp.bulk"):
        assert counted(Bulk(house.app, sets={BOOK: BOOKING}).run(table(old))) == {"new": 6}
    assert [(record.event, record.rows) for record in caplog.records] == [("late_rows_handled", 6)]  # type: ignore[attr-defined]


def test_somebody_holds_one(house: House, engine: Engine) -> None:
    """It is waited for, and then a duplicate."""
    declare(house)
    rows = bookings(30)
    member = house.worker().arrive(_delivery(rows[11].message())).member
    assert member is not None
    claim = member.work.claims[0]
    with house.store.inner.begin([claim]) as unit:
        unit.claim(claim)
        running = Background(lambda: Bulk(house.app, sets={BOOK: BOOKING}).run(table(rows)))
        assert running.stays(1.0)
        unit.commit()
    assert counted(running.result(60)) == {"new": 29, "duplicate": 1}
    assert booked(engine) == 29


def _delivery(message: Message) -> Any:
    from idemp.broker.port import Delivery

    return Delivery(message=message, queue="shop")


def test_a_set_that_commits_behind_our_back(house: House, engine: Engine) -> None:
    """Nobody knows what of it is committed: parked, and the claims are taken back."""
    declare(house)
    ending = SqlSet(effects=["INSERT INTO booking SELECT id, 1 FROM {fresh}; COMMIT; SELECT 1"])
    report = Bulk(house.app, sets={BOOK: ending}).run(table(bookings(10)))
    assert counted(report) == {"parked": 10}
    assert {each.error for each in report.parked} == {"TransactionEnded"}
    assert claims(house) == {}


@pytest.mark.parametrize(
    "outputs",
    [
        "SELECT place, 'a.B' AS type, payload::text AS body FROM {fresh}",
        "SELECT place, 'a.B' AS type, payload AS body, 'stock' AS queue, '{\"tenant\": 7}' AS headers FROM {fresh}",
    ],
)
def test_outputs_that_leave_the_server(house: House, engine: Engine, outputs: str) -> None:
    """Texts are looked at, and headers merged, row by row."""
    declare(house)
    report = Bulk(house.app, sets={BOOK: SqlSet(outputs=outputs)}).run(table(bookings(10)))
    assert (counted(report), report.outputs, house.pending()) == ({"new": 10}, 10, 10)


def test_outputs_of_no_message(house: House) -> None:
    declare(house)
    wrong = SqlSet(outputs="SELECT place + 1 AS place, 'a.B' AS type, payload AS body FROM {fresh}")
    report = Bulk(house.app, sets={BOOK: wrong}).run(table(bookings(5)))
    assert counted(report)["parked"] >= 1
    assert report.outputs == house.pending()


def test_daily_tables_and_former_identities_go_row_by_row(house: House, engine: Engine) -> None:
    """And come to the same."""
    declare(house, previous=[Previous(key="amount")])
    bulk = Bulk(house.app, sets={BOOK: BOOKING})
    assert [counted(bulk.run(table(bookings(5)))) for _ in range(2)] == [{"new": 5}, {"replay": 5}]
    days.open_days(house.store.inner, house.clock, "shop")
    try:
        timed = [replace(row, id=str(new_id(house.clock.now()))) for row in bookings(8)[5:]]
        assert [counted(bulk.run(table(timed))) for _ in range(2)] == [{"new": 3}, {"replay": 3}]
    finally:
        days.clear(engine, Tables())


def test_tables_of_another_shape_are_refused(house: House) -> None:
    declare(house)
    bulk = Bulk(house.app, adopt=True)
    for wrong in ({"id": ["a"], "kind": ["b"]}, {"type": ["a"]}, {"id": ["a"], "time": ["soon"]}):
        with pytest.raises(ConfigurationError):
            bulk.run(pa.table(wrong))
    assert bulk.run(table([])).rows == 0


class Fussy(BaseModel):
    """A message whose own code fails for some."""

    amount: int

    @field_validator("amount")
    @classmethod
    def known(cls, amount: int) -> int:
        return {number: number for number in range(5) if number != 3}[amount]


@pytest.mark.parametrize("how", [{"dry_run": True}, {"adopt": True}])
def test_a_message_class_that_raises_costs_its_row_alone(house: House, how: dict[str, bool]) -> None:
    house.app.handler(Fussy, type=BOOK, policy=Idempotent())(lambda message, ctx: None)
    report = Bulk(house.app, **how).run(table(bookings(5)))
    assert (counted(report), [each.error for each in report.parked]) == ({"new": 4, "parked": 1}, ["KeyError"])


def test_values_that_python_can_not_read_are_their_rows_trouble(house: House) -> None:
    """As Spark hands them over: bytes that are no text, and times beyond the year 9999."""
    declare(house)
    ids, headers = [b"a", b"\xff", b"c", b"d"], [None, None, b'{"n": "\xff"}', None]
    columns = {"id": ids, "type": [BOOK.encode()] * 3 + [b"\xff"], "headers": headers}
    texts = {name: pa.array(values, pa.binary()).view(pa.string()) for name, values in columns.items()}
    time = pa.array([2**60, 0, 0, 0], pa.timestamp("us", tz="UTC"))
    report = Bulk(house.app).run(pa.table({**texts, "body": [bookings(1)[0].body] * 4, "time": time}))
    assert counted(report) == {"new": 1, "parked": 3}
    assert [each.error for each in report.parked] == ["MissingId", "UndecodableMessage", "UnknownMessageType"]


def test_counts_are_of_rows_that_stay(house: House, engine: Engine) -> None:
    """Whatever comes in whatever order: each id once, and all counts add up."""
    declare(house)
    bulk, rows, seen = Bulk(house.app, sets={BOOK: BOOKING}), bookings(200), Counter[Came]()
    chance = random.Random(11)
    for _ in range(8):
        chunk = chance.choices(rows, k=120)
        report = bulk.run(table(chunk))
        assert report.rows == 120
        seen += report.counts
    assert seen[Came.NEW] == booked(engine) == len(claims(house))


@pytest.mark.parametrize("handler", [BOOKING, ArrowSet(book_table)], ids=["sql", "arrow"])
def test_behind_a_pooler(postgresql: Any, postgresql_url: str, handler: SetHandler) -> None:
    """Each transaction has another server connection: temporary tables of an earlier one are not there."""
    with pooler(postgresql.url, lifetime=0) as front, sql_house(front.through(postgresql_url)) as house:
        engine = house.store.inner.engine
        with engine.begin() as connection:
            connection.execute(text("CREATE TABLE booking (id TEXT PRIMARY KEY, amount INTEGER NOT NULL)"))
        declare(house)
        rows, bulk = bookings(60), Bulk(house.app, sets={BOOK: handler})
        with statements(engine) as said:
            came_to = [counted(bulk.run(table(rows[start : start + 20]))) for start in (0, 20, 0, 40)]
        assert came_to == [{"new": 20}, {"new": 20}, {"replay": 20}, {"new": 20}]
        assert len([each for each in said if each.startswith("INSERT INTO booking")]) == 3, "each chunk is a set"
        assert not [each for each in said if "idemp_rows" in each], "each chunk is a set"
        assert booked(engine) == len(claims(house)) == 60
