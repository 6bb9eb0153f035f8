"""Heartbeats of a worker through an outage of its database."""

from __future__ import annotations

import logging
from contextlib import ExitStack

import pytest
from sqlalchemy import text

from idemp.worker import Worker
from tests.house import House, sql_house


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "idemp.worker")
    return caplog


def rename(house: House, name: str, to: str) -> None:
    with house.store.inner.engine.begin() as connection:
        connection.execute(text(f"ALTER TABLE {name} RENAME TO {to}"))


def test_one_line_per_outage_and_one_at_its_end(caplog: pytest.LogCaptureFixture) -> None:
    """Of each app whose database it is, and of no other."""
    with ExitStack() as stack:
        broken, well = (stack.enter_context(sql_house()) for _ in range(2))
        worker = Worker([broken.app, well.app])
        for _ in range(2):
            worker._beat_once()
            rename(broken, "idemp_activity", "away")
            for _ in range(3):
                worker._beat_once()
            rename(broken, "away", "idemp_activity")
            for _ in range(2):
                worker._beat_once()
    said = [(vars(record)["event"], record.levelname) for record in caplog.records if record.name == "idemp.worker"]
    assert said == [("beat_failed", "WARNING"), ("beat_again", "INFO")] * 2
