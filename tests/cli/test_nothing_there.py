"""Every verb where nothing was made yet: its exit code, plain words, and nothing left behind by what reads or is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest
import typer
from sqlalchemy import create_engine, inspect

from idemp.cli import root

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sqlalchemy import Engine

    from tests.cli.conftest import Cli, Shop

_TABLES: Final = "idemp db upgrade"
_BROKER: Final = "broker.db does not exist"
_SPARK: Final = ""  # where it is not installed, that is what is told

#: Command line, exit code and words. APP is an app, PREPARING one whose prepared messages wait in a database of theirs.
CASES: Final = [
    ("worker APP", 3, _TABLES),
    ("relay", 3, _TABLES),
    ("relay APP", 3, _TABLES),
    ("doctor", 1, _TABLES),
    ("doctor APP", 1, _TABLES),
    ("doctor PREPARING", 1, _TABLES),
    ("describe APP", 0, "shop.Order"),
    ("recover APP", 3, _TABLES),
    ("recover APP --dry-run", 3, _TABLES),
    ("db check", 3, _TABLES),
    ("db sql", 0, "CREATE TABLE"),
    ("db partition shop", 3, ""),
    ("db partition shop --on", 3, ""),
    ("inbox list", 3, _TABLES),
    ("inbox list --pending", 3, _TABLES),
    ("inbox show 1", 3, _TABLES),
    ("inbox explain 1", 3, _TABLES),
    ("inbox explain 1 --app APP", 3, _TABLES),
    ("inbox redispatch 1", 3, _TABLES),
    ("inbox redispatch 1 --app APP", 3, _TABLES),
    ("inbox release --all", 3, _TABLES),
    ("inbox release --all --app APP", 3, _TABLES),
    ("inbox purge APP", 3, _TABLES),
    ("inbox purge --consumer shop --older-than 1d", 3, _TABLES),
    ("inbox erase 1 --yes", 3, _TABLES),
    ("inbox discard 1 --yes", 3, _TABLES),
    ("dead list --queue shop", 3, _BROKER),
    ("dead list --app APP", 3, _BROKER),
    ("dead show 1 --app APP", 3, _BROKER),
    ("dead replay --all --app APP", 3, _BROKER),
    ("dead discard --all --yes --app APP", 3, _BROKER),
    ("prepared list PREPARING", 3, _TABLES),
    ("prepared show PREPARING 1", 3, _TABLES),
    ("prepared resume PREPARING --all", 3, _TABLES),
    ("prepared park PREPARING 1", 3, _TABLES),
    ("prepared check PREPARING", 3, _TABLES),
    ("broker adopt APP", 3, _BROKER),
    ("broker rebuild APP --queue shop", 3, _BROKER),
    ("pipeline archive APP --to archive", 3, _SPARK),
    ("pipeline archive --consumer shop --older-than 1d --to archive", 3, _SPARK),
    ("pipeline backfill APP --input in", 3, _SPARK),
    ("pipeline reconcile --sent in --consumer shop --id id --time at", 3, _SPARK),
    ("pipeline restore archive", 3, _SPARK),
    ("pipeline spool shop", 3, _BROKER),
    ("pipeline spool shop --until-empty", 3, _BROKER),
]
#: They are there to make something.
MAKING: Final = {"demo", "db upgrade", "broker declare"}

_PREPARING: Final = """
import os

from idemp import App
from idemp.inbox.sql import create_engine_safely
from idemp.prepared import PreparedMessages
from idemp.prepared.sql import SqlHome

app = App("shop")
home = SqlHome(create_engine_safely(os.environ["IDEMP_DATABASE_URL"]))
prepared = PreparedMessages(app, home, checker=lambda prepared: None)


@app.handler(dict, type="shop.Order")
def order(message): ...
"""


@pytest.fixture(autouse=True)
def archived(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else `pipeline archive` is refused before it looks for tables."""
    monkeypatch.setenv("IDEMP_PURGE", "false")


@pytest.fixture
def empty_database(empty_shop: Shop, postgresql_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """A PostgreSQL database without a table, which all commands use."""
    monkeypatch.setenv("IDEMP_DATABASE_URL", postgresql_url)
    engines = [create_engine(postgresql_url)]

    def made(*arguments: Any, **options: Any) -> Engine:
        engines.append(create_engine(*arguments, **options))
        return engines[-1]

    monkeypatch.setattr("idemp.inbox.sql.engine.create_engine", made)  # a command's process closes its connections
    yield engines[0]
    for engine in engines:
        engine.dispose()


@pytest.mark.parametrize(("line", "code", "words"), CASES, ids=[line for line, _, _ in CASES])
def test_nothing_is_made_in_an_empty_folder(cli: Cli, empty_shop: Shop, line: str, code: int, words: str) -> None:
    _check_refused(cli, empty_shop, line, code, words)


_IN_THE_DATABASE: Final = [case for case in CASES if case[2] == _TABLES or case[0].startswith("db partition")]


def test_nothing_is_made_in_an_empty_database(cli: Cli, empty_shop: Shop, empty_database: Engine) -> None:
    for line, code, _ in _IN_THE_DATABASE:
        _check_refused(cli, empty_shop, line, code, _TABLES)
    assert inspect(empty_database).get_table_names() == []


def _check_refused(cli: Cli, empty_shop: Shop, line: str, code: int, words: str) -> None:
    preparing = f"{empty_shop.module}_preparing"
    (empty_shop.folder / f"{preparing}.py").write_text(_PREPARING)
    (empty_shop.folder / "in").mkdir(exist_ok=True)
    before = {path for path in empty_shop.folder.rglob("*") if "__pycache__" not in path.parts}
    named = {"APP": empty_shop.where, "PREPARING": f"{preparing}:app"}
    answer = cli(*(named.get(word, word) for word in line.split()))
    told = answer.out + answer.err
    assert (answer.code, words in told, "Unexpected" in told, "Traceback" in told) == (code, True, False, False), told
    assert {path for path in empty_shop.folder.rglob("*") if "__pycache__" not in path.parts} == before


def test_every_verb_is_looked_at() -> None:
    known = {" ".join(path) for path in _verbs(typer.main.get_command(root))}
    looked_at = {name for line, _, _ in CASES for name in known if f"{line} ".startswith(f"{name} ")}
    assert known - looked_at == MAKING


def _verbs(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    inner = getattr(command, "commands", None)
    if inner is None:
        yield path
        return
    for name, each in inner.items():
        yield from _verbs(each, (*path, name))
