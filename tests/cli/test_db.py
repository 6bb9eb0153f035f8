"""`idemp db`."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import Cli


def test_upgrade_makes_tables_that_check_accepts(cli: Cli, folder: Path) -> None:
    made = cli("db", "upgrade", "--prefix", "billing_", "--json")
    assert made.code == 0
    assert set(made.data) == {"database", "revision", "tables"}
    assert "billing_inbox" in made.data["tables"]
    again = cli("db", "upgrade", "--prefix", "billing_")
    assert (again.code, "billing_*" in again.out) == (0, True)
    seen = cli("db", "check", "--prefix", "billing_", "--json")
    assert seen.code == 0
    assert set(seen.data) == {"database", "dialect", "server_version", "isolation", "revision", "findings"}
    assert {"level", "name", "value", "meaning", "fix"} == set(seen.data["findings"][0])
    assert "journal_mode" in cli("db", "check", "--prefix", "billing_").out
    assert cli("db", "check").code == 3


def test_check_refuses_an_altered_key(cli: Cli, folder: Path) -> None:
    cli("db", "upgrade")
    with closing(sqlite3.connect(folder / "shop.db")) as raw:
        raw.execute("DROP TABLE idemp_inbox")
        raw.execute(
            "CREATE TABLE idemp_inbox (message_key, consumer_id, type_id, worker_id, claimed_at, fingerprint, "
            "original_id, source_position)"
        )
    answer = cli("db", "check", "--json")
    assert (answer.code, answer.error["kind"]) == (3, "SchemaError")


@pytest.mark.parametrize("dialect", ["postgresql", "mariadb", "mysql", "sqlite"])
def test_sql_prints_a_script(cli: Cli, folder: Path, dialect: str) -> None:
    answer = cli("db", "sql", "--dialect", dialect, "--prefix", "billing_")
    assert answer.code == 0
    assert "billing_inbox" in answer.out
    assert cli("db", "sql", "--dialect", dialect, "--json").data["dialect"] == dialect


def test_sql_script_makes_the_tables(cli: Cli, folder: Path) -> None:
    script = cli("db", "sql", "--dialect", "sqlite").out
    with closing(sqlite3.connect(folder / "shop.db")) as raw:
        raw.executescript(script)
    assert cli("db", "check").code == 0
