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


class Beside:
    """Something beside the body, past the port."""

    collection: str

    @pytest.fixture(autouse=True)
    def past_the_port(self, adapter: Adapter) -> None:
        self.adapter = adapter

    def put_beside(self, documents: Documents, id: str) -> None:
        self.adapter.put_beside(self.collection, id)

    def beside(self, documents: Documents, id: str) -> object:
        return self.adapter.beside(self.collection, id)


class TestDocuments(Beside, DocumentStoreConformance):
    collection = "conformance"

    @pytest.fixture
    def documents(self, shared: Documents, another: Documents) -> Documents:
        self.another = another
        return shared

    def reopen(self, documents: Documents) -> Documents:
        return self.another


class TestInbox(Beside, DocumentInboxConformance):
    largest_output = 256 * 1024  # an item of DynamoDB has 400 KiB, and the output is in it as base64

    @pytest.fixture
    def documents(self, adapter: Adapter, unique_name: str) -> Iterator[Documents]:
        self.collection = unique_name
        with closing(adapter.open(unique_name)) as opened:
            opened.create()
            yield opened
