"""What an error means on real servers: what is the message's own counts, what is the database's holds consumption."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, make_url, text

from idemp import Context, Idempotent, Message, Outcome, Policy
from idemp.broker.copies import attempt_of, retried
from idemp.broker.memory import InMemoryBroker
from idemp.broker.port import Park, Retry
from idemp.errors import StoreUnavailable
from idemp.inbox.sql import create_engine_safely
from tests.house import SELL, House, sale, sql_house
from tests.lanes import mostly_slow
from tests.poison.mill import FINE, QUEUE, Mill
from tests.servers.process import wait_until

EARLY, LATE, NOT_OPTED_IN = Idempotent(attempts=2), Idempotent(attempts=2, claim="late"), Policy(attempts=2)
NUMBER = {"postgresql": "SELECT pg_backend_pid()", "mysql": "SELECT CONNECTION_ID()"}
PRESENT = {
    "postgresql": "SELECT count(*) FROM pg_stat_activity WHERE pid = :number",
    "mysql": "SELECT count(*) FROM information_schema.processlist WHERE id = :number",
}
TIMEOUT = {
    "postgresql": "SET idle_in_transaction_session_timeout = '200ms'",
    "mysql": "SET SESSION wait_timeout = 1",
}
END = {"postgresql": "SELECT pg_terminate_backend(:number)", "mysql": "KILL :number"}


@pytest.fixture(params=["postgresql", "mariadb"])
def url(request: pytest.FixtureRequest) -> str:
    """Each server in turn."""
    return str(request.getfixturevalue(f"{request.param}_url"))


@pytest.fixture
def beside(url: str) -> Iterator[Engine]:
    """The administrator's own connections."""
    engine = create_engine_safely(url).execution_options(isolation_level="AUTOCOMMIT")
    yield engine
    engine.dispose()


def kind_of(engine: Engine) -> str:
    return "postgresql" if engine.dialect.name == "postgresql" else "mysql"


def by_timeout(beside: Engine, connection: Connection) -> None:
    """The server ends the connection, since nothing is sent on it for too long."""
    kind = kind_of(beside)
    number = connection.scalar(text(NUMBER[kind]))
    connection.execute(text(TIMEOUT[kind]))
    gone(beside, number)


def by_administrator(beside: Engine, connection: Connection) -> None:
    """Somebody ends it."""
    kind = kind_of(beside)
    number = connection.scalar(text(NUMBER[kind]))
    with beside.connect() as other:
        other.execute(text(END[kind]), {"number": number})
    gone(beside, number)


def gone(beside: Engine, number: Any) -> None:
    with beside.connect() as other:
        wait_until(
            lambda: not other.scalar(text(PRESENT[kind_of(beside)]), {"number": number}), "the connection is gone"
        )


def losing(
    house: House, policy: Policy, lose: Callable[[Connection], None], *, statement: bool, outputs: int
) -> list[str | None]:
    """A handler whose message `bad` loses its connection; whose handler was started."""
    runs: list[str | None] = []

    def sell(message: dict[str, Any], ctx: Context) -> None:
        runs.append(ctx.message_id)
        house.effects.write(ctx, "sale")  # type: ignore[arg-type]
        for _ in range(outputs):
            ctx.send({}, to="stock", type="stock.Reserve")
        if ctx.message_id == "bad":
            lose(ctx.connection)
            if statement:
                house.effects.write(ctx, "sale")  # type: ignore[arg-type]

    house.app.handler(dict, type=SELL, policy=policy)(sell)
    return runs


def until_parked(house: House, message: Message) -> tuple[list[bool], str]:
    """Deliver until the message is parked; which of its retries counted, and the reason."""
    counted: list[bool] = []
    while len(counted) < 20:
        settlement = house.handle(message, attempt=attempt_of(message))[1]
        if isinstance(settlement, Park):
            return counted, settlement.reason
        assert isinstance(settlement, Retry)
        counted.append(settlement.counted)
        message = retried(message, settlement, house.clock.now())
    raise AssertionError("it is never parked")


@pytest.mark.parametrize(
    ("policy", "statement", "outputs"),
    mostly_slow(
        [(EARLY, True, 0), (NOT_OPTED_IN, True, 1), (EARLY, False, 1), (LATE, False, 1), (NOT_OPTED_IN, False, 0)],
        first=2,
    ),
)
def test_a_connection_that_is_ended_while_each_run_computes(
    url: str, beside: Engine, policy: Policy, statement: bool, outputs: int
) -> None:
    """Whether the handler notices, or its outputs, or COMMIT: the message is parked in the end, and no neighbour waits."""
    with sql_house(url) as house:
        runs = losing(
            house, policy, lambda connection: by_administrator(beside, connection), statement=statement, outputs=outputs
        )
        assert isinstance(house.handle(sale("bad"))[1], Retry)
        assert house.handle(sale("good"))[0] is Outcome.HANDLED
        counted, reason = until_parked(house, sale("bad"))
        assert counted == [False] * 3 + [True]
        assert reason in {"StoreUnavailable", "CommitUnknown" if policy is NOT_OPTED_IN else ""}
        assert len(runs) == 1 + 2 * 6
        assert house.sales() == 1


@pytest.mark.parametrize("statement", [True, False])
def test_a_timeout_of_the_server_that_is_shorter_than_the_handler(url: str, beside: Engine, statement: bool) -> None:
    """`idle_in_transaction_session_timeout`, of which the server says that it was the cause; `wait_timeout`."""
    named = kind_of(beside) == "postgresql"
    with sql_house(url) as house:
        runs = losing(
            house,
            Idempotent(attempts=1),
            lambda connection: by_timeout(beside, connection),
            statement=statement,
            outputs=1,
        )
        _, reason = until_parked(house, sale("bad", headers={} if named else {"idemp-deferred": 3}))
        assert (len(runs), reason) == ((1, "InternalError") if named else (2, "StoreUnavailable"))
        assert house.handle(sale("good"))[0] is Outcome.HANDLED
        assert house.sales() == 1


def test_a_connection_that_is_ended_once(url: str, beside: Engine) -> None:
    """Case 34: the delivery runs again at once, and counts no attempt."""
    lost: list[None] = []

    def once(connection: Connection) -> None:
        if not lost:
            lost.append(None)
            by_administrator(beside, connection)

    with sql_house(url) as house:
        runs = losing(house, Idempotent(attempts=1), once, statement=False, outputs=1)
        assert house.handle(sale("bad"))[0] is Outcome.HANDLED
        assert (len(runs), house.sales(), len(house.sent())) == (2, 1, 1)


# Tables of idemp's own ------------------------------------------------------------------------------------------------


@contextmanager
def altered(beside: Engine, *statements: str) -> Iterator[None]:
    """Statements at the beginning of the block, and those after "/" at its end."""
    with beside.connect() as connection:
        for statement in statements:
            connection.execute(text(statement.partition(" / ")[0]))
        yield
        for statement in statements:
            connection.execute(text(statement.partition(" / ")[2]))


def renamed(table: str) -> str:
    return f"ALTER TABLE {table} RENAME TO away / ALTER TABLE away RENAME TO {table}"


def without(table: str, column: str) -> str:
    return f"ALTER TABLE {table} RENAME COLUMN {column} TO x / ALTER TABLE {table} RENAME COLUMN x TO {column}"


@pytest.mark.parametrize(
    ("claim", "redelivered", "statement"),
    mostly_slow(
        [
            ("early", False, renamed("idemp_inbox")),
            ("late", False, renamed("idemp_inbox")),
            ("early", False, renamed("idemp_output")),
            ("late", False, renamed("idemp_pending")),
            ("early", True, renamed("idemp_unfinished")),
            ("early", False, without("idemp_inbox", "claimed_at")),
            ("late", False, without("idemp_output", "ordinal")),
        ],
        first=3,
    ),
)
def test_a_table_that_is_missing_or_altered_holds_consumption(
    url: str, beside: Engine, claim: Any, redelivered: bool, statement: str
) -> None:
    """It blames no message, however often it is tried, and all goes on when it is there again."""
    with sql_house(url) as house:
        house.sells(outputs=2, attempts=1, claim=claim)
        assert house.handle(sale("before"))[0] is Outcome.HANDLED
        with altered(beside, statement):
            for _ in range(3):
                with pytest.raises(StoreUnavailable, match=r"idemp_|away"):
                    house.handle(redelivered=redelivered)
        assert house.handle(redelivered=redelivered)[0] is Outcome.HANDLED
        assert house.sales() == 2


def test_a_privilege_that_is_revoked_holds_consumption(url: str, beside: Engine, unique_name: str) -> None:
    """On a table of idemp's own; on one of the handler's it counts, as whatever a handler meets."""
    with sql_house(url):  # makes the tables, as their owner
        pass
    who, of_all = (unique_name, "ALL TABLES IN SCHEMA public") if "postgresql" in url else (f"{unique_name}@'%'", "*")
    limited = make_url(url).set(username=unique_name, password=None)
    with beside.connect() as connection:
        connection.execute(text(f"CREATE {'ROLE' if 'postgresql' in url else 'USER'} {who}"))
        if "postgresql" in url:
            connection.execute(text(f"ALTER ROLE {who} LOGIN"))
            connection.execute(text(f"GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO {who}"))
            connection.execute(text(f"GRANT ALL ON {of_all} TO {who}"))
        else:
            for table in connection.scalars(text("SHOW TABLES")).all():
                connection.execute(text(f"GRANT ALL ON {table} TO {who}"))
    with sql_house(limited.render_as_string(hide_password=False)) as house:
        house.sells(outputs=1, attempts=1)
        assert house.handle(sale("before"))[0] is Outcome.HANDLED
        for table in ("idemp_inbox", "idemp_output", "idemp_pending"):
            with altered(beside, f"REVOKE INSERT ON {table} FROM {who} / GRANT INSERT ON {table} TO {who}"):
                for _ in range(3):
                    with pytest.raises(StoreUnavailable, match=table):
                        house.handle(sale(table))
            assert house.handle(sale(table))[0] is Outcome.HANDLED
        effect = "REVOKE INSERT ON conformance_effect FROM {0} / GRANT INSERT ON conformance_effect TO {0}"
        with altered(beside, effect.format(who)):
            assert house.handle(sale("last"))[0] is Outcome.PARKED
    with beside.connect() as connection:
        if "postgresql" in url:
            connection.execute(text(f"DROP OWNED BY {who}"))
        connection.execute(text(f"DROP {'ROLE' if 'postgresql' in url else 'USER'} {who}"))


@pytest.mark.parametrize("batch", mostly_slow([1, 10]))
def test_a_worker_pauses_while_a_table_is_missing(
    url: str, beside: Engine, batch: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Twenty messages, none of them parked."""
    with closing(Mill(url, InMemoryBroker(), retry_delays=["10ms"], batch=batch)) as mill:
        with mill.working(threads=2):
            first = {str(message.message_id) for message in mill.send([FINE])[FINE]}
            wait_until(lambda: mill.outputs().keys() == first, "it works")
            with altered(beside, renamed("idemp_output")):
                ids = {str(message.message_id) for message in mill.send([FINE] * 20)[FINE]}
                wait_until(lambda: "tables are missing: idemp_output" in caplog.text, "it says why", seconds=120)
                wait_until(lambda: len(mill.runs) > 5, "it tries again", seconds=120)
                assert (mill.depth(f"{QUEUE}.dead"), mill.effects().keys()) == (0, first)
            wait_until(lambda: mill.outputs().keys() == ids | first, "all are handled", seconds=120)
        assert mill.effects() == dict.fromkeys(ids | first, 1)
        assert mill.depth(f"{QUEUE}.dead") == 0


def test_a_role_that_a_handler_takes_on_is_its_own_fault(postgresql_url: str, unique_name: str) -> None:
    """The store's statements fail behind it in the same transaction; another connection shows that the store is well."""
    with sql_house(postgresql_url) as house:
        engine = house.store.inner.engine
        with engine.begin() as connection:
            connection.execute(text(f"CREATE ROLE {unique_name}"))

        def sell(message: dict[str, Any], ctx: Context) -> None:
            ctx.send({}, to="stock", type="stock.Reserve")
            if ctx.message_id == "bad":
                ctx.connection.execute(text(f"SET LOCAL ROLE {unique_name}"))

        house.app.handler(dict, type=SELL, policy=Idempotent(attempts=1))(sell)
        assert isinstance(house.handle(sale("bad"))[1], Park | Retry)
        assert house.handle(sale("good"))[0] is Outcome.HANDLED
        until_parked(house, sale("bad"))
        with engine.begin() as connection:
            connection.execute(text(f"DROP ROLE {unique_name}"))
