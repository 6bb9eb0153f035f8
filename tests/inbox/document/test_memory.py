"""Documents in memory keep the port's promises, and an inbox on them keeps those of the store port."""

from __future__ import annotations

from typing import Any

import pytest

from idemp.inbox.document import InMemoryDocuments
from idemp.testing import DocumentInboxConformance, DocumentStoreConformance


class Beside:
    """Something beside the body, past the port."""

    def put_beside(self, documents: Any, id: str) -> None:
        documents.beside[id] = {"photo.jpg": b"\xff\xd8"}

    def beside(self, documents: Any, id: str) -> object:
        return documents.beside.get(id)


class TestInMemoryDocuments(Beside, DocumentStoreConformance):
    @pytest.fixture
    def documents(self) -> InMemoryDocuments:
        return InMemoryDocuments(largest=4 << 20)


class TestDocumentInbox(Beside, DocumentInboxConformance):
    @pytest.fixture
    def documents(self) -> InMemoryDocuments:
        return InMemoryDocuments()
