"""From one revision of the tables to the next, with rows in them; and two adjacent releases on one set of tables."""

from __future__ import annotations

import logging
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import Engine, insert, inspect, text

from idemp.errors import ConfigurationError, IdentityChanged, SchemaError
from idemp.identity import effective_id
from idemp.inbox.port import Claim, Identity
from idemp.inbox.sql import SqlStore, SqlStreams
from idemp.inbox.sql.schema import check, sql, upgrade
from idemp.inbox.sql.tables import Tables
from idemp.inbox.stream import Commit
from tests.inbox.sql.rows import Rows, alter, run_script

if TYPE_CHECKING:
    from tests.inbox.sql.conftest import MovedClock

REPOSITORY = Path(__file__).parents[3]
ADDED: dict[str, set[str]] = {
    "0001": set(),
    "0002": {"unfinished"},
    "0003": {"daily"},
    "0004": {"queue"},
    "0005": set(),
    "0006": set(),
    "0007": {"arrival"},
    "0008": {"commit", "unconfirmed"},
    "0009": {"barrier", "prepared"},
    "0010": {"coordinator", "decision"},
    "0011": {"broker"},
}
FIRST, HEAD = min(ADDED), max(ADDED)
LATER = "0012"


@pytest.fixture
def engine(empty_engine: Engine, tables: Tables) -> Engine:
    """An engine on a database with idemp's tables, of this test's own: it is going to be altered."""
    upgrade(empty_engine, tables)
    return empty_engine


def as_left_by(engine: Engine, revision: str) -> None:
    alter(engine, f"UPDATE idemp_alembic_version SET version_num = '{revision}'")


def revision(engine: Engine) -> str:
    with engine.connect() as connection:
        return str(connection.scalar(text("SELECT version_num FROM idemp_alembic_version")))


def fill(engine: Engine, rows: Rows, clock: MovedClock) -> None:
    """Rows in every table of the first revision, by its own columns."""
    for number in range(3):
        key = rows.claim(outputs=number)
        consumer_id, worker_id = rows.names.id("consumer", "orders"), rows.names.id("worker", "host-1")
        history = {"message_key": key, "consumer_id": consumer_id, "worker_id": worker_id}
        identity = {"consumer_id": consumer_id, "type_id": number, "descriptor": "field:id", "since": clock.now()}
        with engine.begin() as connection:
            connection.execute(
                insert(rows.tables.history), {**history, "at": clock.now(), "confirmed": 1, "redelivered": 0}
            )
            connection.execute(insert(rows.tables.identity), identity)
    rows.consumed(clock, hours=1)


def columns(engine: Engine) -> dict[str, list[str]]:
    """Those of all of idemp's tables."""
    look = inspect(engine)
    names = [name for name in look.get_table_names() if name != "idemp_alembic_version"]
    return {name: [column["name"] for column in look.get_columns(name)] for name in names}


def content(engine: Engine, read: dict[str, list[str]]) -> dict[str, list[str]]:
    """All rows by these columns, as this database shows them."""
    with engine.connect() as connection:
        return {
            name: sorted(map(repr, connection.execute(text(f"SELECT {', '.join(of_it)} FROM {name}"))))
            for name, of_it in read.items()
        }


def refusals(engine: Engine) -> set[int]:
    with engine.connect() as connection:
        return set(connection.scalars(text("SELECT refusals FROM idemp_pending")))


def test_every_revision_is_numbered_and_described_here() -> None:
    assert list(ADDED) == sorted(ADDED)
    script = sql("postgresql", Tables())
    assert [number for number in ADDED if f"-> {number}" in script] == list(ADDED)


def test_upgrade_keeps_every_row(empty_engine: Engine, tables: Tables, clock: MovedClock) -> None:
    upgrade(empty_engine, tables, FIRST)
    assert revision(empty_engine) == FIRST
    fill(empty_engine, Rows(empty_engine, tables, clock), clock)
    known = columns(empty_engine)
    before = content(empty_engine, known)
    assert len(before) == 9
    assert all(before.values()), "every table has rows"
    with pytest.raises(SchemaError, match=rf"'{FIRST}'; '{HEAD}' is needed\. Run `idemp db upgrade"):
        check(empty_engine, tables)
    upgrade(empty_engine, tables)
    assert columns(empty_engine).keys() - known.keys() == {
        f"idemp_{name}" for added in ADDED.values() for name in added
    }
    assert content(empty_engine, known) == before
    assert refusals(empty_engine) == {0}
    check(empty_engine, tables)
    assert SqlStore(empty_engine, clock=clock).note_start("orders", uuid.uuid4()) == 0


def test_queue_that_the_former_release_noted_counts(empty_engine: Engine, tables: Tables, clock: MovedClock) -> None:
    """Also when the consumer starts on another one meanwhile; and the former release finds the latest."""
    upgrade(empty_engine, tables, "0003")
    names = Rows(empty_engine, tables, clock).names
    identity = {"consumer_id": names.id("consumer", "orders"), "type_id": names.id("message_type", "orders.Place")}
    with empty_engine.begin() as connection:
        connection.execute(insert(tables.identity), {**identity, "descriptor": "message_id", "since": clock.now()})
        connection.execute(text("UPDATE idemp_consumer SET queue = 'orders.1'"))
    upgrade(empty_engine, tables)
    upkeep = SqlStore(empty_engine, clock=clock).upkeep
    same, window = [Identity("orders.Place", "message_id")], {"orders.Place": timedelta(hours=1)}
    for started in ("orders.0", "orders.2"):
        with pytest.raises(IdentityChanged):
            upkeep.agree_identities("shop", "orders.1", same, {}, window)
        upkeep.agree_identities("orders", started, same, {}, window)
    for queue in ("orders.0", "orders.1", "orders.2"):
        with pytest.raises(IdentityChanged):
            upkeep.agree_identities("shop", queue, same, {}, window)
    with empty_engine.connect() as connection:
        latest = connection.scalar(text("SELECT queue FROM idemp_consumer WHERE name = 'orders'"))
    assert latest == "orders.2"


def test_downgrade_leaves_what_the_former_release_reads(engine: Engine, tables: Tables, clock: MovedClock) -> None:
    """By hand, with Alembic's own command: `upgrade` never does it. Then up again."""
    upkeep = SqlStore(engine, clock=clock).upkeep
    for started in ("orders.0", "orders.1"):
        upkeep.agree_identities("orders", started, [Identity("orders.Place", "message_id")], {}, {})
    config = Config(attributes={"tables": tables})
    config.set_main_option("script_location", str(REPOSITORY / "alembic"))
    config.set_main_option("path_separator", "os")
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "0003")
    assert revision(engine) == "0003"
    with engine.connect() as connection:
        assert connection.scalars(text("SELECT queue FROM idemp_consumer")).all() == ["orders.1"]
    assert not inspect(engine).has_table("idemp_queue")
    upgrade(engine, tables)
    check(engine, tables)
    with pytest.raises(IdentityChanged):
        window = {"orders.Place": timedelta(hours=1)}
        upkeep.agree_identities("shop", "orders.1", [Identity("orders.Place", "message_id")], {}, window)


def test_streams_are_not_taken_back(engine: Engine, tables: Tables) -> None:
    """Their events are nowhere else."""
    claim = Claim(
        consumer="orders",
        id=effective_id("envelope", "message-1"),
        message_type="orders.Place",
        fingerprint=None,
        wait=timedelta(0),
    )
    SqlStreams(engine).append(
        Commit(stream="order-7", number=1, first_version=1, claim=claim, committed_at=datetime.now(UTC)), pending=False
    )
    config = Config(attributes={"tables": tables})
    config.set_main_option("script_location", str(REPOSITORY / "alembic"))
    config.set_main_option("path_separator", "os")
    with pytest.raises(ConfigurationError, match="holds event streams"), engine.begin() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "0007")
    assert len(SqlStreams(engine).load("order-7")) == 1
    alter(engine, "DELETE FROM idemp_commit")
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "0007")
    assert not inspect(engine).has_table("idemp_commit")
    upgrade(engine, tables)
    check(engine, tables)


def test_script_from_one_revision_to_the_next(empty_engine: Engine, tables: Tables, clock: MovedClock) -> None:
    """For those who let nobody but a DBA change tables."""
    upgrade(empty_engine, tables, FIRST)
    fill(empty_engine, Rows(empty_engine, tables, clock), clock)
    known = columns(empty_engine)
    before = content(empty_engine, known)
    run_script(empty_engine, sql(empty_engine.dialect.name, tables, since=FIRST))
    assert check(empty_engine, tables).revision == HEAD
    assert content(empty_engine, known) == before
    assert refusals(empty_engine) == {0}


def test_script_from_an_unknown_revision_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no script that begins at version 'nowhere'"):
        sql("postgresql", Tables(), since="nowhere")


def test_upgrade_that_broke_off_can_be_run_again(engine: Engine, tables: Tables) -> None:
    """MariaDB and MySQL commit after each statement: the table may be there, and its revision not yet."""
    as_left_by(engine, FIRST)
    upgrade(engine, tables)
    check(engine, tables)


def test_upgrade_goes_on_without_a_table_that_was_dropped(empty_engine: Engine, tables: Tables) -> None:
    """It cannot be altered, and is made anew as it has to be."""
    upgrade(empty_engine, tables, FIRST)
    alter(empty_engine, "DROP TABLE idemp_pending")
    upgrade(empty_engine, tables)
    assert check(empty_engine, tables).revision == HEAD


def test_upgrade_never_downgrades(engine: Engine, tables: Tables) -> None:
    upgrade(engine, tables, FIRST)
    assert revision(engine) == HEAD
    check(engine, tables)


class TestTablesOfALaterRelease:
    """A later release has upgraded them already, while this one still works: a rolling upgrade."""

    @pytest.fixture
    def engine(self, engine: Engine) -> Engine:
        """As a later release may change them: by a table, an index and columns that nobody has to fill."""
        alter(
            engine,
            "CREATE TABLE idemp_more (id int PRIMARY KEY)",
            "ALTER TABLE idemp_inbox ADD COLUMN tenant varchar(20)",
            "ALTER TABLE idemp_output ADD COLUMN weight int NOT NULL DEFAULT 1",
            "CREATE INDEX idemp_inbox_tenant ON idemp_inbox (tenant)",
        )
        as_left_by(engine, LATER)
        return engine

    def test_they_are_accepted_and_it_is_said(self, engine: Engine, tables: Tables) -> None:
        report = check(engine, tables)
        assert report.revision == LATER
        (said,) = [finding for finding in report.findings if finding.name == "schema_revision"]
        assert (said.level, said.value) == ("ok", LATER)
        assert f"this one, of version {HEAD}, finds all that it needs" in said.meaning

    def test_it_works_on_them(self, engine: Engine, tables: Tables, clock: MovedClock) -> None:
        rows = Rows(engine, tables, clock)
        key = rows.claim(outputs=2)
        store = SqlStore(engine, clock=clock)
        store.verify()
        assert len(store.upkeep.take_pending(10, timedelta(seconds=30))) == 2
        assert [store.note_start("orders", key) for _ in range(2)] == [0, 1]

    def test_upgrade_leaves_them_as_they_are(
        self, engine: Engine, tables: Tables, caplog: pytest.LogCaptureFixture
    ) -> None:
        before = inspect(engine).get_columns("idemp_inbox")
        with caplog.at_level(logging.INFO):
            upgrade(engine, tables)
        assert revision(engine) == LATER
        assert [column["name"] for column in inspect(engine).get_columns("idemp_inbox")] == [
            column["name"] for column in before
        ]
        assert f"of a later release's version {LATER}" in caplog.text

    def test_they_are_refused_where_something_is_missing(self, engine: Engine, tables: Tables) -> None:
        alter(engine, "DROP TABLE idemp_more", "DROP TABLE idemp_history")
        with pytest.raises(SchemaError, match=r"newer than .* missing: idemp_history\. Upgrade idemp") as caught:
            check(engine, tables)
        assert "idemp db upgrade" not in str(caught.value), "this release's command does not mend it"
        upgrade(engine, tables)
        assert "idemp_history" not in inspect(engine).get_table_names(), "nor does it make what it does not know"

    def test_they_are_refused_where_a_column_must_be_filled(self, engine: Engine, tables: Tables) -> None:
        columns = "consumer_id int NOT NULL, started_at timestamp NOT NULL, ended_at timestamp NULL, lane int NOT NULL"
        alter(
            engine,
            "DROP TABLE idemp_activity",
            f"CREATE TABLE idemp_activity ({columns}, PRIMARY KEY (consumer_id, started_at))",
        )
        with pytest.raises(SchemaError, match=r"idemp_activity has a column lane, which needs a value.*Upgrade idemp"):
            check(engine, tables)


@pytest.mark.parametrize("foreign", ["0000", "5f3a9c1d2b7e", "v2", "00003"])
def test_unknown_revision_that_is_no_later_one_is_refused(engine: Engine, tables: Tables, foreign: str) -> None:
    as_left_by(engine, foreign)
    for act in (check, upgrade):
        with pytest.raises(SchemaError, match=rf"'{foreign}', which this release does not know\. Upgrade idemp"):
            act(engine, tables)
    assert revision(engine) == foreign
