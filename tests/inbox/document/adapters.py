"""Collections on the servers of the run, and a server that gives one answer to all that it is asked."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Protocol

from idemp.inbox.document.couchdb import CouchDocuments
from idemp.inbox.document.dynamodb import DynamoDocuments
from tests.servers.documents import session

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.servers.documents import Moto, PouchDB

SHORT = timedelta(seconds=0.5)


class Adapter(Protocol):
    """Opens a collection by its name: on a server of the run, or elsewhere."""

    @property
    def url(self) -> str: ...

    def open(self, name: str, *, at: str | None = None, **options: Any) -> Any: ...


class Couch:
    def __init__(self, server: PouchDB) -> None:
        self.url = server.url

    def open(self, name: str, *, at: str | None = None, **options: Any) -> CouchDocuments:
        return CouchDocuments(f"{at or self.url}/{name}", **options)


class Dynamo:
    def __init__(self, server: Moto) -> None:
        self.url = server.url

    def open(self, name: str, *, at: str | None = None, **options: Any) -> DynamoDocuments:
        return DynamoDocuments(name, session=session(), endpoint=at or self.url, **options)


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
