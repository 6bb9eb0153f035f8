"""The inbox in memory keeps the port's promises."""

from __future__ import annotations

from contextlib import suppress
from copy import deepcopy
from datetime import timedelta

import pytest

from idemp.errors import IdentityChanged, TransactionEnded
from idemp.inbox.memory import InMemoryStore
from idemp.inbox.port import Identity
from idemp.testing.clock import FakeClock
from idemp.testing.store_bench import RELAY_AFTER, Background, Bench, MemoryEffects, make_outputs
from idemp.testing.store_conformance import StoreConformance


class TestInMemoryStore(StoreConformance):
    outlives_process = False
    shortest_wait = 0.2

    @pytest.fixture
    def store(self, clock: FakeClock) -> InMemoryStore:
        return InMemoryStore(clock)

    @pytest.fixture
    def effects(self, store: InMemoryStore) -> MemoryEffects:
        return MemoryEffects(store)

    @pytest.mark.parametrize("end", ["commit", "rollback"])
    def test_handler_cannot_end_the_unit(self, bench: Bench, store: InMemoryStore, end: str) -> None:
        claim = bench.claim()
        with pytest.raises(TransactionEnded), store.begin([claim]) as unit:
            unit.claim(claim)
            unit.session["stock"] = 6
            with suppress(TransactionEnded):  # swallowed, and remembered all the same
                getattr(unit.session, end)()
            unit.flush()
        assert "stock" not in store.data
        assert bench.handle(claim).verdict.name == "CLAIMED"

    def test_swallowed_refusal_is_found_at_the_latest_at_commit(self, bench: Bench, store: InMemoryStore) -> None:
        claim = bench.claim()
        with store.begin([claim]) as unit:
            unit.claim(claim)
            with pytest.raises(TransactionEnded):
                unit.session.commit()
            for step in (lambda: unit.store_outputs(claim, make_outputs(), RELAY_AFTER), unit.commit):
                with pytest.raises(TransactionEnded):
                    step()
        assert store.pending_count() == 0

    def test_session_reads_what_was_committed_and_what_it_changed(self, store: InMemoryStore) -> None:
        with store.begin() as unit:
            unit.session["a"], unit.session["b"] = 1, 0
            unit.commit()
        with store.begin() as unit:
            unit.session["b"] = 2
            assert (unit.session["a"], unit.session.get("b"), unit.session.get("c", 3)) == (1, 2, 3)
            assert sorted(unit.session) == ["a", "b"]
            assert "c" not in unit.session
        assert store.data == {"a": 1, "b": 0}

    @pytest.mark.parametrize("look", ["pending_count", "pending_state", "relay_alive"])
    def test_whoever_looks_through_it_waits_for_who_changes_it(self, store: InMemoryStore, look: str) -> None:
        with store.changing():
            looking: Background[object] = Background(getattr(store, look))
            assert looking.stays(0.05)
        looking.result(10)

    def test_refused_deploy_leaves_nothing_of_it(self, store: InMemoryStore) -> None:
        """Neither of the types that come before the one it was refused for, nor of the queue."""
        window = dict.fromkeys(("shop.Sell", "shop.Buy"), timedelta(hours=1))
        former = [Identity(name, "field:number") for name in window]
        changed = [Identity(name, "field:name") for name in window]
        store.agree_identities("shop", "shop", former, {}, window)
        before = deepcopy(store.content)
        with pytest.raises(IdentityChanged, match=r"shop\.Buy"):
            store.agree_identities("shop", "moved", changed, {"shop.Sell": former[:1]}, window)
        assert store.content == before
