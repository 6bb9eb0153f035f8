"""All faults of the table."""

from __future__ import annotations

from tests.mutants.in_archive import IN_ARCHIVE
from tests.mutants.in_batches import IN_BATCHES
from tests.mutants.in_brokers import IN_BROKERS
from tests.mutants.in_commands import IN_COMMANDS
from tests.mutants.in_costs import IN_COSTS
from tests.mutants.in_days import IN_DAYS
from tests.mutants.in_decisions import IN_DECISIONS
from tests.mutants.in_documents import IN_DOCUMENTS
from tests.mutants.in_identities import IN_IDENTITIES
from tests.mutants.in_kit import IN_KIT
from tests.mutants.in_ordering import IN_ORDERING
from tests.mutants.in_pipeline import IN_PIPELINE
from tests.mutants.in_pipeline_faults import IN_PIPELINE_FAULTS
from tests.mutants.in_prepared import IN_PREPARED
from tests.mutants.in_processes import IN_PROCESSES
from tests.mutants.in_protocol import IN_PROTOCOL
from tests.mutants.in_reconciliation import IN_RECONCILIATION
from tests.mutants.in_relaying import IN_RELAYING
from tests.mutants.in_sources import IN_SOURCES
from tests.mutants.in_storage import IN_STORAGE
from tests.mutants.in_streams import IN_STREAMS
from tests.mutants.in_twophase import IN_TWOPHASE

MUTANTS = (
    *IN_PROTOCOL,
    *IN_BATCHES,
    *IN_ORDERING,
    *IN_DECISIONS,
    *IN_IDENTITIES,
    *IN_STORAGE,
    *IN_DAYS,
    *IN_STREAMS,
    *IN_DOCUMENTS,
    *IN_PREPARED,
    *IN_BROKERS,
    *IN_COMMANDS,
    *IN_SOURCES,
    *IN_COSTS,
    *IN_PIPELINE,
    *IN_PIPELINE_FAULTS,
    *IN_ARCHIVE,
    *IN_RECONCILIATION,
    *IN_TWOPHASE,
    *IN_PROCESSES,
    *IN_RELAYING,
    *IN_KIT,
)
