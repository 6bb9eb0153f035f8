"""What a handling in two databases costs in statements; that one in a single database costs nothing more is guarded elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import text

from idemp import Outcome
from tests.test_counts import Wire

if TYPE_CHECKING:
    from pathlib import Path

    from tests.twophase.world import World


def kinds(messages: list[str]) -> list[str]:
    """Each message's statements, by their first words."""
    return ["; ".join(" ".join(part.split()[:2]) for part in said.split(";") if part.strip()) for said in messages]


@pytest.fixture
def wires(shop: World, tmp_path: Path) -> dict[str, Wire]:
    """What this consumer's connections send, on PostgreSQL."""
    if not shop.is_postgresql("ledger"):
        pytest.skip("libpq tells what it sends")
    for n in (901, 902, 903, 904, 905, 906):  # statements are prepared, names known
        shop.consumer.deliver(n)
    database: Any = shop.consumer.coordinator.databases["ledger"]
    made = {}
    for name, engine in {"inbox": shop.consumer.engine, "ledger": database.engine}.items():
        with engine.connect() as connection:
            made[name] = Wire(connection.connection.driver_connection, tmp_path / name)
            connection.execute(text("SELECT 1"))
    for wire in made.values():
        wire.messages()
    return made


def test_handling(shop: World, wires: dict[str, Wire]) -> None:
    """Four commits instead of one: PREPARE, COMMIT, COMMIT PREPARED, and the decision is forgotten."""
    assert shop.consumer.deliver(907) is Outcome.HANDLED
    shop.all_is_well(907)
    assert kinds(wires["ledger"].messages()) == [
        "SELECT gid,",
        "BEGIN",
        "SELECT txid_current(),",
        "INSERT INTO",
        "SELECT txid_current_if_assigned()",
        "PREPARE TRANSACTION",
        "COMMIT PREPARED",
    ]
    inbox = kinds(wires["inbox"].messages())
    assert inbox == [
        "BEGIN; LOCK TABLE; SHOW lock_timeout; SET LOCAL; INSERT INTO; SET LOCAL",
        "INSERT INTO",
        "INSERT INTO",
        "SELECT 1; INSERT INTO; INSERT INTO; COMMIT",
        "BEGIN",
        "DELETE FROM",
        "COMMIT",
    ]


def test_handling_without_the_other_database(shop: World, wires: dict[str, Wire]) -> None:
    assert shop.consumer.deliver(908, names=[]) is Outcome.HANDLED
    assert wires["ledger"].messages() == []
    assert len(wires["inbox"].messages()) == 3


def test_duplicate(shop: World, wires: dict[str, Wire]) -> None:
    """It asks for a decision, which is long forgotten."""
    shop.consumer.deliver(909)
    for wire in wires.values():
        wire.messages()
    assert shop.consumer.deliver(909) is Outcome.REDISPATCHED
    assert wires["ledger"].messages() == []
    assert kinds(wires["inbox"].messages())[-3:] == ["BEGIN", "SELECT idemp_decision.message_key,", "COMMIT"]
