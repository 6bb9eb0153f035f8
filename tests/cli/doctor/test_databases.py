"""Databases, broken on purpose."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import create_engine, make_url, text

from idemp.inbox.sql import engine
from tests.cli.doctor.conftest import Patient, on_database
from tests.lanes import mostly_slow
from tests.servers import postgresql
from tests.servers.fixtures import private
from tests.servers.mariadb import MariaDB
from tests.servers.postgresql import PostgreSQL
from tests.servers.process import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import URL

# Commands leave connections to their end.
FORGOTTEN_CONNECTIONS = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
KINDS = ("postgresql", "mariadb", "sqlite")
ALTERED: dict[str, dict[str, tuple[list[str], str, str]]] = {
    "postgresql": {
        "a table dropped": (["DROP TABLE idemp_pending"], "tables", "missing: idemp_pending"),
        "the inbox's key dropped": (
            ["ALTER TABLE idemp_inbox DROP CONSTRAINT idemp_inbox_pkey"],
            "primary key",
            "idemp_inbox is (none)",
        ),
        "the inbox's key without the consumer": (
            [
                "ALTER TABLE idemp_inbox DROP CONSTRAINT idemp_inbox_pkey",
                "ALTER TABLE idemp_inbox ADD CONSTRAINT other PRIMARY KEY (message_key)",
            ],
            "primary key",
            "idemp_inbox is (message_key)",
        ),
        "names of consumers not unique": (
            ["ALTER TABLE idemp_consumer DROP CONSTRAINT idemp_consumer_name_key"],
            "unique names",
            "idemp_consumer",
        ),
        "ids in streams not unique": (
            ["ALTER TABLE idemp_commit DROP CONSTRAINT idemp_commit_id_key"],
            "unique names",
            "message ids in idemp_commit are not unique",
        ),
        "the inbox unlogged": (["ALTER TABLE idemp_inbox SET UNLOGGED"], "unlogged", "idemp_inbox is UNLOGGED"),
        "commits that do not wait": (
            ["ALTER DATABASE {database} SET synchronous_commit = off"],
            "synchronous_commit",
            "off. A crash of the server may lose",
        ),
    },
    "mariadb": {
        "a table dropped": (["DROP TABLE idemp_unfinished"], "tables", "missing: idemp_unfinished"),
        "the inbox's key dropped": (
            ["ALTER TABLE idemp_inbox DROP PRIMARY KEY"],
            "primary key",
            "idemp_inbox is (none)",
        ),
        "an engine without rollback": (
            ["ALTER TABLE idemp_output ENGINE = Aria"],
            "engine",
            "idemp_output is in the engine Aria",
        ),
        "names of types not unique": (
            ["ALTER TABLE idemp_message_type DROP INDEX idemp_message_type_name_key"],
            "unique names",
            "idemp_message_type",
        ),
    },
}
CASES = [case for kind, cases in ALTERED.items() for case in mostly_slow((kind, what) for what in cases)]


def url_of(request: pytest.FixtureRequest, kind: str) -> str:
    if kind == "sqlite":
        return f"sqlite:///{request.getfixturevalue('folder')}/shop.db"
    url: str = request.getfixturevalue(f"{kind}_url")
    return url


def mended(patient: Patient, name: str, detail: str) -> None:
    """Doctor finds this and nothing else; what it names makes it green."""
    (found,) = patient.red()
    assert found["name"] == name
    assert detail in found["detail"]
    assert found["fix"]
    patient.treat(found)
    assert patient.red() == []


@pytest.mark.parametrize("kind", mostly_slow(KINDS))
def test_tables_never_made(
    patient: Patient, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    on_database(patient, url_of(request, kind), monkeypatch, revision="")
    mended(patient, "tables", "There are no tables idemp_*")


@pytest.mark.parametrize("kind", mostly_slow(KINDS))
def test_tables_of_an_old_version(
    patient: Patient, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    on_database(patient, url_of(request, kind), monkeypatch, revision="0001")
    mended(patient, "tables", "are of version '0001'")


@pytest.mark.parametrize(("kind", "what"), CASES)
def test_altered(
    patient: Patient, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, kind: str, what: str
) -> None:
    url = url_of(request, kind)
    on_database(patient, url, monkeypatch)
    statements, name, detail = ALTERED[kind][what]
    patient.sql(*(statement.format(database=url.rpartition("/")[2]) for statement in statements))
    mended(patient, name, detail)


def as_user(patient: Patient, monkeypatch: pytest.MonkeyPatch, url: URL, user: str) -> None:
    """From now on the app logs in as this user, and the administrator stays who it was."""
    monkeypatch.setenv("IDEMP_DATABASE_URL", url.set(username=user).render_as_string(hide_password=False))


REVOKED = {"idemp_output": "INSERT", "idemp_pending": "UPDATE", "idemp_inbox": "DELETE", "idemp_history": "SELECT"}
NAMES = (
    "consumer",
    "queue",
    "message_type",
    "worker",
    "broker",
    "inbox",
    "output",
    "pending",
    "unfinished",
    "daily",
    "arrival",
    "commit",
    "unconfirmed",
    "prepared",
    "barrier",
    "coordinator",
    "decision",
    "history",
    "activity",
    "identity",
)
UPDATED = (
    "pending",
    "worker",
    "activity",
    "identity",
    "consumer",
    "unfinished",
    "queue",
    "prepared",
    "barrier",
    "broker",
)


@pytest.fixture(scope="module")
def administered_postgresql() -> Iterator[PostgreSQL]:
    """A server whose roles and settings the tests of this module change, and mend."""
    with private(PostgreSQL) as server:
        yield server


@pytest.fixture(scope="module")
def administered_mariadb() -> Iterator[MariaDB]:
    """A server whose users and settings the tests of this module change, and mend."""
    with private(MariaDB) as server:
        yield server


def test_rights_revoked_on_postgresql(
    patient: Patient, administered_postgresql: PostgreSQL, unique_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_database(patient, administered_postgresql.create_database(unique_name), monkeypatch)
    patient.sql(
        "CREATE ROLE worker LOGIN",
        "GRANT SELECT, INSERT, DELETE ON ALL TABLES IN SCHEMA public TO worker",
        *(f"GRANT UPDATE ON idemp_{name} TO worker" for name in UPDATED),
        "GRANT UPDATE (worker_id) ON idemp_inbox TO worker",
        "GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO worker",
        "REVOKE DELETE ON idemp_commit FROM worker",
    )
    as_user(patient, monkeypatch, make_url(patient.administrator), "worker")
    assert patient.red() == []  # what the how-to on least privilege says is enough
    patient.sql(
        *(f"REVOKE {right} ON {table} FROM worker" for table, right in REVOKED.items()),
        "REVOKE UPDATE (worker_id) ON idemp_inbox FROM worker",
        "REVOKE USAGE ON SEQUENCE idemp_consumer_id_seq FROM worker",
    )
    mended(patient, "rights", "has no SELECT on idemp_history")
    assert sorted(patient.ran) == [
        'GRANT DELETE, UPDATE (worker_id) ON TABLE public.idemp_inbox TO "worker"',
        'GRANT INSERT ON TABLE public.idemp_output TO "worker"',
        'GRANT SELECT ON TABLE public.idemp_history TO "worker"',
        'GRANT UPDATE ON TABLE public.idemp_pending TO "worker"',
        'GRANT USAGE ON SEQUENCE public.idemp_consumer_id_seq TO "worker"',
    ]


def test_rights_revoked_on_mariadb(
    patient: Patient, administered_mariadb: MariaDB, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_database(patient, administered_mariadb.create_database("shop"), monkeypatch)
    user = "'worker'@'127.0.0.1'"
    patient.sql(
        f"CREATE USER {user}",
        f"GRANT SELECT ON shop.idemp_alembic_version TO {user}",
        *(f"GRANT SELECT, INSERT, DELETE ON shop.idemp_{table} TO {user}" for table in NAMES),
        *(f"GRANT UPDATE ON shop.idemp_{table} TO {user}" for table in UPDATED),
    )
    as_user(patient, monkeypatch, make_url(patient.administrator), "worker")
    assert patient.red() == []
    patient.sql(*(f"REVOKE {right} ON shop.{table} FROM {user}" for table, right in REVOKED.items()))
    mended(patient, "rights", "has no SELECT on idemp_history")
    assert sorted(patient.ran) == sorted(
        f"GRANT {right} ON `shop`.`{table}` TO {user}" for table, right in REVOKED.items()
    )


def test_server_without_fsync(
    patient: Patient, administered_postgresql: PostgreSQL, unique_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_database(patient, administered_postgresql.create_database(unique_name), monkeypatch)
    names = ("fsync", "full_page_writes")

    def are(value: str) -> bool:
        return all(postgresql.query(patient.administrator, f"SHOW {name}") == [(value,)] for name in names)  # type: ignore[arg-type]

    patient.sql(*(f"ALTER SYSTEM SET {name} = off" for name in names), "SELECT pg_reload_conf()")
    wait_until(lambda: are("off"), "the server has read its configuration")
    found = patient.red()
    torn = "off. A crash of the server may corrupt the inbox."
    assert {check["name"]: check["detail"] for check in found} == dict.fromkeys(names, torn)
    for check in found:
        patient.treat(check)
    wait_until(lambda: are("on"), "the server has read its configuration")
    assert patient.red() == []


@pytest.mark.parametrize("where", ["ROLE postgres", "ROLE postgres IN DATABASE {database}"])
def test_commits_of_a_user_that_do_not_wait(
    patient: Patient,
    administered_postgresql: PostgreSQL,
    unique_name: str,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
) -> None:
    on_database(patient, administered_postgresql.create_database(unique_name), monkeypatch)
    patient.sql(f"ALTER {where.format(database=unique_name)} SET synchronous_commit = off")
    mended(patient, "synchronous_commit", "off. A crash of the server may lose")


def test_log_flushed_now_and_then(
    patient: Patient, administered_mariadb: MariaDB, unique_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_database(patient, administered_mariadb.create_database(unique_name), monkeypatch)
    patient.sql("SET GLOBAL innodb_flush_log_at_trx_commit = 2")
    mended(patient, "innodb_flush_log_at_trx_commit", "2. A crash of the server may lose")


@FORGOTTEN_CONNECTIONS
def test_database_that_takes_no_writes(patient: Patient, postgresql_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is there, and says so; what it has can be read."""
    on_database(patient, postgresql_url, monkeypatch)
    name = make_url(postgresql_url).database
    patient.sql(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on')
    (found,) = patient.red()
    assert "takes no writes: cannot execute INSERT in a read-only transaction" in found["detail"]
    assert "read-only mode" in found["fix"]
    assert {"relay", "workers"} <= {check["name"] for check in patient.look().data["checks"]}, "what waits is told, too"
    listed = patient.cli("inbox", "list", "--json")
    assert (listed.code, listed.data) == (0, [])
    assert patient.cli("inbox", "explain", "42", "--json").error["kind"] == "NotFound"
    refused = patient.cli("inbox", "release", "--all", "--json")
    assert (refused.code, refused.error["kind"]) == (4, "StoreUnavailable")
    gc.collect()


def test_date_style_that_can_not_be_read(
    patient: Patient, postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_database(patient, postgresql_url, monkeypatch)
    name = make_url(postgresql_url).database
    patient.sql(f'ALTER DATABASE "{name}" SET DateStyle = German')
    (found,) = patient.red()
    assert "has the DateStyle 'German, DMY'" in found["detail"]
    patient.sql(found["fix"].removeprefix("Run ").partition(", which")[0])
    assert patient.red() == []


@FORGOTTEN_CONNECTIONS
def test_lock_that_somebody_holds(patient: Patient, postgresql_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who looks on tells of it, instead of waiting behind it in silence."""
    on_database(patient, postgresql_url, monkeypatch)
    monkeypatch.setattr(engine, "_LOCK_SECONDS", 0.1)
    holder = create_engine(postgresql_url)
    with holder.begin() as connection:
        connection.execute(text("LOCK TABLE idemp_inbox IN ACCESS EXCLUSIVE MODE"))
        found, *waiting = patient.red()
        told = patient.cli("inbox", "explain", "42", "--json")
        assert connection.scalar(text("SELECT 42")) == 42
    holder.dispose()
    assert (found["name"], [check["name"] for check in waiting]) == ("probe", ["what waits"])
    assert "somebody else holds a lock" in found["detail"]
    assert "SELECT pid, xact_start, state, query FROM pg_stat_activity" in found["fix"]
    assert (told.code, told.error["kind"]) == (1, "TransientStoreError")
    assert patient.red() == []
    gc.collect()


@pytest.mark.parametrize(("name", "own"), [("mariadb_url", (3, 10)), ("postgresql_url", ("3s",))])
def test_shorter_waits_of_the_users_stay(request: pytest.FixtureRequest, name: str, own: tuple[object, ...]) -> None:
    """Doctor waits ten seconds for a lock, and never longer than it was told to."""
    said = (
        {"init_command": "SET SESSION lock_wait_timeout = 3"} if "maria" in name else {"options": "-c lock_timeout=3s"}
    )
    asked = "SELECT @@lock_wait_timeout, @@innodb_lock_wait_timeout" if "maria" in name else "SHOW lock_timeout"
    looking = engine.create_engine_safely(request.getfixturevalue(name), connect_args=said)
    engine.give_up_on_locks(looking)
    with looking.connect() as connection:
        found = connection.execute(text(asked)).one()
    looking.dispose()
    assert tuple(found) == own
