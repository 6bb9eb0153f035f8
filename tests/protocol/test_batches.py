"""Deliveries that share a transaction: each comes to what it would have come to alone."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel
from sqlalchemy import text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from idemp import BatchContext, Context, Idempotent, Outcome, Policy, Previous
from idemp.broker.port import Ack, Binding, Delivery, Park, Retry, Topology
from idemp.bulk.batch import CLAIM_WAIT, Batch, may_share
from idemp.errors import ConfigurationError, StoreUnavailable
from idemp.handlers import DEFAULT_BATCH
from idemp.identity import new_id
from idemp.inbox.sql import claim_postgresql, claiming
from idemp.inbox.sql.unit import SqlUnit
from idemp.testing.faulty import CommitFault
from tests.house import SELL, House, memory_house, sale, sql_house
from tests.inbox.sql.unseen import end_unseen

if TYPE_CHECKING:
    from collections.abc import Iterator

    from idemp.messages import Message


class Base(DeclarativeBase):
    pass


class Sold(Base):
    __tablename__ = "sold"
    name: Mapped[str] = mapped_column(primary_key=True)


HANDLED, REDISPATCHED = (Outcome.HANDLED, Ack()), (Outcome.REDISPATCHED, Ack())


class Receipt(BaseModel):
    """What is returned."""

    __message_type__ = "shop.Receipt"
    n: int


class OutOfStockError(Exception):
    """What the handler raises for some."""


class Runs:
    """The usual handler, and how often it ran for each message; it fails for those in `failing`."""

    def __init__(self, house: House, **policy: Any) -> None:
        self.house = house
        self.runs: Counter[str] = Counter()
        self.failing: set[str] = set()
        self.attempts: list[int] = []
        self.then = lambda ctx: None
        options = {"batch": 50, "retry_delays": ["1s"], **policy}
        house.app.handler(dict, type=SELL, policy=Idempotent(**options))(self.sell)

    def sell(self, message: dict[str, Any], ctx: Context) -> None:
        assert ctx.message_id is not None
        self.runs[ctx.message_id] += 1
        self.attempts.append(ctx.attempt)
        self.house.effects.write(ctx, "sale")  # type: ignore[arg-type]
        ctx.send({"of": ctx.message_id}, to="stock", type="stock.Reserve")
        if ctx.message_id in self.failing:
            self.then(ctx)
            raise OutOfStockError


@pytest.fixture
def shop(house: House) -> Runs:
    return Runs(house)


def sales(*names: str) -> list[Message]:
    return [sale(name) for name in names]


def sent_of(house: House) -> list[str]:
    return [output.message.causation_id or "" for output in house.publisher.sent]


def calls(house: House) -> list[str]:
    """What was asked of the store since the last time, marks aside."""
    made = [call for call in house.script.calls if call not in {"publish", "record"}]
    house.script.calls.clear()
    return made


ONE_TRANSACTION = ["begin", "claim", "store", "commit"]


def test_one_transaction_for_all(shop: Runs) -> None:
    house = shop.house
    assert house.together(*sales("a", "b", "c")) == [HANDLED] * 3
    assert calls(house) == ONE_TRANSACTION
    assert sent_of(house) == ["a", "b", "c"]
    assert (house.sales(), house.pending()) == (3, 0)
    assert [house.deliver(each) for each in sales("a", "b", "c")] == [Outcome.REDISPATCHED] * 3
    assert house.sales() == 3


def test_the_ids_of_outputs_are_those_of_one_alone(shop: Runs) -> None:
    shop.house.together(*sales("a", "b"))
    alone = memory_house()
    Runs(alone)
    alone.deliver(sale("b"))
    assert alone.publisher.sent == [each for each in shop.house.publisher.sent if each.message.causation_id == "b"]


def test_duplicates_within_a_batch(shop: Runs) -> None:
    """The second one is a duplicate once the first is committed, and sends the same."""
    house = shop.house
    assert house.together(*sales("a", "b", "a", "a")) == [HANDLED, HANDLED, REDISPATCHED, REDISPATCHED]
    assert shop.runs == {"a": 1, "b": 1}
    ids = [output.id for output in house.publisher.sent]
    assert (ids[0], ids[0]) == (ids[2], ids[3])


def test_duplicates_and_conflicts_beside_fresh_ones(shop: Runs) -> None:
    house = shop.house
    house.together(*sales("known", "other"))
    calls(house)
    found = house.together(sale("known"), sale("new"), sale("other", {"sku": "B-2"}))
    assert found[:2] == [REDISPATCHED, HANDLED]
    outcome, settlement = found[2]
    assert outcome is Outcome.PARKED
    assert isinstance(settlement, Park)
    assert settlement.reason == "PayloadConflict"
    assert calls(house) == ONE_TRANSACTION
    assert shop.runs == {"known": 1, "other": 1, "new": 1}


def test_only_duplicates(shop: Runs) -> None:
    """Nothing is committed, and what was confirmed is not sent again where the policy says so."""
    house = shop.house
    shop_policy = Idempotent(batch=50, redispatch="pending")
    house.app.handler(dict, type="shop.Return", policy=shop_policy)(lambda message, ctx: _returns(ctx))
    returns = [sale(name, type="shop.Return") for name in "abc"]
    house.script.answers = ["confirm", "nacked", "confirm"]
    assert [outcome for outcome, _ in house.together(*returns)] == [Outcome.HANDLED, Outcome.PENDING, Outcome.HANDLED]
    house.publisher.sent.clear()
    calls(house)
    assert [outcome for outcome, _ in house.together(*returns)] == [
        Outcome.SKIPPED, Outcome.REDISPATCHED, Outcome.SKIPPED
    ]  # fmt: skip
    assert calls(house) == ["begin", "claim"]
    assert sent_of(house) == ["b"]


def _returns(ctx: Context) -> None:
    ctx.send({}, to="stock", type="stock.Return")


# One fails -----------------------------------------------------------------------------------------------------------


def test_one_fails(shop: Runs) -> None:
    """It alone is retried; those before and after it are handled, in batches of their own."""
    house = shop.house
    shop.failing = {"c"}
    found = house.together(*sales("a", "b", "c", "d", "e"))
    assert [each for place, each in enumerate(found) if place != 2] == [HANDLED] * 4
    assert found[2] == (Outcome.RETRIED, Retry(timedelta(seconds=1), counted=True, attempt=2, attempts=7))
    assert shop.runs == {"a": 2, "b": 2, "c": 2, "d": 1, "e": 1}
    assert set(shop.attempts) == {1}
    assert sent_of(house) == ["a", "b", "d", "e"]
    assert house.sales() == 4
    assert calls(house) == ["begin", "claim", *ONE_TRANSACTION, *ONE_TRANSACTION, "begin", "claim"]
    shop.failing = set()
    assert house.together(*sales("b", "c"))[1] == HANDLED
    assert house.sales() == 5


@pytest.mark.parametrize("failing", ["a", "e", "ae", "bd", "abcde", "abcd"])
def test_several_fail(shop: Runs, failing: str) -> None:
    """No handler that works runs more than twice for each that fails."""
    shop.failing = set(failing)
    found = shop.house.together(*sales(*"abcde"))
    for name, (outcome, settlement) in zip("abcde", found, strict=True):
        assert outcome is (Outcome.RETRIED if name in failing else Outcome.HANDLED)
        assert isinstance(settlement, Retry if name in failing else Ack)
    assert shop.house.sales() == 5 - len(failing)
    assert max(shop.runs.values()) <= 2 + len(failing)
    assert sorted(sent_of(shop.house)) == [name for name in "abcde" if name not in failing]


def test_out_of_memory_is_nobodys_fault(shop: Runs) -> None:
    def then(ctx: Context) -> None:
        raise MemoryError

    shop.failing, shop.then = {"b"}, then  # type: ignore[assignment]
    with pytest.raises(MemoryError):
        shop.house.together(*sales("a", "b"))


def test_a_nack_concerns_one_alone(shop: Runs) -> None:
    shop.house.script.answers = ["confirm", "nacked", "confirm"]
    outcomes = [outcome for outcome, _ in shop.house.together(*sales("a", "b", "c"))]
    assert outcomes == [Outcome.HANDLED, Outcome.PENDING, Outcome.HANDLED]
    assert shop.house.pending() == 1


@pytest.mark.parametrize("failing", [40, 20])
def test_many_fail(shop: Runs, failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claims are taken back time and again, but not those of all for each that fails."""
    claims, transaction = [], Batch._in_one_transaction
    monkeypatch.setattr(
        Batch, "_in_one_transaction", lambda batch, group: claims.append(len(group)) or transaction(batch, group)
    )
    names = [f"m{number}" for number in range(40)]
    shop.failing = set(names[:: 40 // failing])
    found = shop.house.together(*sales(*names))
    assert sum(outcome is Outcome.RETRIED for outcome, _ in found) == failing
    assert shop.house.sales() == 40 - failing
    assert sum(claims) <= 40 * 7


def test_too_large_together(sql: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection is lost whenever many are stored at once: that is no outage, and fewer go through."""
    store_all = SqlUnit.store_all

    def storing(unit: Any, handled: Any, relay_after: Any) -> None:
        if len(handled) > 3:
            raise StoreUnavailable("server closed the connection unexpectedly")
        store_all(unit, handled, relay_after)

    monkeypatch.setattr(SqlUnit, "store_all", storing)
    assert sql.house.together(*sales(*"abcdefgh")) == [HANDLED] * 8
    assert sql.house.sales() == 8


def test_large_outputs_are_stored_in_parts(sql: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers have a limit to a statement."""
    monkeypatch.setattr(claiming, "_MOST_BYTES", 20)
    monkeypatch.setattr(claim_postgresql, "LONGEST_OF_BATCH", 10)
    dialect = sql.house.store.inner.dialect
    parts, store_outputs = [], dialect.store_outputs

    def storing(connection: Any, handled: Any, due: Any) -> Any:
        parts.append(len(handled))
        return store_outputs(connection, handled, due)

    monkeypatch.setattr(dialect, "store_outputs", storing)
    assert sql.house.together(*sales(*"abcde")) == [HANDLED] * 5
    assert sum(parts) == 5
    assert max(parts) < 5
    assert sql.house.together(*sales(*"abcde")) == [REDISPATCHED] * 5
    assert len({output.id for output in sql.house.publisher.sent}) == 5


# Who can't share ----------------------------------------------------------------------------------------------------


def test_redelivered_ones_that_are_fresh_run_alone(shop: Runs) -> None:
    """Each may be what ended a process: its start is recorded before its handler runs."""
    house = shop.house
    assert house.together(*sales("a", "b"), redelivered=True) == [HANDLED] * 2
    alone = ["note start", *ONE_TRANSACTION, "note end"]
    assert calls(house) == ["begin", "claim", *alone, *alone]
    assert shop.runs == {"a": 1, "b": 1}


def test_redelivered_duplicates_share(shop: Runs) -> None:
    """No handler runs, so there is nothing to record."""
    house = shop.house
    house.together(*sales("a", "b"))
    calls(house)
    assert house.together(*sales("a", "b"), redelivered=True) == [REDISPATCHED] * 2
    assert calls(house) == ["begin", "claim"]


def test_late_ones_are_parked_alone(house: House) -> None:
    old = sale(str(new_id(house.clock.now())))
    house.consume_for_ten_minutes()
    shop = Runs(house, retention="5m")
    first, parked, last = house.together(sale("a"), old, sale("b"))
    assert (first, last) == (HANDLED, HANDLED)
    assert isinstance(parked[1], Park)
    assert parked[1].reason == "LateMessage"
    assert shop.runs == {"a": 1, "b": 1}


def test_who_looks_for_a_former_identity_runs_alone(house: House) -> None:
    house.sells(batch=50, key="sku", previous=[Previous(key="order_no")])
    handling = house.worker().arrive(Delivery(message=sale(body={"sku": "A", "order_no": 1}), queue="shop"))
    assert handling.member is not None
    assert not may_share(handling.member.work)


@pytest.mark.parametrize("options", [{"claim": "late"}, {"idempotent": False}, {"batch": 0}, {"batch": 1001}])
def test_policies_without_batches(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        Idempotent(**{"batch": 50, **options})


def test_in_flight_elsewhere() -> None:
    """The others are handled; that one comes back later, or is waited for as long as its policy says."""
    memory = memory_house()
    shop = Runs(memory, claim_wait="1ms")
    message = sale("b")
    member = memory.worker().arrive(Delivery(message=message, queue="shop")).member
    assert member is not None
    with memory.store.begin() as other:
        other.claim(member.work.claims[0])
        found = memory.together(sale("a"), message, sale("c"))
    assert [outcome for outcome, _ in found] == [Outcome.HANDLED, Outcome.IN_FLIGHT, Outcome.HANDLED]
    assert found[1][1] == Retry(timedelta(seconds=5), counted=False)
    assert shop.runs == {"a": 1, "c": 1}


# The database -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["lost, committed", "lost, not committed", "transient"])
def test_commit_without_an_answer(shop: Runs, fault: CommitFault) -> None:
    """It is run again as a whole; what was committed is then a duplicate."""
    house = shop.house
    house.script.commit_faults = [fault]
    committed = fault == "lost, committed"
    assert house.together(*sales("a", "b")) == [REDISPATCHED if committed else HANDLED] * 2
    assert (house.sales(), house.pending()) == (2, 0)
    assert sent_of(house) == ["a", "b"]


def test_away_and_back(shop: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was done stays done, and the rest goes on."""
    house = shop.house
    protocol = house.worker()
    monkeypatch.setattr(protocol, "obstacle", lambda: StoreUnavailable("away"))
    shop.failing = {"b"}
    handlings = [protocol.arrive(Delivery(message=each, queue="shop")) for each in sales("a", "a0", "b", "c", "d")]
    members = [handling.member for handling in handlings if handling.member is not None]
    batch = Batch(protocol, members, protocol.ended)
    house.script.store_faults = [None, None, *[StoreUnavailable("away") for _ in range(6)]]
    with pytest.raises(StoreUnavailable):
        batch.run()
    assert shop.runs == {"a": 2, "a0": 2, "b": 1}
    shipped = [getattr(each, "outputs", None) for each in batch.run()]
    assert [each is not None for each in shipped] == [True, True, False, True, True]
    assert shop.runs == {"a": 2, "a0": 2, "b": 1, "c": 1, "d": 1}
    assert house.sales() == 4


def test_asked_again_and_again(shop: Runs) -> None:
    """They lose against others as long as they hold much: each alone gets through."""
    house = shop.house
    house.script.commit_faults = ["transient"] * 6
    assert house.together(*sales("a", "b")) == [HANDLED] * 2
    assert shop.runs == {"a": 7, "b": 7}
    assert house.sales() == 2


@pytest.mark.parametrize(
    "point",
    [
        *["before begin", "after begin", "before claim", "after claim", "before store", "after store", "before commit"],
        *["after commit", "before publish", "after publish", "in the middle"],
    ],
)
def test_the_process_dies(shop: Runs, point: str) -> None:
    """At any point: all come again, and in the end each was handled once, and everything was sent."""
    house = shop.house
    if point == "in the middle":
        house.script.crash_after_outputs = 2
    else:
        house.script.die(point)
    with house.crashing():
        house.together(*sales("a", "b", "c"))
    handled = point.startswith("in") or point in {"after commit", "before publish", "after publish"}
    assert house.sales() == (3 if handled else 0)
    assert house.together(*sales("a", "b", "c"), redelivered=True) == [REDISPATCHED if handled else HANDLED] * 3
    assert (house.sales(), house.pending()) == (3, 0)
    assert {output.message.causation_id for output in house.publisher.confirmed} == {"a", "b", "c"}
    assert len({output.id for output in house.publisher.sent}) == 3


# What handlers do to the transaction that they share ------------------------------------------------------------------


@pytest.fixture(params=["sqlite", "postgresql"])
def sql(request: pytest.FixtureRequest) -> Iterator[Runs]:
    url = "sqlite://" if request.param == "sqlite" else request.getfixturevalue("postgresql_url")
    with sql_house(url) as house:
        yield Runs(house)


@pytest.mark.parametrize("swallows", [False, True])
def test_one_wants_to_commit(sql: Runs, swallows: bool) -> None:
    """It is refused and parked; nothing of it stays, and the others are handled."""

    def then(ctx: Context) -> None:
        try:
            ctx.session.commit()
        except Exception:
            if not swallows:
                raise

    sql.failing, sql.then = {"b"}, then  # type: ignore[assignment]
    first, (outcome, settlement), last = sql.house.together(*sales("a", "b", "c"))
    assert (first, last) == (HANDLED, HANDLED)
    assert outcome is Outcome.PARKED
    assert isinstance(settlement, Park)
    assert settlement.reason == "TransactionEnded"
    assert sql.house.sales() == 2


@pytest.mark.parametrize("end", ["commit", "rollback"])
@pytest.mark.parametrize("raises", [False, True])
def test_one_ends_it_behind_our_back(sql: Runs, end: str, raises: bool) -> None:
    """Nobody knows any more what of those before it is committed: they are parked with it, and none is taken for handled."""

    def then(ctx: Context) -> None:
        end_unseen(ctx.connection, end.upper())

    sql.failing, sql.then = ({"b"}, then) if raises else (set(), sql.then)  # type: ignore[assignment]
    if not raises:
        plain = sql.sell

        def sell(message: dict[str, Any], ctx: Context) -> None:
            plain(message, ctx)
            if ctx.message_id == "b":
                then(ctx)

        sql.house.app.registry.declared.clear()
        sql.house.app.handler(dict, type=SELL, policy=Idempotent(batch=50))(sell)
    found = sql.house.together(*sales("a", "b", "c", "d"))
    assert [outcome for outcome, _ in found] == [Outcome.PARKED] * 2 + [Outcome.HANDLED] * 2
    assert [getattr(settlement, "reason", "") for _, settlement in found[:2]] == ["TransactionEnded"] * 2
    assert sql.runs == {"a": 1, "b": 1, "c": 1, "d": 1}
    assert sql.house.sales() == (4 if end == "commit" else 2)
    sql.failing = set()
    sql.house.app.registry.declared.clear()
    sql.house.app.handler(dict, type=SELL, policy=Idempotent())(lambda message: None)
    sql.house.restart()
    assert [sql.house.deliver(each) for each in sales("a", "b", "c")] == [
        Outcome.HANDLED, Outcome.HANDLED, Outcome.REDISPATCHED
    ]  # fmt: skip


def test_the_database_goes_before_claims_are_withdrawn(sql: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that never ran do not pass for handled: what is owed is done before the next claim."""
    store: Any = sql.house.store.inner
    failures = [StoreUnavailable("away")]
    withdraw = store._withdraw_now

    def withdrawing(rows: Any) -> bool:
        if failures:
            raise failures.pop()
        return withdraw(rows)

    monkeypatch.setattr(store, "_withdraw_now", withdrawing)
    sql.failing, sql.then = {"b"}, lambda ctx: end_unseen(ctx.connection)  # type: ignore[assignment]
    found = sql.house.together(*sales("a", "b", "c", "d"))
    assert [outcome for outcome, _ in found] == [Outcome.PARKED] * 2 + [Outcome.HANDLED] * 2
    assert sql.runs == {"a": 1, "b": 1, "c": 1, "d": 1}
    assert sql.house.sales() == 4


def test_one_swallows_a_failed_statement(postgresql_url: str) -> None:
    """The one after it is not held to account for it."""
    with sql_house(postgresql_url) as house:
        shop = Runs(house)
        plain = shop.sell

        def sell(message: dict[str, Any], ctx: Context) -> None:
            plain(message, ctx)
            if ctx.message_id == "b":
                try:
                    ctx.connection.execute(text("SELECT 1 / 0"))
                except Exception:
                    return

        house.app.registry.declared.clear()
        house.app.handler(dict, type=SELL, policy=Idempotent(batch=50, retry_delays=["1s"]))(sell)
        found = house.together(*sales("a", "b", "c"))
        assert [outcome for outcome, _ in found] == [Outcome.HANDLED, Outcome.RETRIED, Outcome.HANDLED]
        assert shop.runs == {"a": 2, "b": 2, "c": 1}


def test_commit_fails_of_one(postgresql_url: str) -> None:
    """A deferred constraint says only that something is wrong: it is found by halves."""
    with sql_house(postgresql_url) as house:
        with house.store.inner.engine.begin() as connection:
            connection.execute(text("CREATE TABLE account (n int PRIMARY KEY)"))
            connection.execute(text("CREATE TABLE entry (n int REFERENCES account DEFERRABLE INITIALLY DEFERRED)"))
        shop = Runs(house)
        plain = shop.sell

        def sell(message: dict[str, Any], ctx: Context) -> None:
            plain(message, ctx)
            if ctx.message_id == "c":
                ctx.connection.execute(text("INSERT INTO entry VALUES (1)"))

        house.app.registry.declared.clear()
        house.app.handler(dict, type=SELL, policy=Idempotent(batch=50, retry_delays=["1s"]))(sell)
        found = house.together(*sales(*"abcdefgh"))
        assert [outcome for outcome, _ in found] == [
            Outcome.RETRIED if name == "c" else Outcome.HANDLED for name in "abcdefgh"
        ]
        assert house.sales() == 7
        assert max(shop.runs.values()) <= 5


def test_a_held_id_on_a_real_server(postgresql_url: str) -> None:
    """PostgreSQL does not say which one is held: it is found by halves, each of which waits a moment."""
    with sql_house(postgresql_url) as house:
        shop = Runs(house, claim_wait="50ms")
        member = house.worker().arrive(Delivery(message=sale("c"), queue="shop")).member
        assert member is not None
        with house.store.inner.begin(member.work.claims) as other:
            other.claim(member.work.claims[0])
            found = house.together(*sales(*"abcdefgh"))
        assert [outcome for outcome, _ in found] == [
            Outcome.IN_FLIGHT if name == "c" else Outcome.HANDLED for name in "abcdefgh"
        ]
        assert shop.runs == dict.fromkeys("abdefgh", 1)
        assert timedelta(0) < CLAIM_WAIT < timedelta(seconds=2)


def test_sessions_of_two_handlers(postgresql_url: str) -> None:
    """What one handler holds in its session is nothing to the next one."""
    with sql_house(postgresql_url) as house:
        Base.metadata.create_all(house.store.inner.engine)
        held: list[int] = []

        def sell(message: dict[str, Any], ctx: Context) -> None:
            held.append(len(ctx.session.identity_map) + len(ctx.session.new))
            ctx.session.add(kept := Sold(name=str(ctx.message_id)))
            alive.append(kept)

        alive: list[Sold] = []
        house.app.handler(dict, type=SELL, policy=Idempotent(batch=50))(sell)
        assert [outcome for outcome, _ in house.together(*sales("a", "b", "c"))] == [Outcome.HANDLED] * 3
        assert held == [0, 0, 0]
        with house.store.inner.engine.connect() as connection:
            assert connection.scalars(text("SELECT name FROM sold ORDER BY name")).all() == ["a", "b", "c"]


# Handlers that take several at once -----------------------------------------------------------------------------------


class Takes:
    """A batch handler, and what it was given; it fails while one of `failing` is among them."""

    def __init__(self, house: House, **policy: Any) -> None:
        self.house = house
        self.given: list[list[str]] = []
        self.failing: set[str] = set()
        self.answer = lambda ctx: [None] * len(ctx.each)
        options = {"batch": 50, "retry_delays": ["1s"], **policy}
        house.app.batch_handler(dict, type=SELL, policy=Idempotent(**options))(self.sell)

    def sell(self, messages: list[dict[str, Any]], ctx: BatchContext) -> Any:
        names = [str(one.message_id) for one in ctx.each]
        self.given.append(names)
        assert len(messages) == len(names)
        for one in ctx.each:
            self.house.effects.write(ctx, "sale")  # type: ignore[arg-type]
            one.send({"of": one.message_id}, to="stock", type="stock.Reserve")
        if self.failing & set(names):
            raise OutOfStockError
        return self.answer(ctx)


@pytest.fixture
def takes(house: House) -> Takes:
    return Takes(house)


def test_a_batch_handler_gets_new_ones_only(takes: Takes) -> None:
    """In their order; each output is caused by its own message, with the id that it would have alone."""
    house = takes.house
    house.deliver(sale("known"))
    calls(house)
    found = house.together(*sales("a", "known", "b", "a", "c"))
    assert found == [HANDLED, REDISPATCHED, HANDLED, REDISPATCHED, HANDLED]
    assert takes.given == [["known"], ["a", "b", "c"]]
    assert calls(house) == [*ONE_TRANSACTION, "begin", "claim"]
    assert house.sales() == 4
    alone = memory_house()
    Runs(alone)
    alone.deliver(sale("b"))
    (wanted,) = alone.publisher.sent
    assert wanted in house.publisher.sent


def test_it_returns_one_for_each(takes: Takes) -> None:
    house = takes.house
    bound = Binding("receipts", "shop.Receipt")
    house.broker.declare(Topology(exchange="idemp", queues=("receipts",), bindings=(bound,)))
    answers = [Receipt(n=0), None, [Receipt(n=1), Receipt(n=2)]]
    takes.answer = lambda ctx: answers  # type: ignore[assignment,return-value]
    found = house.together(*sales("a", "b", "c"))
    assert found == [HANDLED] * 3
    assert sent_of(house) == ["a", "a", "b", "c", "c", "c"]


@pytest.mark.parametrize("answer", [[], [None] * 4, "abc", {"a": 1}, 7])
def test_it_returns_something_else(takes: Takes, answer: Any) -> None:
    """Nothing is committed; alone they fail of the same."""
    takes.answer = lambda ctx: answer
    outcomes = [outcome for outcome, _ in takes.house.together(*sales("a", "b", "c"))]
    assert outcomes == [Outcome.RETRIED] * 3
    assert (takes.house.sales(), takes.house.publisher.sent) == (0, [])


@pytest.mark.parametrize("failing", ["a", "d", "h", "ah", "cdef"])
def test_one_of_them_fails(takes: Takes, failing: str) -> None:
    """Nobody says which one: it is found by halves."""
    takes.failing = set(failing)
    found = takes.house.together(*sales(*"abcdefgh"))
    assert [outcome for outcome, _ in found] == [
        Outcome.RETRIED if name in failing else Outcome.HANDLED for name in "abcdefgh"
    ]
    assert takes.house.sales() == 8 - len(failing)
    assert sorted(sent_of(takes.house)) == [name for name in "abcdefgh" if name not in failing]
    assert len(takes.given) <= 2 * 3 * len(failing) + 2


def test_batch_handlers_beside_others(house: House) -> None:
    """One transaction; those of one handler go together, at the place of the first."""
    takes, order = Takes(house), []
    house.app.handler(dict, type="shop.Return", policy=Idempotent(batch=50))(lambda message: order.append(message["n"]))
    messages = [
        sale("a"),
        sale("r1", {"n": 1}, type="shop.Return"),
        sale("b"),
        sale("r2", {"n": 2}, type="shop.Return"),
    ]
    assert house.together(*messages) == [HANDLED] * 2 + [HANDLED] * 2
    assert (takes.given, order) == ([["a", "b"]], [1, 2])
    takes.failing = {"d"}
    messages = [
        sale("c"),
        sale("r3", {"n": 3}, type="shop.Return"),
        sale("d"),
        sale("r4", {"n": 4}, type="shop.Return"),
    ]
    assert [outcome for outcome, _ in house.together(*messages)] == [
        Outcome.HANDLED, Outcome.HANDLED, Outcome.RETRIED, Outcome.HANDLED
    ]  # fmt: skip
    assert house.sales() == 3


def test_batch_handlers_need_to_be_opted_in(house: House) -> None:
    def sell(messages: list[dict[str, Any]]) -> None: ...

    house.app.batch_handler(dict, type=SELL, policy=Policy())(sell)
    with pytest.raises(ConfigurationError, match="opted in"):
        house.app.registry.build()


def test_the_default_size_and_the_annotation(house: House) -> None:
    class Sell(BaseModel):
        __message_type__ = "shop.Sell"
        sku: str

    def sell(messages: list[Sell]) -> None: ...

    sell.__annotations__["messages"] = list[Sell]
    house.app.batch_handler(policy=Idempotent(retention="1d"))(sell)
    (registration,) = house.app.registry.registrations()
    assert (registration.message_type, registration.policy.batch) == ("shop.Sell", DEFAULT_BATCH)
    assert registration.policy.retention == timedelta(days=1)
    assert house.app.prefetch == 2 * DEFAULT_BATCH


def test_one_changes_the_database_session(postgresql_url: str) -> None:
    """Neither its neighbours nor later deliveries run under what it has set."""
    found: dict[str | None, object] = {}
    with sql_house(postgresql_url) as house:

        def sell(message: dict[str, Any], ctx: Context) -> None:
            found[ctx.message_id] = ctx.connection.execute(text("SHOW application_name")).scalar()
            if ctx.message_id == "b":
                ctx.connection.execute(text("SET application_name = 'b'"))

        house.app.handler(dict, type=SELL, policy=Idempotent(batch=50, retry_delays=["1s"]))(sell)
        assert house.together(*sales("a", "b", "c", "d")) == [HANDLED] * 4
    assert len(found) == 4
    assert "b" not in found.values()
