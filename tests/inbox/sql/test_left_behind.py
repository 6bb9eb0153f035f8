"""A handler that leaves its connection in the middle of an operation, or takes it away, harms no one but its own message."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pymysql
import pytest
from sqlalchemy import text

from idemp import Context, Idempotent, Outcome
from idemp.broker.port import Park, Retry, Settlement
from idemp.errors import TransactionEnded
from idemp.inbox.sql import create_engine_safely
from tests.house import SELL, sale, sql_house
from tests.house import House as Batches
from tests.inbox.sql.kept import make_tables
from tests.inbox.sql.test_handler_failures import MODES, House, add
from tests.lanes import mostly_slow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.timeout(60)  # a worker that waits for its own handler's operation waits for ever


def raw(ctx: Context) -> Any:
    return ctx.connection.connection.driver_connection


def copy_in(ctx: Context) -> object:
    copying = raw(ctx).cursor().copy("COPY order_with_key FROM STDIN")
    copying.__enter__().write_row((7, "A-7"))
    return copying


def copy_out(ctx: Context) -> object:
    copying = raw(ctx).cursor().copy("COPY (SELECT generate_series(1, 100000)) TO STDOUT")
    next(iter(copying.__enter__()))
    return copying


def streamed(ctx: Context) -> object:
    rows = raw(ctx).cursor().stream("SELECT generate_series(1, 100000)")
    next(rows)
    return rows


def sent(ctx: Context) -> object:
    return raw(ctx).pgconn.send_query(b"SELECT 1; SELECT 2")


def pipeline(ctx: Context) -> object:
    entered = raw(ctx).pipeline()
    entered.__enter__()
    raw(ctx).execute("INSERT INTO order_with_key VALUES (7, 'A-7')")
    return entered


def block(ctx: Context) -> object:
    entered = raw(ctx).transaction()
    entered.__enter__()
    return entered


LEFT: dict[str, tuple[Callable[[Context], object], str]] = {
    "COPY FROM STDIN": (copy_in, "left a COPY"),
    "COPY TO STDOUT": (copy_out, "left a COPY"),
    "stream": (streamed, "results were not read"),
    "asynchronous query": (sent, "results were not read"),
    "pipeline": (pipeline, "left a pipeline"),
    "transaction block": (block, r"connection\.transaction"),
}


class TestPostgresql:
    @pytest.fixture(params=MODES)
    def house(self, postgresql_url: str, request: pytest.FixtureRequest) -> Iterator[House]:
        engine = create_engine_safely(postgresql_url, pool_size=1, max_overflow=0, pool_timeout=5)
        make_tables(engine)
        yield House(engine, request.param)
        engine.dispose()

    @pytest.mark.parametrize("way", LEFT)
    def test_an_operation_left_open_is_the_handlers_failure(self, house: House, way: str) -> None:
        leave, reason = LEFT[way]
        held: list[object] = []

        def leaving(ctx: Context) -> None:
            add(ctx)
            ctx.session.flush()
            held.append(leave(ctx))

        outcome, settlement = house.deliver(leaving)
        assert outcome is Outcome.RETRIED
        assert isinstance(settlement, Retry)
        assert settlement.counted
        _matches(settlement, rf"HandlerError.*{reason}")
        house.left_nothing()
        assert house.deliver(add)[0] is Outcome.HANDLED

    @pytest.mark.parametrize("way", mostly_slow(LEFT, first=3))
    def test_a_handler_that_raises_as_well_fails_of_that(self, house: House, way: str) -> None:
        held: list[object] = []

        def leaving(ctx: Context) -> None:
            held.append(LEFT[way][0](ctx))
            raise ZeroDivisionError

        outcome, settlement = house.deliver(leaving)
        assert outcome is Outcome.RETRIED
        _matches(settlement, "ZeroDivisionError")
        house.left_nothing()
        assert house.deliver(add)[0] is Outcome.HANDLED

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # psycopg's of its own cursors
    def test_what_ends_with_the_transaction_may_be_left(self, house: House) -> None:
        def leaving(ctx: Context) -> None:
            add(ctx)
            ctx.session.flush()
            raw(ctx).cursor("mine").execute("SELECT generate_series(1, 1000)").fetchone()
            ctx.connection.execution_options(stream_results=True).execute(text("SELECT generate_series(1, 1000)"))

        outcome, settlement = house.deliver(leaving)
        assert outcome is Outcome.HANDLED, settlement


def test_neighbours_in_a_batch_are_handled(postgresql_url: str) -> None:
    held: list[object] = []
    with sql_house(postgresql_url) as house:
        with house.store.inner.engine.begin() as connection:
            connection.execute(text("CREATE TABLE order_with_key (id int, sku text)"))
        assert _in_a_batch(house, lambda ctx: held.append(copy_in(ctx))) is Outcome.RETRIED


@pytest.mark.parametrize("mode", MODES)
def test_pymysql_reads_to_its_end_what_is_left(mariadb_url: str, mode: str) -> None:
    engine = create_engine_safely(mariadb_url, pool_size=1, max_overflow=0, pool_timeout=5)
    make_tables(engine)
    house, held = House(engine, mode), []

    def leaving(ctx: Context) -> None:
        add(ctx)
        ctx.session.flush()
        cursor = raw(ctx).cursor(pymysql.cursors.SSCursor)
        cursor.execute("SELECT seq FROM seq_1_to_100000")
        held.append((cursor, cursor.fetchone()))

    with pytest.warns(UserWarning, match="unbuffered result"):
        assert house.deliver(leaving)[0] is Outcome.HANDLED
    assert house.count("order_with_key") == 1
    engine.dispose()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("raises", [False, True])
def test_sqlite_refuses_to_end_what_still_writes(mode: str, tmp_path: Any, raises: bool) -> None:
    """Nor would it begin anything else on that connection."""
    engine = create_engine_safely(f"sqlite:///{tmp_path}/inbox.db")
    make_tables(engine)
    house, held = House(engine, mode), []

    def leaving(ctx: Context) -> None:
        cursor = raw(ctx).execute("INSERT INTO order_with_key VALUES (1, 'a'), (2, 'b') RETURNING id")
        held.append((cursor, cursor.fetchone()))
        if raises:
            raise ZeroDivisionError

    outcome, settlement = house.deliver(leaving)
    assert outcome is Outcome.RETRIED
    _matches(settlement, "ZeroDivisionError" if raises else "HandlerError.*rows were not read")
    house.left_nothing()
    assert house.deliver(add)[0] is Outcome.HANDLED
    engine.dispose()


TAKEN: dict[str, Callable[[Context], object]] = {
    "connection.detach": lambda ctx: ctx.connection.detach(),
    "the pool's detach": lambda ctx: ctx.connection.connection.detach(),
    "the pool's close": lambda ctx: ctx.connection.connection.close(),
    "the pool's invalidate": lambda ctx: ctx.connection.connection.invalidate(),
}


@pytest.mark.parametrize("used", mostly_slow([False, True]), ids=["left alone", "used on"])
@pytest.mark.parametrize("way", TAKEN)
@pytest.mark.parametrize("mode", mostly_slow(MODES))
def test_a_connection_that_was_taken_away_is_ended(database_url: str, mode: str, way: str, used: bool) -> None:
    """Its claim would be in flight for as long as the process lives."""
    engine = create_engine_safely(database_url, pool_size=1, max_overflow=0, pool_timeout=5)
    make_tables(engine)
    house, held = House(engine, mode), []

    def take(ctx: Context) -> None:
        ctx.connection.execute(text("INSERT INTO order_with_key (id, sku) VALUES (1, 'A-1')"))
        held.append((ctx.connection, raw(ctx)))
        with suppress(TransactionEnded):
            TAKEN[way](ctx)
        if used:
            ctx.connection.execute(text("INSERT INTO order_with_key (id, sku) VALUES (2, 'A-2')"))

    outcome, settlement = house.deliver(take)
    assert outcome is Outcome.PARKED
    assert isinstance(settlement, Park)
    assert settlement.reason == "TransactionEnded"
    _matches(settlement, r"issued detach\(\), close\(\) or invalidate\(\)")
    house.left_nothing()
    assert house.deliver(add)[0] is Outcome.HANDLED
    engine.dispose()


@pytest.mark.parametrize("way", TAKEN)
def test_neighbours_in_a_batch_keep_theirs(postgresql_url: str, way: str) -> None:
    with sql_house(postgresql_url) as house:
        assert _in_a_batch(house, TAKEN[way]) is Outcome.PARKED


def _in_a_batch(house: Batches, misdeed: Callable[[Context], object]) -> Outcome:
    """What becomes of the second of three messages, whose handler misbehaves; the others are handled once."""
    with house.store.inner.engine.begin() as connection:
        connection.execute(text("CREATE TABLE sold (id text)"))

    def sell(message: dict[str, Any], ctx: Context) -> None:
        ctx.connection.execute(text("INSERT INTO sold VALUES (:id)"), {"id": ctx.message_id})
        if ctx.message_id == "b":
            misdeed(ctx)

    house.app.handler(dict, type=SELL, policy=Idempotent(batch=50, retry_delays=["1s"]))(sell)
    first, second, third = (outcome for outcome, _ in house.together(*map(sale, "abc")))
    assert (first, third) == (Outcome.HANDLED, Outcome.HANDLED)
    with house.store.inner.engine.connect() as connection:
        assert sorted(connection.scalars(text("SELECT id FROM sold"))) == ["a", "c"]
    return second


def _matches(settlement: Settlement, pattern: str) -> None:
    said = f"{settlement.reason} {getattr(settlement, 'headers', '')}"  # type: ignore[union-attr]
    assert re.search(pattern, said, re.DOTALL), said
