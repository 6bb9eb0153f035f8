"""Documents in CouchDB and DynamoDB keep the port's promises, and inboxes on them keep those of the store port."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from idemp.inbox.document import Documents
from idemp.testing.document_conformance import DocumentInboxConformance, DocumentStoreConformance
from tests.inbox.document.adapters import KINDS, Adapter


@pytest.fixture(scope="module", params=KINDS)
def adapter(request: pytest.FixtureRequest) -> Adapter:
    server, kind = KINDS[request.param]
    made: Adapter = kind(request.getfixturevalue(server))
    return made


@pytest.fixture(scope="module")
def shared(adapter: Adapter) -> Iterator[Documents]:
    with closing(adapter.open("conformance")) as opened:
        opened.create()
        yield opened


@pytest.fixture(scope="module")
def another(adapter: Adapter, shared: Documents) -> Iterator[Documents]:
    """Another instance on the same collection."""
    with closing(adapter.open("conformance")) as opened:
        yield opened


class TestDocuments(DocumentStoreConformance):
    @pytest.fixture
    def documents(self, shared: Documents, another: Documents) -> Documents:
        self.another = another
        return shared

    def reopen(self, documents: Documents) -> Documents:
        return self.another


class TestInbox(DocumentInboxConformance):
    largest_output = 256 * 1024  # an item of DynamoDB has 400 KiB, and the output is in it as base64

    @pytest.fixture
    def documents(self, adapter: Adapter, unique_name: str) -> Iterator[Documents]:
        with closing(adapter.open(unique_name)) as opened:
            opened.create()
            yield opened
