"""Tables by Alembic."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import UUID

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine, text

from idemp import ConfigurationError, Verdict
from idemp.identity import name_number
from idemp.ports import Claim
from idemp.sql.checks import check_database
from idemp.sql.engine import Database
from idemp.sql.records.claims import InboxRecords
from idemp.sql.schema import REVISION, sql, upgrade
from idemp.sql.store import SqlStore
from tests.conftest import every_database
from tests.servers import server
from tests.servers.databases import create_database, drop_database


def test_the_migrations_make_the_tables_that_the_code_uses(database: Database) -> None:
    for engine, metadata in (
        (database.engine, database.tables.metadata),
        (database.queue_engine, database.tables.queue_metadata),
    ):
        with engine.connect() as connection:
            context = MigrationContext.configure(
                connection, opts={"include_name": lambda name, kind, parents: name != "idemp_version", "compare_type": True}
            )
            assert compare_metadata(context, metadata) == []


@pytest.mark.parametrize(
    "kind", ["mariadb", pytest.param("postgresql", marks=pytest.mark.slow), pytest.param("sqlite", marks=pytest.mark.slow)]
)
def test_upgrades_that_begin_together_all_succeed(kind: str, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/new.db" if kind == "sqlite" else create_database(server(kind))
    command = [sys.executable, "-m", "idemp", "db", "upgrade"]
    environment = {**os.environ, "IDEMP_DATABASE_URL": url}
    running = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for _ in range(3)
    ]
    assert [(each.communicate(timeout=120)[0].count("has the tables of revision"), each.returncode) for each in running] == [
        (1, 0)
    ] * 3
    if kind != "sqlite":
        drop_database(url)


@every_database
def test_an_older_copy_of_the_database_gives_no_number_to_another_name(database: Database) -> None:
    """Workers go on while the names that they have registered are gone, and others come."""
    names, running = ("a", "b", "c"), {name: SqlStore(database, name) for name in "abc"}

    def handle(consumers: Sequence[str], number: int) -> list[Verdict]:
        answers = []
        for name in consumers:
            claims = [Claim(name, type, UUID(int=number), "i:7") for type in ("shop.One", "shop.Two")]
            with running[name].connect() as tx:
                answers += [each.verdict for each in running[name].claim(tx, claims)]
                running[name].finish(tx, [])
        return answers

    for name in names:
        running[name].register(name, ["shop.One", "shop.Two"], [])
    with database.short() as connection:
        connection.execute(database.tables.name.delete().where(database.tables.name.c.kind != "broker"))
    handle(names, 1)
    for name in reversed(names):  # other processes start in another order
        running[name] = SqlStore(database, f"{name} again")
        running[name].register(name, ["shop.Two", "shop.One"], [])
        assert handle(names, ord(name)) == [Verdict.CLAIMED, Verdict.CONFLICT] * 3
    assert handle(names, 1) == [Verdict.DUPLICATE, Verdict.CONFLICT] * 3


def test_two_names_with_one_number_are_refused(database: Database) -> None:
    with database.short() as connection:
        taken = {"id": name_number("consumer", "billing"), "kind": "type", "name": "shop.Pay"}
        connection.execute(database.tables.name.insert(), taken)
    with pytest.raises(
        ConfigurationError, match=r"consumer 'billing' and the type 'shop.Pay' have the same number .* rename one"
    ):
        SqlStore(database, "w").register("billing", [], [])


def test_the_newest_revision_is_the_one_that_workers_expect() -> None:
    config = Config()
    config.set_main_option("script_location", "alembic")
    assert ScriptDirectory.from_config(config).get_current_head() == REVISION


def test_an_upgrade_can_run_again_and_prefixes_are_independent(tmp_path: Path) -> None:
    for prefix in ("one_", "two_", "one_"):
        database = Database(f"sqlite:///{tmp_path}/x.db", prefix)
        upgrade(database)
        assert check_database(database) == []
        database.close()
    with sqlite3.connect(tmp_path / "x.db") as connection:
        names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    connection.close()
    assert {"one_inbox", "two_inbox", "one_version", "two_version"} <= names
    assert "one_message" not in names


def test_the_statements_are_those_of_both_files(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/x.db")
    text = sql(database)
    assert text.count("CREATE TABLE") == 14  # twelve tables, two versions
    assert text.index("x.db") < text.index("idemp_inbox") < text.index("x.broker.db") < text.index("idemp_message")
    assert list(tmp_path.iterdir()) == []


def test_tables_of_the_first_build_are_refused(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "x.db") as connection:
        connection.execute("CREATE TABLE idemp_inbox (id TEXT)")
        connection.execute("CREATE TABLE idemp_alembic_version (version_num TEXT)")
    connection.close()
    database = Database(f"sqlite:///{tmp_path}/x.db")
    for call in (upgrade, check_database):
        (tmp_path / "x.broker.db").touch()
        with pytest.raises(ConfigurationError, match="belongs to the first build of idemp, which cannot be upgraded"):
            call(database)
    database.close()


def test_nothing_is_made_where_nothing_is(tmp_path: Path) -> None:
    (finding,) = check_database(Database(f"sqlite:///{tmp_path}/x.db"))
    assert str(finding).endswith("x.db does not exist: idemp db upgrade")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("statements", "finding"),
    [
        (["DELETE FROM idemp_version"], "has no tables of idemp: idemp db upgrade"),
        (["UPDATE idemp_version SET version_num = '1.9'"], "has tables of revision 1.9, not"),
        (["ALTER TABLE idemp_output DROP COLUMN body"], "idemp_output has no body"),
        (["DROP TABLE idemp_pending"], "idemp_pending has no attempts, consumer_id"),
        (
            ["DROP TABLE idemp_identity", "CREATE TABLE idemp_identity (consumer, type, descriptor, retention, covers, covers_since, purged_before, PRIMARY KEY (consumer))"],
            "idemp_identity has another primary key",
        ),
    ],
)  # fmt: skip
def test_tables_that_were_changed_are_found(database: Database, statements: list[str], finding: str) -> None:
    with database.short() as connection:
        for statement in statements:
            connection.execute(text(statement))
    assert any(finding in str(each) for each in check_database(database))


@pytest.mark.parametrize(
    "url", ["sqlite://", "sqlite:///:memory:", "postgresql+pg8000://x:secret@y/z", "no url", "mssql+pymssql://a:secret@b/c"]
)
def test_a_database_of_no_use_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Database(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("kind", ["mariadb"], indirect=True)
class TestMariadb:
    def test_an_upgrade_that_was_interrupted_goes_on(self, database: Database) -> None:
        with database.short() as connection:
            for statement in (
                "DELETE FROM idemp_version",
                "DROP TABLE idemp_worker",
                "DROP INDEX idemp_pending_due ON idemp_pending",
            ):
                connection.execute(text(statement))
        upgrade(database)
        assert check_database(database) == []
        self.test_the_migrations_make_the_tables_that_the_code_uses(database)

    def test_the_migrations_make_the_tables_that_the_code_uses(self, database: Database) -> None:
        with database.engine.connect() as connection:
            context = MigrationContext.configure(connection, opts={"compare_type": False})  # a long BLOB is a LONGBLOB
            changes = [
                change
                for metadata in (database.tables.metadata, database.tables.queue_metadata)
                for change in compare_metadata(context, metadata)
                if change[0] not in ("remove_table", "remove_index")  # of the other metadata
            ]
        assert changes == []

    def test_names_differ_in_case_and_accents(self, database: Database) -> None:
        store = SqlStore(database, "worker")
        names = ["shop", "Shop", "shöp"]
        store.register("c", names, [])
        numbers = InboxRecords(database).names("type")
        assert (set(numbers), len(set(numbers.values()))) == (set(names), 3)

    def test_a_table_without_transactions_is_refused(self, database: Database) -> None:
        with database.short() as connection:
            connection.execute(text("ALTER TABLE idemp_output ENGINE = MyISAM"))
        (finding,) = check_database(database)
        assert (finding.level, str(finding)[:39]) == ("red", "idemp_output has no transactions: ALTER")

    def test_connections_that_cut_texts_are_refused(self, url: str) -> None:
        database = Database(f"{url}?init_command=SET sql_mode = ''")
        (finding,) = check_database(database)
        assert (finding.level, finding.text) == ("red", "the engine's connections cut texts that are too long")
        database.close()

    @pytest.mark.parametrize("mode", ["NO_BACKSLASH_ESCAPES", "ORACLE", "EMPTY_STRING_IS_NULL"])
    def test_connections_that_read_texts_in_another_way_are_refused(self, url: str, mode: str) -> None:
        database = Database(f"{url}?init_command=SET sql_mode = 'STRICT_TRANS_TABLES,{mode}'")
        (finding,) = check_database(database)
        assert (finding.level, mode in finding.text) == ("red", True)
        database.close()

    @pytest.mark.parametrize("characters", ["gbk", "sjis", "cp932", "big5", "latin1"])
    def test_connections_whose_texts_are_quoted_wrongly_are_refused(self, url: str, characters: str) -> None:
        database = Database(f"{url}?charset={characters}")
        (finding,) = check_database(database)
        assert (finding.level, finding.fix) == ("red", "write ?charset=utf8mb4 into the URL of the engine")
        database.close()

    def test_workers_that_start_together_find_the_names_of_each_other(self, url: str) -> None:
        """At the default isolation, a transaction reads as of its first SELECT."""
        engine = create_engine(url)
        slow, stores = threading.Barrier(2), [SqlStore(Database(engine), name) for name in "ab"]
        stores[0].register("c", [], [])

        def register(store: SqlStore) -> dict[str, int]:
            slow.wait()
            store.register("c", ["one", "two"], [])
            return InboxRecords(store.database).names("type")

        with ThreadPoolExecutor(2) as pool:
            one, other = pool.map(register, stores)
        assert one == other == {name: name_number("type", name) for name in ("one", "two")}
        engine.dispose()

    def test_another_isolation_works_with_a_warning(self, url: str) -> None:
        engine = create_engine(url)
        (finding,) = check_database(Database(engine))
        assert (finding.level, finding.fix) == ("yellow", "create the engine with isolation_level='READ COMMITTED'")
        engine.dispose()

    def test_an_option_of_a_provider_is_refused(self, url: str) -> None:
        with pytest.raises(ConfigurationError, match=r"option of the URL .*'ssl-mode'.* write \?ssl_ca=FILE"):
            check_database(Database(f"{url}?ssl-mode=REQUIRED"))
