"""The how-to on two databases: its code runs as it stands there; and what the command line says of them."""

from __future__ import annotations

import gc
import json
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session, sessionmaker
from typer.testing import CliRunner

from idemp import App, ConfigurationError, Context, Idempotent, Inbox, Message, Outcome, Previous, TwoPhase
from idemp.broker.memory import InMemoryBroker
from idemp.broker.port import Delivery, Retry
from idemp.cli import root
from idemp.inbox.sql import create_engine_safely
from idemp.testing import context
from idemp.twophase import Recovery
from idemp.twophase.sql.branch import SqlBranch
from tests.docs.pages import blocks, page
from tests.servers.process import wait_until
from tests.twophase.dying import dying
from tests.twophase.kinds import ON_MARIADB, ON_POSTGRESQL

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.twophase.world import World

(CODE,) = blocks(page("how-to/two-databases.md"), "python")
# Commands leave connections to their end.
FORGOTTEN_CONNECTIONS = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture
def billing(shop: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[App]:
    """The page's app as a module, on the world's databases."""
    module: Any = ModuleType("billing")
    code = CODE.replace('"postgresql://worker@db/billing"', repr(shop.place.inbox))
    code = code.replace('"mariadb://worker@books/ledger"', repr(shop.place.others["ledger"]))
    module.broker = InMemoryBroker()
    exec(code.replace('"local://broker.db"', "broker"), module.__dict__)
    monkeypatch.setitem(sys.modules, "billing", module)
    for name, table in (("", "paid"), ("ledger", "booked")):
        with shop.engines[name].begin() as connection:
            connection.execute(text(f"CREATE TABLE IF NOT EXISTS {table} (id int PRIMARY KEY, amount int)"))
            connection.execute(text(f"DELETE FROM {table}"))
    module.app.start()
    yield module.app
    module.app.close()


def paying(id: int) -> Message:
    body = {"payment_id": id, "amount": 10}
    return Message(body=json.dumps(body).encode(), type="billing.Pay", message_id=f"payment-{id}")


def deliver(app: App, id: int) -> Outcome:
    return app.protocol(app.broker.publisher()).process(paying(id))


def rows(shop: World) -> tuple[list[int], list[int]]:
    found = []
    for name, table in (("", "paid"), ("ledger", "booked")):
        with shop.engines[name].connect() as connection:
            found.append(list(connection.scalars(text(f"SELECT id FROM {table} ORDER BY id"))))
    return found[0], found[1]


def run(*arguments: str) -> tuple[int, Any]:
    done = CliRunner().invoke(root, [*arguments, "--json"])
    return done.exit_code, json.loads(done.stdout)


def refused(*arguments: str) -> str:
    """What a command says that fails."""
    done = CliRunner().invoke(root, arguments)
    assert done.exit_code
    return done.stderr


@FORGOTTEN_CONNECTIONS
def test_page_and_commands(shop: World, billing: App, monkeypatch: pytest.MonkeyPatch) -> None:
    id = 1 if shop.is_postgresql("ledger") else 2  # noqa: A001 - one inbox for all tests of this folder
    base = 1000 * id
    deliver(billing, base)
    assert rows(shop) == ([base], [base])

    with monkeypatch.context() as patch:
        patch.setattr(SqlBranch, "commit", lambda branch: (_ for _ in ()).throw(ConnectionError()))
        with pytest.raises(ConnectionError):
            deliver(billing, base + 1)
    assert rows(shop) == ([base, base + 1], [base])

    explain = ("inbox", "explain", str(base + 1), "--consumer", "billing", "--database", shop.place.inbox)
    assert run(*explain)[1][0]["unfinished_in"] == ["ledger"]
    code, told = run("recover", "billing:app", "--dry-run")
    assert code == 1
    assert {item["state"] for item in told["found"]} == {"in doubt"}
    code, told = run("recover", "billing:app")
    assert (code, {item["state"] for item in told["found"]}, told["left"]) == (0, {"committed"}, 0)
    assert rows(shop) == ([base, base + 1], [base, base + 1])
    assert run(*explain)[1][0]["unfinished_in"] == []
    assert run("recover", "billing:app") == (0, {"found": [], "left": 0, "away": {}})
    assert deliver(billing, base + 1) in {Outcome.REDISPATCHED, Outcome.PENDING}

    code, told = run("describe", "billing:app")
    assert (code, told["databases"]) == (0, {"ledger": billing.coordinator.databases["ledger"].place})  # type: ignore[union-attr]
    code, told = run("doctor", "billing:app")
    checks = {check["name"]: check for check in told["checks"]}
    assert checks["database ledger"]["verdict"] == "ok", checks
    assert checks["in doubt"]["verdict"] == "ok"
    gc.collect()
    assert shop.in_doubt() == []
    assert shop.others_are_untouched()


@pytest.mark.slow
@ON_POSTGRESQL
def test_room_that_others_take(shop: World, billing: App) -> None:
    """No handling gets through, and `idemp recover` knows nothing of them."""
    ledger = billing.coordinator.databases["ledger"]  # type: ignore[union-attr]
    room = ledger.room(billing.coordinator.decisions.inbox())  # type: ignore[attr-defined]
    names = [f"somebody-{number}" for number in range(room.most - room.others)]
    with shop.engines["ledger"].connect() as connection:
        by_hand = connection.execution_options(isolation_level="AUTOCOMMIT")
        try:
            for name in names:
                by_hand.exec_driver_sql(f"BEGIN; PREPARE TRANSACTION '{name}'")
            checks = {check["name"]: check for check in run("doctor", "billing:app")[1]["checks"]}
        finally:
            held = set(by_hand.exec_driver_sql("SELECT gid FROM pg_prepared_xacts").scalars())
            for name in held.intersection(names):
                by_hand.exec_driver_sql(f"ROLLBACK PREPARED '{name}'")
    found = checks["database ledger"]
    assert (found["verdict"], found["commands"][0]["kind"]) == ("failed", "sql"), found
    assert f"{room.most} of them are taken by others than this inbox" in found["detail"]


@pytest.mark.slow
def test_doctor_before_the_tables_are_made(shop: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong with the inbox is told once, and not of the other database."""
    module: Any = ModuleType("newborn")
    others = {"ledger": shop.place.others["ledger"]}
    module.app = App("billing", database=f"sqlite:///{tmp_path}/new.db", databases=others, broker=InMemoryBroker())
    module.app.handler(dict, type="billing.Ping")(lambda message: None)
    monkeypatch.setitem(sys.modules, "newborn", module)
    _, told = run("doctor", "newborn:app")
    module.app.close()
    assert [check["name"] for check in told["checks"] if check["verdict"] == "failed"] == ["tables"]


@ON_MARIADB  # PostgreSQL prepares on the disk, whatever synchronous_commit says
def test_server_that_forgets_what_it_prepared(shop: World, billing: App) -> None:
    """On MariaDB nobody would notice: what is gone passes for committed."""
    name = "innodb_flush_log_at_trx_commit"

    def checks() -> list[str]:
        return [check["name"] for check in run("doctor", "billing:app")[1]["checks"] if check["verdict"] == "failed"]

    assert f"database ledger: {name}" not in checks()
    with shop.engines["ledger"].connect() as connection:
        before = connection.scalar(text(f"SELECT @@{name}"))
        connection.execute(text(f"SET GLOBAL {name} = 2"))
        try:
            assert f"database ledger: {name}" in checks()
        finally:
            connection.execute(text(f"SET GLOBAL {name} = {before}"))


def test_database_that_is_away(shop: World, billing: App) -> None:
    database: Any = billing.coordinator.databases["ledger"]  # type: ignore[union-attr]
    database.engine.dispose()
    database.engine = create_engine_safely(database.engine.url.set(port=1))
    code, told = run("recover", "billing:app")
    assert (code, list(told["away"])) == (4, ["ledger"])
    code, told = run("doctor", "billing:app")
    assert "database ledger" in [check["name"] for check in told["checks"] if check["verdict"] == "failed"]


# Decisions that nobody can carry out any more -------------------------------------------------------------------------


def decided_only(shop: World, app: App, id: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """A process ends after the decision; what its handling claimed."""
    with dying(monkeypatch, SqlBranch, "commit"):
        deliver(app, id)
    (found,) = (
        each for each in run("recover", "billing:app", "--dry-run")[1]["found"] if each["branch"] == "(decision)"
    )
    return str(found["key"])


@ON_POSTGRESQL  # MariaDB does not remember
@FORGOTTEN_CONNECTIONS
def test_rolled_back_by_hand(shop: World, billing: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its message comes again as often as others that fail; a person gives the decision up, and it comes to its end."""
    key = decided_only(shop, billing, 211, monkeypatch)
    with shop.engines["ledger"].connect() as connection:
        by_hand = connection.execution_options(isolation_level="AUTOCOMMIT")
        for each in shop.in_doubt():
            by_hand.exec_driver_sql(f"ROLLBACK PREPARED '{each}'")
    code, told = run("recover", "billing:app")
    assert (code, told["left"]) == (1, 1)
    assert "has rolled it back, by hand or by losing it" in told["found"][0]["reason"]
    assert told["found"][0]["is_lost"]
    said = CliRunner().invoke(root, ["recover", "billing:app"]).stdout
    assert f"then `idemp recover billing:app --forget {key}`" in said

    delivery = Delivery(message=paying(211), queue="billing")
    _, settlement = billing.protocol(billing.broker.publisher()).handle(delivery)
    assert isinstance(settlement, Retry)
    assert settlement.counted
    assert f"idemp recover MODULE:APP --forget {key}" in settlement.reason

    assert "nothing was forgotten" in refused("recover", "billing:app", "--forget", str(uuid4()), "--yes")
    asked = CliRunner().invoke(root, ["recover", "billing:app", "--forget", key], input="n\n")
    assert (asked.exit_code, "what is missing stays missing" in asked.stderr, shop.decisions()) == (1, True, 1)
    code, told = run("recover", "billing:app", "--forget", key, "--yes")
    assert (code, [each["state"] for each in told["found"]], told["left"]) == (0, ["forgotten"], 0)
    assert shop.decisions() == 0
    assert deliver(billing, 211) in {Outcome.REDISPATCHED, Outcome.PENDING}
    assert rows(shop) == ([211], [])


@pytest.mark.slow
@FORGOTTEN_CONNECTIONS
def test_only_away_is_not_given_up(shop: World, billing: App, monkeypatch: pytest.MonkeyPatch) -> None:
    key = decided_only(shop, billing, 212, monkeypatch)
    database: Any = billing.coordinator.databases["ledger"]  # type: ignore[union-attr]
    reachable, database.engine = database.engine, create_engine_safely(database.engine.url.set(port=1))
    assert "nothing was forgotten" in refused("recover", "billing:app", "--forget", key, "--yes")
    database.engine = reachable
    assert shop.decisions() == 1
    gc.collect()
    wait_until(lambda: run("recover", "billing:app")[0] == 0, 10)
    assert rows(shop) == ([212], [212])


@pytest.mark.slow
@ON_POSTGRESQL
@FORGOTTEN_CONNECTIONS
def test_database_that_is_only_not_configured_is_not_given_up(
    shop: World, billing: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell without the variable that the workers have: policies say that it is wanted still."""
    key = decided_only(shop, billing, 215, monkeypatch)
    module: Any = ModuleType("elsewhere")
    module.app = App("billing", database=shop.place.inbox, broker=InMemoryBroker())
    module.app.handler(dict, type="billing.Pay", policy=TwoPhase("ledger", key="payment_id"))(lambda message: None)
    monkeypatch.setitem(sys.modules, "elsewhere", module)
    assert "'ledger', which is not registered" in refused("recover", "elsewhere:app", "--forget", key, "--yes")
    module.app.close()
    gc.collect()
    wait_until(lambda: run("recover", "billing:app")[0] == 0, 10)
    assert rows(shop) == ([215], [215])


@pytest.mark.slow
@FORGOTTEN_CONNECTIONS
def test_database_that_is_taken_out(shop: World, billing: App, monkeypatch: pytest.MonkeyPatch) -> None:
    key = decided_only(shop, billing, 213, monkeypatch)
    module: Any = ModuleType("without")
    module.app = App("billing", database=shop.place.inbox, broker=InMemoryBroker())
    monkeypatch.setitem(sys.modules, "without", module)
    code, told = run("recover", "without:app")
    assert (code, [each["reason"] for each in told["found"]]) == (
        1,
        ["The inbox's database committed, and others have not: 'ledger' is not registered here."],
    )
    assert [each["state"] for each in run("recover", "without:app", "--forget", key, "--yes")[1]["found"]] == [
        "forgotten"
    ]
    assert "has no other databases" in refused("recover", "without:app")
    module.app.close()
    gc.collect()
    wait_until(lambda: run("recover", "billing:app")[0] == 0, 10)
    assert rows(shop) == ([213], []), "it was given up"


@ON_POSTGRESQL
@FORGOTTEN_CONNECTIONS
def test_renamed_app_gives_up_what_its_former_name_decided(
    shop: World, billing: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = decided_only(shop, billing, 214, monkeypatch)
    module: Any = ModuleType("renamed")
    module.app = App("invoices", database=shop.place.inbox, broker=InMemoryBroker())
    module.app.handler(dict, type="billing.Pay", policy=Idempotent(previous=(Previous(consumer="billing"),)))(
        lambda message: None
    )
    monkeypatch.setitem(sys.modules, "renamed", module)
    code, told = run("recover", "renamed:app", "--forget", key, "--yes")
    assert (code, [each["state"] for each in told["found"]]) == (0, ["forgotten"])
    assert shop.decisions() == 0
    module.app.close()
    gc.collect()
    wait_until(lambda: run("recover", "billing:app")[0] == 0, 10)


def test_handler_in_a_unit_test(billing: App, shop: World) -> None:
    """With sessions of the test's own."""
    with Session(shop.engines[""]) as inbox, Session(shop.engines["ledger"]) as ledger:
        ctx = context(session=inbox, databases={"ledger": ledger})
        billing.registry.find_by_name("billing.Pay").handler({"payment_id": 7, "amount": 1}, ctx)
        assert ledger.scalar(text("SELECT COUNT(*) FROM booked")) == 1
    with pytest.raises(ConfigurationError, match="no database 'stock'"):
        context(databases={}).database("stock")


def test_wrapped_function(shop: World) -> None:
    """Without an App; recovery is the service's own affair."""

    def pay(message: dict[str, Any], ctx: Context) -> None:
        ctx.session.execute(text("INSERT INTO effect (n) VALUES (:n)"), message)
        ctx.database("ledger").session.execute(text("INSERT INTO effect (n) VALUES (:n)"), message)

    inbox = Inbox(shop.engines[""], databases={"ledger": sessionmaker(shop.engines["ledger"])})
    options: dict[str, Any] = {"type": "wrapped.Pay", "consumer": "wrapped", "policy": TwoPhase("ledger", key="n")}
    handle = inbox.wrap(pay, dict, **options)
    assert [handle({"n": 301}), handle({"n": 301})] == [Outcome.HANDLED, Outcome.SKIPPED]
    assert shop.effects(301) == [1, 1]
    assert inbox.coordinator is not None
    assert Recovery(inbox.coordinator).run_once().found == []
