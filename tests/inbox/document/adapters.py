"""Collections on the servers of the run, and a server that gives one answer to all that it is asked."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote

import httpx

from idemp.inbox.document.couchdb import CouchDocuments
from idemp.inbox.document.dynamodb import DynamoDocuments
from tests.servers.documents import session

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.servers.documents import Moto, PouchDB

SHORT = timedelta(seconds=0.5)
ATTACHED = bytes(range(256))
ATTRIBUTES: dict[str, Any] = {
    "tenant": {"S": "eu"},
    "expires": {"N": "1893456000"},
    "price": {"N": "0.12345678901234567890123456789012345678"},
    "tags": {"SS": ["a", "b"]},
    "sizes": {"NS": ["1", "2.5"]},
    "photo": {"B": ATTACHED},
    "nested": {"M": {"list": {"L": [{"NULL": True}, {"BOOL": False}]}}},
}
"""One of each of DynamoDB's types that JSON does not have, or would change."""


class Adapter(Protocol):
    """Opens a collection by its name: on a server of the run, or elsewhere."""

    @property
    def url(self) -> str: ...

    def open(self, name: str, *, at: str | None = None, **options: Any) -> Any: ...

    def put_beside(self, name: str, id: str) -> None:
        """Store something with a document that is no part of its body, as another program does."""

    def beside(self, name: str, id: str) -> object:
        """All of it."""


class Couch:
    def __init__(self, server: PouchDB) -> None:
        self.url = server.url

    def open(self, name: str, *, at: str | None = None, **options: Any) -> CouchDocuments:
        return CouchDocuments(f"{at or self.url}/{name}", **options)

    def put_beside(self, name: str, id: str) -> None:
        with httpx.Client(base_url=f"{self.url}/{name}") as client:
            for file, type_ in (("photo.jpg", "image/jpeg"), ("notes/a b.txt", "text/plain")):
                path = f"/{quote(id, safe='')}"
                revision = client.get(path).json()["_rev"]
                client.put(
                    f"{path}/{quote(file, safe='')}",
                    params={"rev": revision},
                    content=ATTACHED,
                    headers={"Content-Type": type_},
                ).raise_for_status()

    def beside(self, name: str, id: str) -> object:
        with httpx.Client(base_url=f"{self.url}/{name}") as client:
            path = f"/{quote(id, safe='')}"
            files = client.get(path).json().get("_attachments", {})
            answers = {file: client.get(f"{path}/{quote(file, safe='')}") for file in files}
            return {file: (answer.headers["Content-Type"], answer.content) for file, answer in answers.items()}


class Dynamo:
    def __init__(self, server: Moto) -> None:
        self.url = server.url

    def open(self, name: str, *, at: str | None = None, **options: Any) -> DynamoDocuments:
        return DynamoDocuments(name, session=session(), endpoint=at or self.url, **options)

    def put_beside(self, name: str, id: str) -> None:
        client = session().client("dynamodb", endpoint_url=self.url)
        names = {f"#{number}": attribute for number, attribute in enumerate(ATTRIBUTES)}
        values = {f":{number}": value for number, value in enumerate(ATTRIBUTES.values())}
        client.update_item(
            TableName=name,
            Key={"id": {"S": id}},
            UpdateExpression="SET " + ", ".join(f"#{number} = :{number}" for number in range(len(ATTRIBUTES))),
            ExpressionAttributeNames=names,
            ExpressionAttributeValues=values,
        )
        client.close()

    def beside(self, name: str, id: str) -> object:
        client = session().client("dynamodb", endpoint_url=self.url)
        item = client.get_item(TableName=name, Key={"id": {"S": id}}, ConsistentRead=True)["Item"]
        client.close()
        for attribute in ("id", "body", "revision"):
            del item[attribute]
        for numbers_or_texts in (item["tags"]["SS"], item["sizes"]["NS"]):
            numbers_or_texts.sort()
        return item


KINDS = {"couchdb": ("pouchdb", Couch), "dynamodb": ("moto", Dynamo)}


class Answering:
    """Answers everything alike, and counts what it is asked."""

    def __init__(self, status: int, body: bytes) -> None:
        self.asked = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                outer.asked += 1
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_PUT = do_POST = do_DELETE = answer  # noqa: N815 - the names that http.server looks for

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    @contextmanager
    def serving(self) -> Iterator[Answering]:
        thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            thread.join()
            self._server.server_close()
