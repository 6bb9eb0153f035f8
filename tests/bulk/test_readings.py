"""A message is one message, however it arrives: handled online, as a row, or by a set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from idemp import Inbox, Settings
from idemp.bulk import Answer, Bulk
from idemp.process import Process
from idemp.sql.engine import Database
from idemp.sql.scheduler import SqlScheduler
from tests.bulk import readings
from tests.world import metadata

WAYS: dict[str, Any] = {"rows": {}, "SQL": readings.SQL, "Arrow": readings.take_all}


@pytest.mark.parametrize("kind", ["postgresql"], indirect=True)
def test_all_ways_find_the_same_message(url: str, new_url: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    messages = readings.messages()
    urls = {name: new_url() for name in WAYS} | {"online": url}
    databases = {name: Database(each) for name, each in urls.items()}
    for database in databases.values():
        metadata.create_all(database.engine)
    handle_online(databases["online"], messages)
    for name, function in WAYS.items():
        settings = Settings(database_url=urls[name])
        monkeypatch.setattr(readings.app, "process", Process(None, settings))
        with Bulk(readings.app, sets=dict.fromkeys(readings.POLICIES, function) if function else {}) as bulk:
            report = bulk.run([readings.row(each) for each in messages])
            assert (report.parked, report.counts[Answer.NEW], report.outputs) == ([], len(messages), 2 * len(messages))
    found = {name: readings.stored(database) for name, database in databases.items()}
    for claims, outputs, effects in found.values():
        assert (len(claims), len(outputs), len(effects)) == (len(messages), 2 * len(messages), len(messages))
        assert (claims, outputs, effects) == found["online"]
    # What was handled online is a duplicate of every other way, and none of its rows is a conflict.
    settings = Settings(database_url=url)
    monkeypatch.setattr(readings.app, "process", Process(None, settings))
    for function in WAYS.values():
        with Bulk(readings.app, sets=dict.fromkeys(readings.POLICIES, function) if function else {}) as bulk:
            assert bulk.run([readings.row(each) for each in messages]).counts == {Answer.DUPLICATE: len(messages)}
    for database in databases.values():
        database.close()


def handle_online(database: Database, messages: list[readings.Message]) -> None:
    """Handle messages as a consumer does that leaves its outputs to a relay."""
    SqlScheduler(database, "relay", 30.0).beat("relay")
    inbox = Inbox(database.engine)
    handlers = {
        type: inbox.wrap(readings.take, message=readings.Order, type=type, consumer="readings", policy=policy)
        for type, policy in readings.POLICIES.items()
    }
    types = list(readings.POLICIES)
    for n, (properties, body) in enumerate(messages):
        handlers[types[n % 5]](body, properties)
