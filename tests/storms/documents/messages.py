"""What the storm sends, and what comes of it."""

from __future__ import annotations

import os
from uuid import UUID

from pydantic import BaseModel

from idemp.inbox.document import DocumentInbox, InMemoryDocuments
from idemp.inbox.document.couchdb import CouchDocuments
from idemp.inbox.document.dynamodb import DynamoDocuments
from tests.servers.documents import session

CONSUMER = "accounts"
AUDIT_QUEUE = "accounts.audit"
WHERE = "STORM_DOCUMENTS"
"""The environment variable that tells a worker which server to use: `couchdb http://…`."""


class Charge(BaseModel):
    """The input."""

    __message_type__ = "storm.Charge"
    order_id: UUID
    account: str
    cents: int


class Invoice(BaseModel):
    """An output, sent to one queue; `run` is another one for each run of the handler."""

    __message_type__ = "storm.Invoice"
    order_id: UUID
    run: str


class Charged(BaseModel):
    """An output, published to whoever listens."""

    __message_type__ = "storm.Charged"
    order_id: UUID
    run: str


def collection(where: str, name: str) -> CouchDocuments | DynamoDocuments:
    """A collection on the storm's server."""
    kind, _, url = where.partition(" ")
    if kind == "couchdb":
        return CouchDocuments(f"{url}/{name}")
    return DynamoDocuments(name, session=session(), endpoint=url)


def inbox(where: str | None = None) -> DocumentInbox:
    """The inbox on the storm's server, with the accounts apart from idemp's own documents; outside of a storm in memory."""
    if (where := where or os.environ.get(WHERE)) is None:
        return DocumentInbox(InMemoryDocuments())
    return DocumentInbox(collection(where, "accounts"), collection(where, "idemp"))
