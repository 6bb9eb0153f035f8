"""What a handling in two databases costs in statements. That one database costs no more than before is guarded elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from idemp import Outcome
from tests.test_counts import Wire
from tests.twophase.kinds import ON_POSTGRESQL

if TYPE_CHECKING:
    from pathlib import Path

    from tests.twophase.world import World


pytestmark = ON_POSTGRESQL  # libpq tells what it sends


def kinds(wire: Wire) -> list[str]:
    """What was sent since the last time: each message's statements, by their first words."""
    return [
        "; ".join(" ".join(part.split()[:2]).removesuffix(" ISOLATION") for part in said.split(";") if part.strip())
        for said in wire.messages()
    ]


@pytest.fixture
def wires(shop: World, tmp_path: Path) -> dict[str, Wire]:
    """What this consumer's connections send, on PostgreSQL."""
    database: Any = shop.consumer.coordinator.databases["ledger"]
    made: dict[str, Wire] = {}
    for name, engine in {"inbox": shop.consumer.engine, "ledger": database.engine}.items():
        engine.dispose()
        engine.pool._pool.use_lifo = True  # a look-up beside a delivery takes another one, which is then used last
        with engine.connect() as connection:
            made[name] = Wire(connection.connection.driver_connection, tmp_path / name)
    shop.consumer.deliver(901)
    for n in range(8):  # statements are prepared, names known
        shop.consumer.deliver(-n - int(time.monotonic() * 1000))
    for wire in made.values():
        kinds(wire)
    return made


def test_handling(shop: World, wires: dict[str, Wire]) -> None:
    """Four commits instead of one: PREPARE, COMMIT, COMMIT PREPARED, and the decision is forgotten."""
    assert shop.consumer.deliver(907) is Outcome.HANDLED
    shop.all_is_well(907)
    assert kinds(wires["ledger"]) == [
        "SELECT gid,",
        "BEGIN",
        "SELECT txid_current(),",
        "INSERT INTO",
        "SELECT txid_current_if_assigned(),",
        "PREPARE TRANSACTION",
        "COMMIT PREPARED",
    ]
    inbox = kinds(wires["inbox"])
    assert inbox == [
        "BEGIN; LOCK TABLE; SHOW lock_timeout; SET LOCAL; INSERT INTO; SET LOCAL",
        "INSERT INTO",
        "INSERT INTO",
        "SELECT 1; INSERT INTO; INSERT INTO; COMMIT",
        "DELETE FROM",
    ]


def test_handling_without_the_other_database(shop: World, wires: dict[str, Wire]) -> None:
    assert shop.consumer.deliver(908, names=[]) is Outcome.HANDLED
    assert kinds(wires["ledger"]) == ["SELECT gid,"]
    assert len(kinds(wires["inbox"])) == 3


def test_duplicate(shop: World, wires: dict[str, Wire]) -> None:
    """It asks for a decision, which is long forgotten."""
    shop.consumer.deliver(909)
    for wire in wires.values():
        kinds(wire)
    assert shop.consumer.deliver(909) is Outcome.REDISPATCHED
    assert kinds(wires["ledger"]) == ["SELECT gid,"]
    assert kinds(wires["inbox"])[-2:] == ["ROLLBACK", "SELECT public.idemp_decision.message_key,"]
