"""Documents in memory keep the port's promises, and an inbox on them keeps those of the store port."""

from __future__ import annotations

import pytest

from idemp.inbox.document import InMemoryDocuments
from idemp.testing.document_conformance import DocumentInboxConformance, DocumentStoreConformance


class TestInMemoryDocuments(DocumentStoreConformance):
    @pytest.fixture
    def documents(self) -> InMemoryDocuments:
        return InMemoryDocuments(largest=4 << 20)


class TestDocumentInbox(DocumentInboxConformance):
    @pytest.fixture
    def documents(self) -> InMemoryDocuments:
        return InMemoryDocuments()
