"""A right that the database takes from a worker's user holds consumption: no message is blamed, whatever the path."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy import Engine, exc, inspect, make_url, text

from idemp import Context, Idempotent, Message, Outcome, Policy
from idemp.broker.port import Park, Retry
from idemp.clock import SystemClock
from idemp.diagnosis import Diagnosis, shell
from idemp.errors import SchemaError, StoreError, StoreUnavailable
from idemp.inbox.sql import SqlStore, create_engine_safely
from idemp.inbox.sql.diagnosing import Diagnoses
from idemp.inbox.sql.failures import denied
from idemp.inbox.sql.schema import check, upgrade
from idemp.inbox.sql.tables import Tables
from tests.house import SELL, House, sale, sql_house
from tests.lanes import mostly_slow

POLICIES = {
    "early": Idempotent(attempts=1),
    "late": Idempotent(attempts=1, claim="late"),
    "not opted in": Policy(attempts=1),
}


@pytest.fixture(params=["postgresql", "mariadb"])
def url(request: pytest.FixtureRequest) -> str:
    """Each server in turn."""
    return str(request.getfixturevalue(f"{request.param}_url"))


@dataclass
class Limited:
    """A user whose rights the owner of the tables gives and takes."""

    owner: Engine
    who: str
    url: str

    def run(self, statement: str) -> None:
        with self.owner.begin() as connection:
            connection.execute(text(statement))

    @contextmanager
    def without(self, right: str, table: str) -> Iterator[None]:
        self.run(f"REVOKE {right} ON {table} FROM {self.who}")
        yield
        self.run(f"GRANT {right} ON {table} TO {self.who}")


@pytest.fixture
def limited(url: str, unique_name: str) -> Iterator[Limited]:
    with sql_house(url):  # makes the tables, as their owner
        pass
    owner, postgresql = create_engine_safely(url), "postgresql" in url
    who = unique_name if postgresql else f"{unique_name}@'%'"
    user = Limited(owner, who, make_url(url).set(username=unique_name, password=None).render_as_string())
    user.run(f"CREATE ROLE {who} LOGIN" if postgresql else f"CREATE USER {who}")
    if postgresql:
        user.run(f"GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO {who}")
        user.run(f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {who}")
    else:
        with owner.connect() as connection:
            tables = connection.scalars(text("SHOW TABLES")).all()
        for table in tables:
            user.run(f"GRANT ALL ON {table} TO {who}")
    yield user
    if postgresql:
        user.run(f"DROP OWNED BY {who}")
    user.run(f"DROP {'ROLE' if postgresql else 'USER'} {who}")
    owner.dispose()


def sell(message: dict[str, Any], ctx: Context) -> None:
    ctx.send({}, to="stock", type="stock.Reserve")


def spend(message: dict[str, Any], ctx: Context) -> None:
    if ctx.message_id == "bad":
        ctx.connection.execute(text("INSERT INTO secret VALUES (1)"))


@pytest.mark.parametrize("command", mostly_slow(["inbox explain sale-1", "inbox list", "inbox list --pending"]))
def test_reading_commands_need_to_read_alone(limited: Limited, command: str) -> None:
    """On PostgreSQL in a session that takes no writes, too."""
    with sql_house(limited.url) as house:
        house.sells(outputs=1)
        house.deliver()
    with limited.owner.connect() as connection:
        tables = [name for name in inspect(connection).get_table_names() if name.startswith("idemp_")]
    for table in tables:
        limited.run(f"REVOKE ALL ON {table} FROM {limited.who}")
        limited.run(f"GRANT SELECT ON {table} TO {limited.who}")
    if "postgresql" in limited.url:
        limited.run(f"REVOKE ALL ON ALL SEQUENCES IN SCHEMA public FROM {limited.who}")
        limited.run(f"ALTER ROLE {limited.who} SET default_transaction_read_only = on")
    program = [sys.executable, "-m", "idemp", *command.split(), "--database", limited.url]
    done = subprocess.run(program, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("policy", ["early", "late"])
@pytest.mark.parametrize(
    "table", ["message_type", *(pytest.param(name, marks=pytest.mark.slow) for name in ("inbox", "output", "pending"))]
)
def test_a_duplicate_that_may_not_be_read_is_held(limited: Limited, policy: str, table: str) -> None:
    """Its read joins four tables; by any of them it was counted as a failure of the handler's, and parked."""
    with sql_house(limited.url) as house:
        house.sells(outputs=2, **({"claim": "late"} if policy == "late" else {}), attempts=1)
        assert house.handle()[0] is Outcome.HANDLED
        with limited.without("SELECT", f"idemp_{table}"):
            for _ in range(5):  # more often than losses are forgiven
                with pytest.raises(StoreUnavailable, match=rf"idemp_{table}"):
                    house.handle()
        assert house.handle()[0] is Outcome.REDISPATCHED
        assert house.sales() == 1


@pytest.mark.parametrize(
    "policy", ["early", *(pytest.param(name, marks=pytest.mark.slow) for name in POLICIES if name != "early")]
)
@pytest.mark.parametrize(
    ("right", "table"),
    [
        ("INSERT", "message_type"),
        pytest.param("SELECT", "inbox", marks=pytest.mark.slow),
        pytest.param("INSERT", "inbox", marks=pytest.mark.slow),
        pytest.param("SELECT", "message_type", marks=pytest.mark.slow),
        pytest.param("INSERT", "output", marks=pytest.mark.slow),
        pytest.param("INSERT", "pending", marks=pytest.mark.slow),
        pytest.param("INSERT", "unfinished", marks=pytest.mark.slow),
        pytest.param("SELECT", "activity", marks=pytest.mark.slow),
        pytest.param("SELECT", "worker", marks=pytest.mark.slow),
        pytest.param("SELECT", "consumer", marks=pytest.mark.slow),
    ],
)
def test_a_first_delivery_is_handled_or_held(limited: Limited, policy: str, right: str, table: str) -> None:
    """Once a worker was started, and while it is; whether it needs the right depends on what it knows already."""
    for known in (False, True):
        with sql_house(limited.url) as house:
            house.app.handler(dict, type=SELL, policy=POLICIES[policy])(sell)
            if known:
                house.handle(sale("before"))
            with limited.without(right, f"idemp_{table}"):
                held = _tried(house, known, f"idemp_{table}")
            for message in held:
                assert house.handle(message, redelivered=True)[0] is Outcome.HANDLED


def _tried(house: House, known: bool, table: str) -> list[Message]:
    """Which of five deliveries were held; none is parked, or comes back as a failure."""
    held = []
    for number in range(5):
        message = sale(f"sale-{known}-{number}")
        try:
            assert house.handle(message, redelivered=True)[0] is Outcome.HANDLED
        except StoreUnavailable as error:
            assert table in str(error)  # noqa: PT017 - others may be handled
            held.append(message)
    return held


@pytest.mark.parametrize("table", ["inbox", "message_type"])
def test_a_worker_is_refused_at_start_with_the_statement_that_helps(limited: Limited, table: str) -> None:
    engine = create_engine_safely(limited.url)
    with limited.without("SELECT", f"idemp_{table}"):
        with pytest.raises(SchemaError, match=rf"has no SELECT on idemp_{table}\. .*GRANT SELECT ON ") as refused:
            check(engine, Tables())
        limited.run(refused.value.fix.partition(": ")[2])
        check(engine, Tables())
    engine.dispose()


def test_the_version_that_may_not_be_read_is_a_matter_of_rights(limited: Limited) -> None:
    engine = create_engine_safely(limited.url)
    with limited.without("SELECT", "idemp_alembic_version"):
        with pytest.raises(SchemaError, match=r"has no SELECT on idemp_alembic_version\. ") as refused:
            check(engine, Tables())
        limited.run(refused.value.fix.partition(": ")[2])
        check(engine, Tables())
    engine.dispose()


@pytest.mark.parametrize("right", ["INSERT", pytest.param("DELETE", marks=pytest.mark.slow)])
def test_a_probe_that_is_denied_names_the_statement_that_helps(limited: Limited, right: str) -> None:
    engine = create_engine_safely(limited.url)
    table = "output" if right == "INSERT" else "unfinished"
    with limited.without(right, f"idemp_{table}"):
        with pytest.raises(SchemaError, match=rf"idemp_{table} can't be written: .*GRANT {right} ON ") as refused:
            check(engine, Tables())
        limited.run(refused.value.fix.partition(": ")[2])
        check(engine, Tables())
    engine.dispose()


@pytest.mark.parametrize("granted", [(), pytest.param(("idemp_alembic_version",), id="but for the version")])
def test_a_user_without_rights_is_given_the_statements(limited: Limited, granted: tuple[str, ...]) -> None:
    """MariaDB does not show the tables to this user: they must not pass for missing."""
    limited.run("CREATE TABLE effect (id int)")
    for table in Tables().names:
        limited.run(f"REVOKE ALL ON {table} FROM {limited.who}")
    if "postgresql" in limited.url:
        limited.run(f"REVOKE ALL ON ALL SEQUENCES IN SCHEMA public FROM {limited.who}")
    for table in ("effect", *granted):  # without any right, MariaDB does not even let the user log in to the database
        limited.run(f"GRANT SELECT ON {table} TO {limited.who}")
    engine = create_engine_safely(limited.url)
    with pytest.raises(
        SchemaError, match=r"The user .* has no SELECT.* on .*GRANT SELECT, INSERT, DELETE ON "
    ) as refused:
        check(engine, Tables())
    diagnosed = [item for item in _diagnosed(engine) if item.verdict == "failed"]
    assert [item.name for item in diagnosed] == ["rights"]
    statements = [command.text for command in diagnosed[0].commands]
    assert refused.value.fix.partition(": ")[2].split("; ") == statements
    for statement in statements:
        limited.run(statement)
    assert not [item for item in _diagnosed(engine) if item.verdict == "failed"]
    engine.dispose()


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
def test_a_schema_that_may_not_be_used_is_named_with_all_else(limited: Limited, unique_name: str) -> None:
    schema = f"{unique_name}_apart"
    limited.run(f"CREATE SCHEMA {schema}")
    tables = Tables(schema=schema)
    upgrade(limited.owner, tables)
    engine = create_engine_safely(limited.url)
    with pytest.raises(SchemaError, match=rf"has no USAGE on schema {schema}, .*; no SELECT on ") as refused:
        check(engine, tables)
    for statement in refused.value.fix.partition(": ")[2].split("; "):
        limited.run(statement)
    check(engine, tables)
    engine.dispose()


def _diagnosed(engine: Engine) -> list[Diagnosis]:
    return Diagnoses(engine, Tables(), SystemClock(), shell("idemp", "db", "upgrade")).run()


def test_it_exits_as_refused(limited: Limited) -> None:
    with limited.without("SELECT", "idemp_inbox"):
        command = [sys.executable, "-m", "idemp", "db", "check", "--database", limited.url]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == 3
    assert "GRANT SELECT ON" in answer.stderr


@pytest.mark.parametrize("table", ["pending", "activity", "worker"])
def test_relay_and_heartbeat_name_the_right(limited: Limited, table: str) -> None:
    store = SqlStore(create_engine_safely(limited.url))
    store.prepare("shop")
    met = []
    with limited.without("SELECT", f"idemp_{table}"):
        for run in (
            lambda: store.upkeep.beat("w", relay=True, consumers=["shop"]),
            store.upkeep.pending_state,
            store.upkeep.relay_alive,
        ):
            try:
                run()
            except StoreError as error:
                met.append(error)
    assert met
    for error in met:
        assert error.message.startswith("The database user lacks a right: ")
        assert f"idemp_{table}" in error.message
    store.close()
    store.engine.dispose()


def test_a_statement_that_a_program_denies_to_sqlite_is_a_matter_of_rights() -> None:
    driver = sqlite3.connect(":memory:")
    driver.execute("CREATE TABLE idemp_inbox (id int)")
    driver.set_authorizer(lambda *_: sqlite3.SQLITE_DENY)
    with pytest.raises(sqlite3.DatabaseError) as raised:
        driver.execute("SELECT id FROM idemp_inbox")
    driver.close()
    assert isinstance(denied(exc.DBAPIError("SELECT", {}, raised.value)), StoreUnavailable)


def test_one_that_the_handler_lacks_counts(limited: Limited) -> None:
    limited.run("CREATE TABLE secret (id int)")
    with sql_house(limited.url) as house:
        house.app.handler(dict, type=SELL, policy=POLICIES["early"])(spend)
        assert house.handle(sale("bad"))[0] is Outcome.PARKED
        assert house.handle(sale("good"))[0] is Outcome.HANDLED


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
@pytest.mark.parametrize(
    ("policy", "setting", "size"),
    mostly_slow(
        [
            ("early", "SET LOCAL ROLE {}", 1),
            ("early", "SET LOCAL transaction_read_only = on", 1),
            ("early", "SELECT set_config('role', '{}', true)", 20_000),  # outputs by a statement of their own
            ("early", "SET TRANSACTION READ ONLY", 20_000),
            ("early", "SET ROLE {}", 1),
            ("late", "SET LOCAL ROLE {}", 1),
            ("late", "SET LOCAL transaction_read_only = on", 1),
        ],
        first=2,
    ),
)
def test_what_a_handler_leaves_set_counts_as_its_failure(
    limited: Limited, tenant: str, policy: str, setting: str, size: int
) -> None:
    with sql_house(limited.url) as house:
        runs = switching(house, policy, setting.format(tenant), size)
        first, second = house.handle(sale("bad")), house.handle(sale("bad"), attempt=2)
        assert first[1] == Retry(first[1].delay, counted=True)  # type: ignore[union-attr]
        assert isinstance(second[1], Park)
        assert second[1].reason == "HandlerError"
        detail = second[1].headers["idemp-dead-error"]
        assert "The handler left its transaction in " in detail
        assert "Reset what was set" in detail
        assert len(runs) == 2
        assert house.handle(sale("good"))[0] is Outcome.HANDLED


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
@pytest.mark.parametrize("way", ["role", "read-only"])
def test_what_a_handler_resets_is_no_matter(limited: Limited, tenant: str, way: str) -> None:
    """As the reason of the failure says."""

    def sell(message: dict[str, Any], ctx: Context) -> None:
        if way == "role":
            ctx.connection.execute(text(f"SET LOCAL ROLE {tenant}"))
            ctx.connection.execute(text("SET LOCAL ROLE NONE"))
        else:
            with ctx.connection.begin_nested():
                ctx.connection.execute(text("SET LOCAL transaction_read_only = on"))
                ctx.connection.execute(text("SELECT 1"))
        ctx.send({}, to="stock", type="stock.Reserve")

    with sql_house(limited.url) as house:
        house.app.handler(dict, type=SELL, policy=POLICIES["early"])(sell)
        assert house.handle(sale("bad"))[0] is Outcome.HANDLED


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
def test_what_is_left_set_in_a_batch_fails_the_one_that_set_it(limited: Limited, tenant: str) -> None:
    with sql_house(limited.url) as house:
        switching(house, "early", f"SET LOCAL ROLE {tenant}", 1, batch=3)
        house.together(sale("good"), sale("bad"), sale("better"))
        assert house.handle(sale("good"))[0] is Outcome.REDISPATCHED
        assert house.handle(sale("better"))[0] is Outcome.REDISPATCHED
        assert house.handle(sale("bad"), attempt=2)[0] is Outcome.PARKED


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
@pytest.mark.parametrize("size", [1, pytest.param(20_000, marks=pytest.mark.slow)])
def test_a_right_that_the_login_lacks_as_well_holds_consumption(limited: Limited, tenant: str, size: int) -> None:
    with sql_house(limited.url) as house:
        switching(house, "early", f"SET LOCAL ROLE {tenant}", size)
        with limited.without("INSERT", "idemp_output"), pytest.raises(StoreUnavailable, match="idemp_output"):
            house.handle(sale("bad"))


@pytest.fixture
def tenant(limited: Limited) -> Iterator[str]:
    """A role that the user may take, and that has no rights on idemp's tables."""
    name = f"{limited.who}_tenant"
    limited.run(f"CREATE ROLE {name}; GRANT {name} TO {limited.who}")
    yield name
    limited.run(f"DROP ROLE {name}")


def switching(house: House, policy: str, setting: str, size: int, **options: Any) -> list[None]:
    """A handler that runs a statement on the message `bad` and emits so much; its runs."""
    runs: list[None] = []

    def sell(message: dict[str, Any], ctx: Context) -> None:
        if ctx.message_id == "bad":
            runs.append(None)
            ctx.connection.execute(text(setting))
        ctx.send({"of": "x" * size}, to="stock", type="stock.Reserve")

    house.app.handler(dict, type=SELL, policy=Idempotent(attempts=2, claim=policy, **options))(sell)  # type: ignore[arg-type]
    return runs


@pytest.mark.parametrize("url", ["mariadb"], indirect=True)
def test_all_rights_that_are_taken_hold_consumption(limited: Limited) -> None:
    """A new connection is refused by another error number (1044) than a statement on an old one."""
    with sql_house(limited.url) as house:
        house.sells(attempts=1)
        assert house.handle()[0] is Outcome.HANDLED
        limited.run(f"REVOKE ALL PRIVILEGES, GRANT OPTION FROM {limited.who}")
        for fresh in (False, True):
            if fresh:
                house.store.inner.engine.dispose()
            with pytest.raises(StoreUnavailable, match="lacks a right"):
                house.handle(sale("sale-2"))
