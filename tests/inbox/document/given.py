"""A service on documents in memory, whose requests fail where a test says so."""

from __future__ import annotations

from idemp.inbox.document import DocumentInbox, InMemoryDocuments
from idemp.testing.clock import FakeClock
from idemp.testing.document_conformance import DocumentEffects
from idemp.testing.faulty import FaultyDocuments, Script
from tests.house import House


class DocumentHouse(House):
    """A `House` that counts the requests to its documents among the calls of its ports."""

    def __init__(self) -> None:
        clock, self.documents = FakeClock(), InMemoryDocuments()
        self.requests = FaultyDocuments(self.documents, Script())
        self.inbox = DocumentInbox(self.requests, clock=clock)
        super().__init__(self.inbox, DocumentEffects(self.documents), clock)
        self.requests.script = self.script

    def attempts(self) -> list[str]:
        """The attempts that are there."""
        return [found.id.rpartition("/")[2] for found in self.documents.scan("idemp/attempt/")[0]]
