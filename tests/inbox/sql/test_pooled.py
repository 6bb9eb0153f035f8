"""Behind PgBouncer, where each transaction may run on another server connection, with whatever others left there."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import create_engine, text

from idemp import Context, Idempotent, Outcome
from idemp.clock import SystemClock
from idemp.diagnosis import shell
from idemp.errors import ConfigurationError, GuaranteeError, StoreUnavailable
from idemp.inbox.sql import SqlStore, Tables, create_engine_safely
from idemp.inbox.sql.diagnosing import Diagnoses
from idemp.inbox.sql.engine import give_up_on_locks
from idemp.inbox.sql.pooler import is_shared, with_settings
from idemp.inbox.sql.schema import check
from idemp.inbox.sql.upkeep import SqlUpkeep
from idemp.spool import SpoolStore
from idemp.twophase.sql import SqlDatabase
from tests.house import SELL, House, sale, sql_house
from tests.inbox.sql.kept import make_tables
from tests.servers.fixtures import pooler

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sqlalchemy import Engine

    from tests.servers.pgbouncer import PgBouncer

CONSUMERS = 6
IDS = 600


@pytest.mark.parametrize(
    "mode", ["early", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("late", "batches"))]
)
def test_effects_and_outputs_once(pooled_url: str, mode: str) -> None:
    """Each id comes twice, to two of six processes that share four server connections."""
    with ExitStack() as stack:
        houses = [stack.enter_context(sql_house(pooled_url)) for _ in range(CONSUMERS)]
        engine = houses[0].store.inner.engine
        with engine.begin() as connection:
            connection.execute(text("CREATE TABLE sold (id text, seller int)"))
        ids = [f"sale-{number}" for number in range(IDS)]
        with ThreadPoolExecutor(CONSUMERS) as threads:
            outcomes = sum(threads.map(lambda item: _sell(item[1], item[0], ids, mode), enumerate(houses)), Counter())
        with engine.connect() as connection:
            counted = connection.execute(
                text(
                    "SELECT (SELECT count(*) FROM sold), (SELECT count(DISTINCT id) FROM sold), "
                    "(SELECT count(*) FROM idemp_inbox), (SELECT count(*) FROM idemp_output)"
                )
            ).one()
    assert tuple(counted) == (IDS, IDS, IDS, 2 * IDS)
    assert outcomes == {Outcome.HANDLED: IDS, Outcome.REDISPATCHED: IDS}


def _sell(house: House, number: int, ids: Sequence[str], mode: str) -> Counter[Outcome]:
    """What became of a third of the ids: those of this process and of the next one."""

    def sell(message: dict[str, Any], ctx: Context) -> None:
        # Another number of statements in each process, as in programs that have nothing to do with each other.
        for turn in range(number):
            ctx.connection.execute(text(f"SELECT {turn}, CAST(:id AS text)"), {"id": ctx.message_id})
        ctx.connection.execute(text("INSERT INTO sold VALUES (:id, :n)"), {"id": ctx.message_id, "n": number})
        ctx.send({"n": 0}, to="stock", type="stock.Reserve")
        ctx.send({"n": 1}, to="stock", type="stock.Reserve")

    batch = 25 if mode == "batches" else 1
    policy = Idempotent(batch=batch, claim="late" if mode == "late" else "early")
    house.app.handler(dict, type=SELL, policy=policy)(sell)
    mine = [sale(each) for place, each in enumerate(ids) if place % CONSUMERS in {number, (number + 1) % CONSUMERS}]
    outcomes: Counter[Outcome] = Counter()
    while mine:
        part, mine = mine[:batch], mine[batch:]
        came_to = house.together(*part) if batch > 1 else [house.handle(part[0])]
        for message, (outcome, _) in zip(part, came_to, strict=True):
            if outcome is Outcome.IN_FLIGHT:
                mine.append(message)
            else:
                outcomes[outcome] += 1
    return outcomes


@contextmanager
def of_the_users(url: str, **options: Any) -> Iterator[Engine]:
    """An engine that idemp did not make."""
    engine = create_engine(url, **options)
    try:
        yield engine
    finally:
        engine.dispose()


@pytest.mark.parametrize("mode", ["transaction", pytest.param("session", marks=pytest.mark.slow)])
def test_engine_of_the_users_is_refused(postgresql: Any, postgresql_url: str, mode: str) -> None:
    """Statements under the same names are mixed up in transaction mode; nothing tells the two modes apart."""
    with pooler(postgresql.url, mode=mode) as front, ExitStack() as stack:
        url = front.through(postgresql_url)
        named = stack.enter_context(of_the_users(url))
        unnamed = stack.enter_context(of_the_users(url, connect_args={"prepare_threshold": None}))
        make_tables(unnamed)
        for refusing in (
            lambda: check(named, Tables()),
            lambda: SpoolStore(named).create("orders"),
            lambda: SqlDatabase("ledger", named).verify(),
        ):
            with pytest.raises(GuaranteeError, match="prepared statements would be mixed up") as refused:
                refusing()
            assert 'connect_args={"prepare_threshold": None}' in refused.value.fix
        check(unnamed, Tables())
        verdicts = [_pooler_verdict(engine) for engine in (named, unnamed)]
    assert verdicts == ["failed", "warning"]


def test_without_a_pooler_statements_stay_prepared(postgresql_url: str) -> None:
    with of_the_users(postgresql_url) as theirs, of_the_users(postgresql_url) as made:
        make_tables(theirs)
        check(theirs, Tables())
        assert _pooler_verdict(theirs) is None
    made = create_engine_safely(postgresql_url)
    with made.connect() as connection:
        assert not is_shared(connection)
        assert connection.connection.driver_connection.prepare_threshold is not None  # type: ignore[union-attr]
        assert connection.scalar(text("SHOW tcp_keepalives_idle")) in {"10", "0"}  # 0: by a Unix socket
    made.dispose()


def test_statement_mode_is_refused(postgresql: Any, postgresql_url: str) -> None:
    """No transaction can begin there: a wrong setting, and no outage that waiting or starting a server would end."""
    with pooler(postgresql.url, mode="statement") as front:
        url = front.through(postgresql_url)
        engine = create_engine_safely(url)
        for refusing in (
            lambda: check(engine, Tables()),
            lambda: Diagnoses(engine, Tables(), SystemClock(), shell("idemp", "db", "upgrade")).run(),
        ):
            with pytest.raises(
                ConfigurationError, match="is in statement mode, where no transaction can begin"
            ) as found:
                refusing()
            assert "pool_mode = transaction, or session" in found.value.fix
        with pytest.raises(StoreUnavailable, match=r"allows no transactions: .*pool_mode = transaction"):
            SqlStore(engine, tables=Tables(schema="public")).begin()
        command = [sys.executable, "-m", "idemp", "db", "check", "--database", url]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        engine.dispose()
    assert answer.returncode == 3
    assert "pool_mode" in answer.stderr


def _pooler_verdict(engine: Engine) -> str | None:
    found = Diagnoses(engine, Tables(), SystemClock(), None).run()  # type: ignore[arg-type]
    return next((each.verdict for each in found if each.name == "pooler"), None)


def test_other_clients_get_no_settings(pgbouncer: PgBouncer, pooled_url: str) -> None:
    """What a session sets stays on a server connection, and the next client has it."""
    settings = ("lock_timeout", "statement_timeout", "tcp_keepalives_idle", "tcp_user_timeout")
    asked = text("SELECT " + ", ".join(f"current_setting('{name}')" for name in settings))
    ours = create_engine_safely(pooled_url)
    give_up_on_locks(ours)
    with_settings(ours, "SELECT set_config('statement_timeout', '60s', {local})")
    with of_the_users(pooled_url, connect_args={"prepare_threshold": None}) as theirs:
        with _all_server_connections(theirs) as connections:
            before = [connection.execute(asked).one() for connection in connections]
        with _all_server_connections(ours) as connections:
            during = [connection.execute(asked).one() for connection in connections]
        with _all_server_connections(theirs) as connections:
            after = [connection.execute(asked).one() for connection in connections]
    ours.dispose()
    assert [row[:2] for row in during] == [("10s", "1min")] * len(during)
    assert after == before


@contextmanager
def _all_server_connections(engine: Engine) -> Iterator[list[Any]]:
    """As many transactions as the pooler has server connections."""
    with ExitStack() as stack:
        connections = [stack.enter_context(engine.begin()) for _ in range(4)]
        pids = {connection.scalar(text("SELECT pg_backend_pid()")) for connection in connections}
        assert len(pids) == 4
        yield connections


def test_nobody_listens_on_the_server_connection_of_another(pooled_url: str) -> None:
    """A relay polls; announcements of its own process wake it."""
    engine = create_engine_safely(pooled_url)
    make_tables(engine)
    with closing(SqlUpkeep(engine, Tables(), SystemClock(), "host-1")) as upkeep, ThreadPoolExecutor(1) as threads:
        assert upkeep.wait_for_pending(0.05) is False
        with _all_server_connections(engine) as connections:
            channels = [connection.scalars(text("SELECT pg_listening_channels()")).all() for connection in connections]
        assert channels == [[]] * 4
        waiting = threads.submit(upkeep.wait_for_pending, 60)
        upkeep.announce_pending()
        assert waiting.result(120) is True
    engine.dispose()
