"""Guards of costs that no clock is needed for, and of one that is: what is bounded here, a change must not raise unseen."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from sqlalchemy import text

from benchmarks import cpu
from benchmarks.filling import time_ordered
from benchmarks.servers import Servers
from tests.house import House, sale, sql_house

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.servers.postgresql import PostgreSQL

pytestmark = pytest.mark.slow

MESSAGES = 50
LOG_BYTES = 1850
"""A claim, one short output, its pending row, the mark and one effect, with all indexes: 1,600 were measured."""
CPU_SHARE = 0.2
"""A bare handler on SQLite takes so much of a wrapped one's CPU time at least: 0.29 was measured."""


@pytest.fixture
def house(own_postgresql: PostgreSQL, unique_name: str) -> Iterator[House]:
    """On a server of its own: the log and the numbers of transactions are the whole server's."""
    with sql_house(own_postgresql.create_database(unique_name)) as made:
        made.sells(outputs=1)
        for _ in range(2 * MESSAGES):
            made.deliver(sale(str(time_ordered())))
        made.restart()
        yield made


def handle(house: House) -> None:
    """So many messages, and the marks of all of them."""
    for _ in range(MESSAGES):
        house.deliver(sale(str(time_ordered())))
    house.restart()


def least(house: House, asked: str) -> float:
    """By how much the server's answer grows in a block, at least: its own upkeep can only add to it."""
    grown = []
    for _ in range(5):
        with house.store.inner.engine.connect() as connection:
            before = connection.scalars(text(asked)).one()
        handle(house)
        with house.store.inner.engine.connect() as connection:
            grown.append(float(connection.scalars(text(asked)).one() - before))
    return min(grown)


def test_bytes_of_the_log_per_message(house: House) -> None:
    """A checkpoint in between would put whole pages into the log: the least block has none."""
    written = least(house, "SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')") / MESSAGES
    assert LOG_BYTES / 2 < written < LOG_BYTES


def test_writing_transactions_per_message(house: House) -> None:
    """One each, and one for the marks of all; the last is the question itself."""
    assert least(house, "SELECT txid_current()::numeric") == MESSAGES + 2


def test_confirm_waits_per_message(house: House) -> None:
    """One each where messages come alone."""
    house.script.clear()
    handle(house)
    assert house.script.calls.count("publish") == MESSAGES


def test_confirm_waits_of_a_batch() -> None:
    """One for all that share a transaction."""
    with sql_house() as shop:
        shop.sells(outputs=1, batch=MESSAGES)
        shop.together(*(sale(f"sale-{number}") for number in range(MESSAGES)))
        assert shop.script.calls.count("publish") == 1
        assert len(shop.sent()) == MESSAGES


def test_cpu_time_on_sqlite() -> None:
    """Measured again where it was noisy: a real loss shows each time."""
    with Servers() as servers:
        measured = []
        while not measured or (measured[-1] < CPU_SHARE and len(measured) < 4):
            found = cpu.run(servers, cpu.options_of(["--databases=sqlite", "--rounds=7", "--messages=60"]))
            measured.append(found["databases"]["sqlite"]["early"]["median"])
    assert measured[-1] >= CPU_SHARE, measured
