"""The databases and decisions in SQL do what those do that the simulation takes in their place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import text

from tests.twophase.conformance import DatabaseCases, DecisionsCases
from tests.twophase.kinds import ON_POSTGRESQL

if TYPE_CHECKING:
    from idemp.inbox.port import Store
    from idemp.twophase import Branch, Database, Decisions
    from tests.twophase.world import World


class TestSqlDatabase(DatabaseCases):
    shop: World

    @pytest.fixture
    def database(self, shop: World) -> Database:
        self.shop = shop
        self.in_hands = not shop.is_postgresql("ledger")
        self.tells_outcomes = not self.in_hands
        return shop.consumer.coordinator.databases["ledger"]

    def write(self, branch: Branch, row: int) -> None:
        branch.session.execute(text("INSERT INTO effect (n) VALUES (:n)"), {"n": row})

    def count(self, row: int) -> int:
        return self.shop.effects(row)[1]


@ON_POSTGRESQL  # the inbox is the same for both
class TestSqlDecisions(DecisionsCases):
    consumer = "billing"

    @pytest.fixture
    def store(self, shop: World) -> Store:
        store: Any = shop.consumer.app.store
        return store

    @pytest.fixture
    def decisions(self, shop: World) -> Decisions:
        return shop.consumer.coordinator.decisions
