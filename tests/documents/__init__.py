"""Carts as documents of DynamoDB (moto) or CouchDB (PouchDB Server)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import boto3
from pydantic import BaseModel

from idemp import App, Context, Idempotent, Retry, Settings
from idemp.documents import DocumentDatabase, Documents
from idemp.documents.couchdb import CouchDocuments
from idemp.documents.dynamodb import DynamoDocuments
from tests.servers.moto import Moto
from tests.servers.pouchdb import Pouchdb

QUEUE, SINK = "storm", "storm.sink"
POLICY = Idempotent(key="id", retry=Retry(attempts=1_000, delays=["0s"], jitter=0))
SERVERS: dict[str, Any] = {"couchdb": Pouchdb, "dynamodb": Moto}
OPENED: list[Any] = []


class Add(BaseModel):
    __message_type__ = "carts.Add"
    id: int
    cart: str


class Added(BaseModel):
    __message_type__ = "carts.Added"
    id: int
    items: int


@contextmanager
def document_server(kind: str, folder: Path) -> Iterator[str]:
    """Start a server, and make a database in it; yield what `open_database` takes."""
    with SERVERS[kind](folder / kind) as server:
        place = f"{kind} {server.url} carts-{uuid4().hex}"
        open_database(place).create()
        try:
            yield place
        finally:
            close_databases()


def open_database(place: str) -> Any:
    kind, url, name = place.split()
    if kind == "dynamodb":
        return DynamoDocuments(name, dynamodb(url))
    database = CouchDocuments(f"{url}/{name}")
    OPENED.append(database)
    return database


def dynamodb(url: str) -> Any:
    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "eu-central-1"}
    client = boto3.client("dynamodb", endpoint_url=url, **keys)
    OPENED.append(client)
    return client


def close_databases() -> None:
    while OPENED:
        OPENED.pop().close()


def shop(database: DocumentDatabase, settings: Settings | None = None) -> tuple[App, Documents]:
    app = App(QUEUE, policy=POLICY, settings=settings)
    documents = Documents(app, database)

    @app.handler(Add)
    def add(message: Add, ctx: Context) -> Added:
        cart = documents.open(ctx, f"cart {message.cart}")
        cart.data.setdefault("items", []).append(message.id)
        return Added(id=message.id, items=len(cart.data["items"]))

    return app, documents
