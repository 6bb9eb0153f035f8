"""All faults of the table."""

from __future__ import annotations

from tests.mutants.in_batches import IN_BATCHES
from tests.mutants.in_brokers import IN_BROKERS
from tests.mutants.in_decisions import IN_DECISIONS
from tests.mutants.in_protocol import IN_PROTOCOL
from tests.mutants.in_storage import IN_STORAGE

MUTANTS = (*IN_PROTOCOL, *IN_BATCHES, *IN_DECISIONS, *IN_STORAGE, *IN_BROKERS)
