"""The rights that doctor asks for are enough for a worker, and SELECT for who looks on. The page prints the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import make_url

from idemp import Context
from idemp.sql.checks import check_database, check_tables
from idemp.sql.engine import Database
from idemp.sql.records.claims import InboxRecords
from idemp.sql.records.failures import DeadLetters
from idemp.sql.records.waiting import read_waiting
from idemp.sql.scheduler import SqlScheduler
from tests.servers.databases import query
from tests.world import SINK, Order, World, let_pass, metadata

PAGE = Path(__file__).parents[2] / "docs" / "deploy.md"
on_servers = pytest.mark.parametrize("kind", ["postgresql", "mariadb"], indirect=True)


class Role:
    """A user of the database who may do nothing yet."""

    def __init__(self, url: str) -> None:
        made = make_url(url)
        self.owner, self.database, name = url, str(made.database), f"role{str(made.database)[-12:]}"
        self.postgresql = made.get_backend_name() == "postgresql"
        self.name = name if self.postgresql else f"'{name}'@'127.0.0.1'"
        query(url, f"CREATE ROLE {name} LOGIN" if self.postgresql else f"CREATE USER {self.name} IDENTIFIED BY 'x'")
        self.url = made.set(username=name, password="x").render_as_string(hide_password=False)

    def grant(self, rights: str, tables: str) -> None:
        for table in tables.split():
            query(self.owner, f"GRANT {rights} ON {'' if self.postgresql else f'{self.database}.'}{table} TO {self.name}")

    def drop(self) -> None:
        if self.postgresql:
            query(self.owner, f"DROP OWNED BY {self.name}")
        query(self.owner, f"DROP {'ROLE' if self.postgresql else 'USER'} {self.name}")


@pytest.fixture
def role(url: str) -> Iterator[Role]:
    made = Role(url)
    yield made
    made.drop()


def needed(url: str) -> list[str]:
    database = Database(url)
    (finding,) = check_database(database)
    database.close()
    return finding.fix.splitlines()


@pytest.mark.slow
@on_servers
def test_a_worker_needs_the_rights_that_doctor_asks_for_and_an_onlooker_select(url: str, role: Role) -> None:
    owner = Database(url)
    with owner.short() as connection:
        metadata.create_all(connection)
    if role.postgresql:
        role.grant("SELECT", "idemp_version")  # else the role sees no table
    else:
        role.grant("SELECT", "idemp_version idemp_inbox")
    grants = needed(role.url)
    block = "\n".join(grants)
    block = block.replace("public.", "").replace(role.name, "worker" if role.postgresql else "'worker'@'%'")
    assert block.replace(f"{role.database}.", "shop.") in PAGE.read_text()
    for statement in grants:
        query(url, statement)
    if role.postgresql and query(url, "SHOW is_superuser") == [("on",)]:
        function = query(url, "SELECT min(oid::regprocedure::text) FROM pg_proc WHERE proname = 'pg_logical_emit_message'")[0][0]
        function = function.replace("bytea", "text")
        query(url, f"REVOKE EXECUTE ON FUNCTION {function} FROM PUBLIC")  # in this database
        assert needed(role.url)[-1] == f"GRANT EXECUTE ON FUNCTION {function} TO {role.name};"
        query(url, needed(role.url)[-1])
    role.grant("ALL", "effect one")
    if role.postgresql:
        query(url, f"GRANT USAGE ON SEQUENCE effect_row_seq TO {role.name}")

    def handle(message: Order, ctx: Context) -> None:
        ctx.connection.exec_driver_sql(f"INSERT INTO effect (what) VALUES ('{message.order_id}')")
        ctx.send({"id": 1}, to="nowhere" if message.order_id == "lost" else SINK, type="shop.Sent")
        ctx.send({"id": 1}, to=SINK, type="shop.Later", delay="10m")
        if message.order_id == "bad":
            raise ValueError

    world = World(role.url, handle)
    world.send("1", "1", "lost", "bad")
    world.send("2", type="shop.Unknown")
    worker = world.worker()
    for _ in range(9):
        world.work(worker)
        let_pass(owner, 300)
    world.work(worker)
    assert world.effects() == {"1": 1, "lost": 1}
    let_pass(owner, 8 * 86_400)
    with world.app().initiate(id="nightly") as unit:
        unit.send({"id": 2}, to=SINK, type="shop.Sent")
    scheduler = SqlScheduler(world.database, "cleaner")
    assert scheduler.purge() == 1  # the other one has an output in quarantine
    worker.close()

    query(
        url,
        f"REVOKE ALL ON {'ALL TABLES IN SCHEMA public' if role.postgresql else f'{role.database}.idemp_inbox'} FROM {role.name}",
    )
    if not role.postgresql:
        query(url, f"REVOKE ALL PRIVILEGES, GRANT OPTION FROM {role.name}")
    role.grant(
        "SELECT",
        " ".join(
            f"idemp_{table}"
            for table in [
                "version",
                "name",
                "inbox",
                "output",
                "pending",
                "identity",
                "message",
                "queue",
                "binding",
                "worker",
                "branch",
                "commit",
                "snapshot",
            ]
        ),
    )
    looking = Database(role.url)
    assert check_tables(looking) == []
    records = InboxRecords(looking)
    assert [claim.id for claim in records.newest()] == ["nightly", "lost"]
    ((account,), _) = records.explain("lost")
    assert [each.state for each in account.outputs] == ["quarantined", "confirmed"]
    assert [letter.type for letter in DeadLetters(looking).find()] == ["shop.Order"]
    assert read_waiting(looking).quarantined == 1
    for each in (looking, owner):
        each.close()
