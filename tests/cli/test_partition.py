"""`idemp db partition`, and what `idemp doctor` and `idemp inbox purge` say and do about daily tables."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import text, update

from idemp.cli.daily import look_at_days
from idemp.cli.mending import Mending
from idemp.diagnosis import shell
from idemp.inbox.sql import SqlStore, create_engine_safely
from idemp.inbox.sql.schema import upgrade
from tests.inbox.sql import days

if TYPE_CHECKING:
    from collections.abc import Iterator

    from idemp.diagnosis import Diagnosis
    from tests.cli.conftest import Cli

DAY = timedelta(days=1)


@pytest.fixture
def store(folder: Any, postgresql_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[SqlStore]:
    monkeypatch.setenv("IDEMP_DATABASE_URL", postgresql_url)
    made = SqlStore(create_engine_safely(postgresql_url))
    upgrade(made.engine, made.tables)
    made.prepare("orders")
    yield made
    made.engine.dispose()


def told(store: SqlStore) -> Diagnosis:
    """What doctor says of the days."""
    (line,) = look_at_days(store, None, Mending(None, None, {}))
    return line


def test_it_begins_the_day_after_tomorrow_and_goes_on(cli: Cli, store: SqlStore) -> None:
    today = datetime.now(UTC).date()
    answer = cli("db", "partition", "orders", "--on", "--ahead", "3", "--json")
    assert answer.code == 0
    assert answer.data == {
        "consumer": "orders",
        "layouts": [
            {
                "since": str(today + 2 * DAY),
                "until": answer.data["layouts"][0]["until"],
                "first_kept": str(today + 2 * DAY),
                "made_until": str(today + 5 * DAY),
                "days": 3,
            }
        ],
    }
    assert told(store).verdict == "ok"
    again = cli("db", "partition", "orders", "--ahead", "10", "--json").data
    assert again["layouts"][0]["days"] == 9
    shown = cli("db", "partition", "orders").out
    assert str(today + 2 * DAY) in shown
    assert "all others are in the plain ones" in shown


def test_from_and_until(cli: Cli, store: SqlStore) -> None:
    today = datetime.now(UTC).date()
    answer = cli("db", "partition", "orders", "--from", str(today + 5 * DAY), "--ahead", "4", "--json")
    assert answer.data["layouts"][0]["since"] == str(today + 5 * DAY)
    ended = cli("db", "partition", "orders", "--until", str(today + 7 * DAY), "--json").data["layouts"][0]
    assert (ended["until"], ended["days"]) == (str(today + 7 * DAY), 2)
    refused = cli("db", "partition", "orders", "--from", str(today), "--json")
    assert (refused.code, refused.error["kind"]) == (3, "ConfigurationError")
    assert "begins too early" in refused.error["message"]


def test_without_options_nothing_is_switched_on(cli: Cli, store: SqlStore) -> None:
    answer = cli("db", "partition", "orders")
    assert answer.code == 0
    assert "`idemp db partition orders --on`" in answer.out
    assert not store.upkeep.daily.layouts("orders")
    assert not days.parts(store.engine, store.tables)


@pytest.mark.parametrize("again", [["--on"], ["--from"]])
def test_switching_on_twice_changes_nothing(cli: Cli, store: SqlStore, again: list[str]) -> None:
    first = cli("db", "partition", "orders", "--on", "--ahead", "3", "--json").data
    day = [first["layouts"][0]["since"]] if again == ["--from"] else []
    answer = cli("db", "partition", "orders", *again, *day, "--ahead", "1", "--json")
    assert (answer.code, answer.data) == (0, first)


def test_one_that_has_not_begun_is_called_off(cli: Cli, store: SqlStore) -> None:
    before = days.guards(store.engine, store.tables)
    since = cli("db", "partition", "orders", "--on", "--ahead", "3", "--json").data["layouts"][0]["since"]
    ended = cli("db", "partition", "orders", "--until", since, "--json")
    assert (ended.code, ended.data["layouts"]) == (0, [])
    assert not days.parts(store.engine, store.tables)
    assert days.guards(store.engine, store.tables) == before
    assert cli("db", "partition", "orders", "--on", "--ahead", "3", "--json").data["layouts"][0]["since"] == since


def test_one_switch_at_a_time(cli: Cli, store: SqlStore) -> None:
    day = str(datetime.now(UTC).date() + 9 * DAY)
    for both in (["--from", day, "--until", day], ["--on", "--until", day], ["--on", "--from", day]):
        answer = cli("db", "partition", "orders", *both, "--json")
        assert (answer.code, answer.error["kind"]) == (3, "ConfigurationError")
        assert "exclude each other" in answer.error["message"]
    assert not store.upkeep.daily.layouts("orders")


def test_errors_name_the_consumer(cli: Cli, store: SqlStore) -> None:
    answer = cli("db", "partition", "orders", "--until", str(datetime.now(UTC).date() + 9 * DAY), "--json")
    assert "`idemp db partition orders`" in answer.error["fix"]


def test_what_was_dropped_by_hand_is_made_again(cli: Cli, store: SqlStore) -> None:
    cli("db", "partition", "orders", "--on", "--ahead", "2")
    before = days.parts(store.engine, store.tables)
    with store.engine.begin() as connection:
        connection.execute(text(f"DROP TABLE idemp_{before[0]}, idemp_{before[-1]}"))
    cli("db", "partition", "orders", "--ahead", "2")
    assert set(before) <= set(days.parts(store.engine, store.tables))


def test_a_consumer_that_nobody_knows(cli: Cli, store: SqlStore) -> None:
    answer = cli("db", "partition", "oders", "--json")
    assert (answer.code, answer.error["kind"]) == (3, "ConfigurationError")
    assert "No consumer 'oders' is known here" in answer.error["message"]


def test_it_is_for_postgresql(cli: Cli, folder: Any) -> None:
    cli("db", "upgrade")
    answer = cli("db", "partition", "shop", "--json")
    assert answer.code == 3
    assert "deleted in batches" in answer.error["fix"]


@pytest.mark.parametrize(("left", "verdict"), [(1, "warning"), (0, "failed")])
def test_doctor_sees_that_days_are_missing(cli: Cli, store: SqlStore, left: int, verdict: str) -> None:
    today = datetime.now(UTC).date()
    cli("db", "partition", "orders", "--on", "--ahead", "2")
    with store.engine.begin() as connection:
        values = {"since": today - DAY, "dropped": today - DAY, "made": today + left * DAY}
        connection.execute(update(store.tables.daily).values(values))
    line = told(store)
    assert (line.verdict, line.commands) == (verdict, (shell("idemp", "db", "partition", "orders"),))
    assert "stands still" in line.detail
