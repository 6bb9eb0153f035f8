"""Documents in CouchDB, by its HTTP interface."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote

from idemp.documents.documents import FIELD, Changed, Stored
from idemp.errors import ConfigurationError, HandlerError, needs
from idemp.forks import forget_in_children
from idemp.ports import Kind

with needs("couchdb"):
    import httpx

__all__ = ["CouchDocuments"]

CONFLICT: Final = 409
DESIGN: Final = "_design/idemp"
OWN: Final = (400, 413, 415)  # malformed, too large, wrong type: the fault of a document, in any state of the database
KEEPER: Final = (
    f"function (now, was) {{ if (was && was.{FIELD} && was.{FIELD}.handled && !now._deleted && !(now.{FIELD} && now.{FIELD}.handled))"
    f" {{ throw({{forbidden: 'keep the field {FIELD} as it is: it holds ids and outputs of messages'}}); }} }}"
)
"""Validation function of the database. It refuses every write that drops ids and outputs."""


class CouchDocuments:
    """A database of CouchDB with one copy of each document (`n=1`), because several copies may give different answers.

    Attachments are kept. Fields that begin with an underscore are reserved for CouchDB.

    Args:
        url: URL of the database, with user and password.
        timeout: Seconds to wait for an answer.

    Example:
        >>> CouchDocuments("http://carts:secret@localhost:5984/carts").timeout
        10.0
    """

    def __init__(self, url: str, timeout: float = 10.0) -> None:
        given = httpx.URL(url.rstrip("/"))
        self._auth = (given.username, given.password) if given.username else None
        self._url, self.timeout = str(given.copy_with(userinfo=b"")), timeout  # errors show it
        self._opened: httpx.Client | None = None
        self._inherited: list[object] = []
        forget_in_children(self)

    @property
    def _client(self) -> httpx.Client:
        """The client of this process, opened at first use."""
        if self._opened is None:
            self._opened = httpx.Client(timeout=self.timeout, auth=self._auth)
        return self._opened

    def forget(self) -> None:
        """Open connections of its own, in a forked child."""
        self._inherited.append(self._opened)
        self._opened = None

    def create(self) -> None:
        """Create the database, unless it exists, and its design document `idemp`, which makes it refuse writes that drop ids."""
        if self._client.head(self._url).status_code == httpx.codes.NOT_FOUND:
            self._client.put(self._url, params={"n": 1}).raise_for_status()
        design_document = self._keeper()
        if design_document.get("validate_doc_update") != KEEPER:
            design = {**design_document, "language": "javascript", "validate_doc_update": KEEPER}
            self._client.put(f"{self._url}/{DESIGN}", json=design).raise_for_status()

    def verify(self) -> None:
        """Check that there is one copy of each document, and that other programs cannot drop ids.

        Raises:
            ConfigurationError: The database or its design document is missing, or there are several copies.
        """
        answer = self._client.get(self._url)
        name = httpx.URL(self._url).path
        if answer.status_code in (httpx.codes.NOT_FOUND, httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise ConfigurationError(f"CouchDB has no database {name} for this user: CouchDocuments(url).create()")
        copies = answer.raise_for_status().json().get("cluster", {}).get("n", 1)
        if copies > 1:
            raise ConfigurationError(
                f"{name} has {copies} copies of each document, which may differ: make a database with n=1, and copy it"
            )
        if self._keeper().get("validate_doc_update") != KEEPER:
            raise ConfigurationError(
                f"{name} lets other programs drop the field {FIELD!r}, and has no design document that refuses it: "
                "CouchDocuments(url).create(), as an administrator"
            )

    def read(self, id: str) -> Stored:
        """Return a document."""
        answer = self._client.get(self._of(id))
        if answer.status_code == httpx.codes.NOT_FOUND and answer.json().get("reason") in ("missing", "deleted"):
            return Stored({}, None)  # else the database is gone
        document = answer.raise_for_status().json()
        kept = {name: value for name, value in document.items() if name == "_attachments"}
        return Stored({name: value for name, value in document.items() if not name.startswith("_")}, document["_rev"], kept)

    def write(self, id: str, data: Mapping[str, Any], stored: Stored) -> None:
        """Write a document if its revision is unchanged.

        Raises:
            Changed: The document has another revision.
            HandlerError: A field begins with an underscore.
        """
        if wrong := sorted(name for name in data if name.startswith("_")):
            raise HandlerError(f"the field {wrong[0]!r} is reserved for CouchDB")
        revision = {} if stored.revision is None else {"_rev": stored.revision}
        answer = self._client.put(self._of(id), json={**data, **stored.kept, **revision})
        if answer.status_code == CONFLICT:
            raise Changed(f"the document {id!r} has changed since it was opened")
        answer.raise_for_status()

    def classify(self, error: BaseException) -> Kind | None:
        """Return what an error of httpx means. A missing privilege or database counts as an outage, because it may come back."""
        if isinstance(error, httpx.HTTPStatusError):
            return Kind.OTHER if error.response.status_code in OWN else Kind.LOST
        return Kind.LOST if isinstance(error, httpx.TransportError) else None

    def close(self) -> None:
        """Close connections."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def _keeper(self) -> dict[str, Any]:
        answer = self._client.get(f"{self._url}/{DESIGN}")
        document: dict[str, Any] = {} if answer.status_code == httpx.codes.NOT_FOUND else answer.raise_for_status().json()
        return document

    def _of(self, id: str) -> str:
        return f"{self._url}/{quote(id, safe='')}"
