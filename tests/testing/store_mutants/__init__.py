"""Inbox stores with one fault each, and the case of `StoreConformance` that has to notice it."""

from __future__ import annotations

from tests.testing.store_mutants import batches, claims, effects, instances, records, upkeep
from tests.testing.store_mutants.sound import TABLE, Store

__all__ = ["TABLE", "Store", "batches", "claims", "effects", "instances", "records", "upkeep"]
