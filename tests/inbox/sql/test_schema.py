"""Tables are made, checked and scripted; whatever could break the promises is refused at start."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from psycopg.rows import dict_row
from pymysql.cursors import DictCursor
from sqlalchemy import Column, Engine, Integer, MetaData, Table, create_engine, event, inspect, text

from idemp import App, Idempotent
from idemp.broker.memory import InMemoryBroker
from idemp.errors import ConfigurationError, GuaranteeError, SchemaError, StoreUnavailable
from idemp.inbox.sql import SqlStore
from idemp.inbox.sql.engine import create_engine_safely
from idemp.inbox.sql.pooling import watch_pool
from idemp.inbox.sql.schema import check, include_object, sql, upgrade
from idemp.inbox.sql.tables import Tables
from tests.inbox.sql.conftest import DATABASES
from tests.inbox.sql.rows import alter, run_script
from tests.lanes import mostly_slow

if TYPE_CHECKING:
    from tests.inbox.sql.rows import Rows

REPOSITORY = Path(__file__).parents[3]
HEAD = "0011"


@pytest.fixture
def engine(empty_engine: Engine, tables: Tables) -> Engine:
    """An engine on a database with idemp's tables, of this test's own: it is going to be altered."""
    upgrade(empty_engine, tables)
    return empty_engine


def other_key(engine: Engine) -> None:
    """Put another primary key on the inbox."""
    if engine.dialect.name == "postgresql":
        change = "DROP CONSTRAINT idemp_inbox_pkey, ADD CONSTRAINT other PRIMARY KEY (message_key, consumer_id)"
        alter(engine, f"ALTER TABLE idemp_inbox {change}")
    elif engine.dialect.name == "sqlite":
        columns = "message_key, consumer_id, type_id, worker_id, claimed_at, fingerprint, original_id, source_position"
        alter(
            engine,
            "DROP TABLE idemp_inbox",
            f"CREATE TABLE idemp_inbox ({columns}, PRIMARY KEY (message_key, consumer_id))",
        )
    else:
        alter(engine, "ALTER TABLE idemp_inbox DROP PRIMARY KEY, ADD PRIMARY KEY (message_key, consumer_id)")


def test_upgraded_database_passes_and_is_upgraded_again_without_harm(engine: Engine, tables: Tables) -> None:
    upgrade(engine, tables)
    report = check(engine, tables)
    assert report.revision == HEAD
    assert report.dialect == engine.dialect.name
    # A test server's operating system keepalive is nothing to complain about here.
    assert {finding.name for finding in report.warnings} <= {"tcp_keepalive_time"}


def test_migrations_make_what_the_tables_say(engine: Engine, tables: Tables) -> None:
    options = {"version_table": tables.version_table, "compare_type": engine.dialect.name != "sqlite"}
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection, opts=options), tables.metadata) == []


def test_empty_database_is_refused_with_the_command_that_mends_it(empty_engine: Engine, tables: Tables) -> None:
    missing = r"has no idemp tables with prefix 'idemp_'\. "
    with pytest.raises(SchemaError, match=missing + ".*[Rr]un `idemp db upgrade --database ") as raised:
        check(empty_engine, tables)
    # A file without tables may stand where that with the claims was.
    assert ("put the right file in its place first" in raised.value.fix) is (empty_engine.dialect.name == "sqlite")


def test_script_makes_a_database_that_passes(empty_engine: Engine, tables: Tables) -> None:
    run_script(empty_engine, sql(empty_engine.dialect.name, tables))
    check(empty_engine, tables)


def test_script_of_an_unknown_database_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no script for 'oracle'"):
        sql("oracle", Tables())


def test_two_prefixes_and_a_schema_live_side_by_side(empty_engine: Engine) -> None:
    several = [Tables(), Tables(prefix="billing_")]
    if empty_engine.dialect.name == "postgresql":
        several.append(Tables(schema="apart"))
    for one in several:
        upgrade(empty_engine, one)
    for one in several:
        assert check(empty_engine, one).revision == HEAD


def test_script_under_a_schema(postgresql_url: str) -> None:
    engine, tables = create_engine_safely(postgresql_url), Tables("apart", "billing_")
    run_script(engine, sql("postgresql", tables))
    check(engine, tables)
    engine.dispose()


def test_processes_that_upgrade_at_once_do_not_fail_each_other(empty_engine: Engine, tables: Tables) -> None:
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(upgrade, empty_engine, tables) for _ in range(4)]:
            done.result()
    check(empty_engine, tables)


def test_migration_that_broke_off_can_be_run_again(engine: Engine, tables: Tables) -> None:
    """MariaDB and MySQL commit after each statement."""
    alter(engine, "DROP TABLE idemp_alembic_version", "DROP TABLE idemp_identity")
    upgrade(engine, tables)
    check(engine, tables)


def test_mariadb_under_the_name_of_mysql(mariadb_url: str, tables: Tables) -> None:
    engine = create_engine_safely(mariadb_url.replace("mariadb+pymysql", "mysql"))
    assert engine.dialect.name == "mysql"
    upgrade(engine, tables)
    alter(engine, "DROP TABLE idemp_alembic_version", "DROP TABLE idemp_identity")
    upgrade(engine, tables)
    check(engine, tables)
    engine.dispose()


@pytest.mark.parametrize("database_url", mostly_slow(DATABASES), indirect=True)
def test_plain_alembic_command(database_url: str) -> None:
    arguments = ["-c", str(REPOSITORY / "alembic" / "alembic.ini"), "-x", f"url={database_url}", "-x", "prefix=shop_"]
    done = subprocess.run(
        [sys.executable, "-m", "alembic.config", *arguments, "upgrade", "head"],
        check=False,
        capture_output=True,
        text=True,
        cwd=REPOSITORY / "tests",
    )
    assert done.returncode == 0, done.stderr
    engine = create_engine_safely(database_url)
    check(engine, Tables(prefix="shop_"))
    engine.dispose()


def test_users_migrations_and_ours_leave_each_other_alone(empty_engine: Engine, tables: Tables, tmp_path: Path) -> None:
    theirs = MetaData()
    Table("parcel", theirs, Column("id", Integer, primary_key=True))
    config = Config(str(tmp_path / "alembic.ini"))
    config.set_main_option("script_location", str(tmp_path / "migrations"))
    config.set_main_option("path_separator", "os")
    command.init(config, str(tmp_path / "migrations"))
    (tmp_path / "migrations" / "env.py").write_text(
        "from alembic import context\n"
        "a = context.config.attributes\n"
        "context.configure(connection=a['connection'], target_metadata=a['metadata'], include_object=a['hook'])\n"
        "with context.begin_transaction():\n"
        "    context.run_migrations()\n"
    )
    config.attributes.update(metadata=theirs, hook=include_object(tables))
    upgrade(empty_engine, tables)
    with empty_engine.begin() as connection:
        config.attributes["connection"] = connection
        revision = command.revision(config, autogenerate=True, rev_id="first")
    assert "idemp" not in Path(revision.path).read_text()  # type: ignore[union-attr]
    with empty_engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
        command.check(config)
    upgrade(empty_engine, tables)
    check(empty_engine, tables)
    with empty_engine.connect() as connection:
        assert connection.scalar(text("SELECT version_num FROM alembic_version")) == "first"
        assert "parcel" in inspect(connection).get_table_names()


def test_altered_key_is_found(engine: Engine, tables: Tables) -> None:
    other_key(engine)
    wrong = r"primary key of idemp_inbox is \(message_key, consumer_id\), not \(consumer_id, message_key\)"
    with pytest.raises(SchemaError, match=wrong) as caught:
        check(engine, tables)
    if engine.dialect.name != "sqlite":
        statement = caught.value.fix.removeprefix("Run ").removesuffix(".")
        alter(engine, statement)
        check(engine, tables)


def test_names_that_are_not_unique_any_more_are_found(postgresql_url: str) -> None:
    engine, tables = create_engine_safely(postgresql_url), Tables()
    upgrade(engine, tables)
    alter(engine, "ALTER TABLE idemp_consumer DROP CONSTRAINT idemp_consumer_name_key")
    with pytest.raises(SchemaError, match="names in idemp_consumer are not unique") as caught:
        check(engine, tables)
    alter(engine, caught.value.fix.removeprefix("Run ").removesuffix("."))
    check(engine, tables)
    engine.dispose()


def test_ids_of_streams_that_are_not_unique_any_more_are_found(tmp_path: Path) -> None:
    engine, tables = create_engine_safely(f"sqlite:///{tmp_path}/inbox.db"), Tables()
    upgrade(engine, tables)
    unique = " \tCONSTRAINT idemp_commit_id_key UNIQUE (consumer_id, message_key)"
    with engine.connect() as connection:
        (made,) = connection.exec_driver_sql("SELECT sql FROM sqlite_master WHERE name = 'idemp_commit'").one()
    assert unique.strip() in made
    alter(engine, "DROP TABLE idemp_commit", made.replace(unique.strip(), "CHECK (number > 0)"))
    with pytest.raises(
        SchemaError, match=r"message ids in idemp_commit are not unique.* handled twice\. Run ALTER TABLE"
    ):
        check(engine, tables)
    engine.dispose()


def test_lost_column_is_found(engine: Engine, tables: Tables) -> None:
    alter(engine, "ALTER TABLE idemp_pending DROP COLUMN reason")
    with pytest.raises(SchemaError, match="idemp_pending lacks the columns reason"):
        check(engine, tables)


def test_dropped_table_is_found_and_made_anew(engine: Engine, tables: Tables) -> None:
    alter(engine, "DROP TABLE idemp_output")
    with pytest.raises(SchemaError, match=r"missing: idemp_output\..*idemp db upgrade"):
        check(engine, tables)
    upgrade(engine, tables)
    check(engine, tables)


def test_engine_that_commits_each_statement_is_refused(
    database_url: str, engine: Engine, tables: Tables, rows: Rows
) -> None:
    autocommit = create_engine_safely(database_url, isolation_level="AUTOCOMMIT")
    with pytest.raises(GuaranteeError, match=r"(?i)autocommit"):
        check(autocommit, tables)
    autocommit.dispose()
    assert rows.count(tables.inbox) == 0


@pytest.mark.parametrize("how", ["argument", "listener"])
@pytest.mark.parametrize("database_url", ["postgresql", "mariadb"], indirect=True)
def test_engine_whose_driver_commits_each_statement_is_refused(
    database_url: str, engine: Engine, tables: Tables, rows: Rows, how: str
) -> None:
    """Each of its connections: one that SQLAlchemy has put right again says nothing about the next."""
    plain = create_engine_safely(database_url).url
    autocommit = create_engine(plain, connect_args={"autocommit": True} if how == "argument" else {})
    if how == "listener":

        @event.listens_for(autocommit, "connect")
        def commits(driver: Any, record: Any) -> None:
            driver.autocommit(True) if "mysql" in autocommit.dialect.driver else setattr(driver, "autocommit", True)

    app = App("shop", database=autocommit, broker=InMemoryBroker())
    app.handler(dict, type="shop.Sell", policy=Idempotent())(lambda message: None)
    with pytest.raises(GuaranteeError, match="autocommit"):
        app.store.verify()
    app.close()
    autocommit.dispose()
    assert rows.count(tables.inbox) == 0


def by_name(cursor: Any, row: Any) -> dict[str, Any]:
    return {column[0]: value for column, value in zip(cursor.description, row, strict=True)}


ROWS: dict[str, dict[str, Any]] = {
    "psycopg": {"row_factory": dict_row},
    "pymysql": {"cursorclass": DictCursor},
    "pysqlite": {"row_factory": by_name},
}


@pytest.mark.parametrize("how", ["argument", "listener"])
def test_engine_whose_rows_are_no_tuples_is_refused(engine: Engine, how: str) -> None:
    """Before SQLAlchemy or idemp fails of such a row."""
    options = ROWS[engine.dialect.driver]
    listens = how == "listener" or engine.dialect.driver == "pysqlite"
    other = create_engine(engine.url, connect_args={} if listens else options)

    @event.listens_for(other, "connect")
    def sets(driver: Any, record: Any) -> None:
        for name, value in options.items() if listens else ():
            setattr(driver, name, value)

    app = App("shop", database=other, broker=InMemoryBroker())
    app.handler(dict, type="shop.Sell", policy=Idempotent())(lambda message: None)
    with pytest.raises(ConfigurationError, match=r"rows that are no tuples.* without row_factory"):
        app.store.verify()
    app.close()
    other.dispose()


def test_a_connection_that_somebody_leaves_with_other_rows_is_replaced(database_url: str) -> None:
    engine = create_engine_safely(database_url, pool_size=1, max_overflow=0)
    left = engine.raw_connection()
    driver: Any = left.driver_connection
    for name, value in ROWS[engine.dialect.driver].items():
        setattr(driver, name, value)
    left.close()
    with engine.connect() as connection:
        assert connection.connection.driver_connection is not driver
        assert connection.execute(text("SELECT 1")).one() == (1,)
    engine.dispose()


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
@pytest.mark.parametrize("style", ["SQL, DMY", pytest.param("German", marks=pytest.mark.slow)])
def test_a_date_style_that_psycopg_can_not_read_is_refused(
    database_url: str, engine: Engine, tables: Tables, style: str
) -> None:
    name = engine.url.database
    alter(engine, f"ALTER DATABASE {name} SET DateStyle = '{style}'")
    other = create_engine_safely(database_url)
    with pytest.raises(ConfigurationError, match=rf"DateStyle .*Run ALTER DATABASE {name} SET") as refused:
        check(other, tables)
    store = SqlStore(create_engine_safely(database_url), tables=tables)
    with pytest.raises(ConfigurationError, match="DateStyle"):
        store.clock.now()
        store.upkeep.waiting()
    alter(engine, refused.value.fix.removeprefix("Run ").partition(", which")[0])
    check(other, tables)
    with other.connect() as connection:
        assert connection.scalar(text("SHOW DateStyle")) == "ISO, DMY"
    store.engine.dispose()
    other.dispose()


@pytest.mark.parametrize("database_url", ["postgresql", "mariadb"], indirect=True)
def test_a_connection_that_somebody_leaves_committing_is_replaced(database_url: str, tables: Tables) -> None:
    engine = create_engine_safely(database_url, pool_size=1, max_overflow=0)
    watch_pool(engine)
    left = engine.raw_connection()
    driver: Any = left.driver_connection
    driver.autocommit(True) if "mysql" in engine.dialect.driver else setattr(driver, "autocommit", True)
    left.close()
    with engine.connect() as connection:
        assert connection.connection.driver_connection is not driver
    engine.dispose()


@pytest.mark.parametrize("database_url", ["sqlite", "mariadb"], indirect=True)  # PostgreSQL has no such level
def test_read_uncommitted_is_refused(database_url: str, engine: Engine, tables: Tables) -> None:
    dirty = create_engine_safely(database_url, isolation_level="READ UNCOMMITTED")
    with pytest.raises(GuaranteeError, match="READ UNCOMMITTED"):
        check(dirty, tables)
    dirty.dispose()


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("database_url", ["postgresql", "mariadb"], indirect=True)
def test_stricter_isolation_passes(database_url: str, engine: Engine, tables: Tables, level: str) -> None:
    strict = create_engine_safely(database_url, isolation_level=level)
    assert check(strict, tables).isolation == level
    upgrade(strict, tables)
    strict.dispose()


def test_table_without_transactions_is_refused(mariadb_url: str) -> None:
    engine, tables = create_engine_safely(mariadb_url), Tables()
    upgrade(engine, tables)
    alter(engine, "ALTER TABLE idemp_output ENGINE = MyISAM")
    with pytest.raises(GuaranteeError, match="idemp_output is in the engine MyISAM"):
        check(engine, tables)
    engine.dispose()


def test_weak_settings_are_reported(postgresql_url: str) -> None:
    engine, tables = (
        create_engine_safely(postgresql_url, connect_args={"options": "-c synchronous_commit=off"}),
        Tables(),
    )
    upgrade(engine, tables)
    (warning,) = check(engine, tables).warnings
    assert (warning.name, warning.value, warning.fix) == ("synchronous_commit", "off", "Set synchronous_commit = on.")
    engine.dispose()


def test_weak_sqlite_is_reported(tmp_path: Path) -> None:
    from sqlalchemy import create_engine

    engine = create_engine(f"sqlite:///{tmp_path}/plain.db")
    upgrade(engine, Tables())
    assert [finding.name for finding in check(engine, Tables()).warnings] == ["journal_mode"]
    engine.dispose()


def test_user_without_the_right_to_write_is_refused(postgresql_url: str, unique_name: str) -> None:
    engine, tables = create_engine_safely(postgresql_url), Tables()
    upgrade(engine, tables)
    alter(
        engine,
        f"CREATE ROLE {unique_name} LOGIN",
        f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {unique_name}",
    )
    reader = create_engine_safely(engine.url.set(username=unique_name))
    with pytest.raises(SchemaError, match=r"idemp_inbox can't be written: permission denied.*GRANT INSERT, DELETE"):
        check(reader, tables)
    reader.dispose()
    alter(engine, f"DROP OWNED BY {unique_name}", f"DROP ROLE {unique_name}")
    engine.dispose()


def test_wrong_database_or_user_is_a_configuration_error(database_url: str) -> None:
    engine = create_engine_safely(database_url)
    wrong = create_engine_safely(engine.url.set(database="/no/such/folder/x.db" if "sqlite" in database_url else "nil"))
    with pytest.raises(ConfigurationError, match="Correct the database URL"):
        check(wrong, Tables())


@pytest.mark.parametrize("scheme", ["postgresql", "mariadb"])
def test_unreachable_server_is_named_without_its_password(scheme: str) -> None:
    engine = create_engine_safely(f"{scheme}://me:s3cret@127.0.0.1:1/shop")
    with pytest.raises(StoreUnavailable, match="can't be reached") as caught:
        check(engine, Tables())
    assert "s3cret" not in str(caught.value)
    assert "me:***@127.0.0.1" in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql:/me:s3cret@host",
        "nonsense s3cret",
        "oracle://me:s3cret@host/x",
        "",
        "postgresql://me:p@s3cret@host:1/shop",
        "mariadb://me:p@s3cret@host/shop",
    ],
)
def test_url_that_cannot_be_read_is_not_repeated(url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        create_engine_safely(url)
    assert "s3cret" not in str(caught.value)


def test_missing_driver_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pymysql", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'idemp\[mysql\]'"):
        create_engine_safely("mysql://host/shop")


def test_asynchronous_driver_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"driver|asynchronous"):
        create_engine_safely("sqlite+aiosqlite:///x.db")


def test_dead_workers_connection_is_given_up_within_half_a_minute(postgresql_url: str) -> None:
    engine = create_engine_safely(postgresql_url)
    with engine.connect() as connection:
        shown = {
            name: connection.scalar(text(f"SHOW {name}"))
            for name in ("tcp_keepalives_idle", "tcp_keepalives_interval", "tcp_keepalives_count", "tcp_user_timeout")
        }
    assert shown == {
        "tcp_keepalives_idle": "10",
        "tcp_keepalives_interval": "5",
        "tcp_keepalives_count": "3",
        "tcp_user_timeout": "20000",
    }
    engine.dispose()
