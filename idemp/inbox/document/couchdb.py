"""CouchDB, over HTTP. Needs the extra: `pip install 'idemp[couchdb]'`."""

from __future__ import annotations

import json
from datetime import timedelta
from functools import partial
from secrets import token_hex
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, unquote, urlsplit

from idemp.errors import (
    ConfigurationError,
    GuaranteeError,
    HandlerError,
    SchemaError,
    StoreError,
    StoreUnavailable,
    TransientStoreError,
    UnaddressableMessage,
)
from idemp.forking import ForkAware
from idemp.inbox.document.port import OWN, Document, DocumentRefused, DocumentTooLarge, RevisionConflict
from idemp.inbox.document.servertime import ServerClock
from idemp.inbox.document.wire import as_json, lost, usable

try:
    import httpx
except ModuleNotFoundError as error:
    raise ConfigurationError(f"CouchDocuments needs {error.name}.", fix="pip install 'idemp[couchdb]'") from error

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LARGEST: Final = 8_000_000
"""Bytes of one document: `max_document_size` of CouchDB 3, unless its operator has set another."""
CONNECT_SECONDS: Final = 3.0
"""How long connecting may take."""
_PROBE: Final = f"{OWN}probe"
_GONE: Final = frozenset({"missing", "deleted"})
_OK: Final = frozenset({200, 201})
_CONFLICT: Final = frozenset({409, 412})
"""412: the version that is there does not have an attachment that the write names."""
_MAKE_IT: Final = "Make it: `CouchDocuments(url).create()`."


_parents_clients: Final[list[httpx.Client]] = []  # of a child: kept, so that no destructor closes them


class CouchDocuments(ForkAware):
    """A CouchDB database as `Documents`. Each request is sent once; nothing is tried again.

    It asks for a database that keeps each document on one node (`n=1`): with copies, CouchDB answers reads and writes from
    any of them, and two writers may both succeed. Replicate *from* it as you like, and never into it. Delete no state
    document, and let nobody purge one (`_purge`): revisions would begin anew.

    Ids that begin with an underscore, and fields of a document that do, are CouchDB's own. Attachments of a document stay as
    they are: each write names those of the version that it replaces.

    Args:
        url: of the database, user and password included: `https://me:secret@couch.example.com/carts`.
        timeout: how long an answer may take; connecting takes 3 s at most.
        largest: bytes of one document, where the server's `max_document_size` is another.
        connections: how many are kept at most; one per thread that works is enough.

    Raises:
        ConfigurationError: the URL names no database.

    Example:
        >>> CouchDocuments("https://me:secret@couch.example.com/carts")
        CouchDocuments('https://couch.example.com/carts')
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: timedelta = timedelta(seconds=10),
        largest: int = LARGEST,
        connections: int = 50,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname or not parts.path.strip("/"):
            raise ConfigurationError(
                "The URL of a CouchDB database has a scheme, a host and the database's name.",
                fix="Such as https://user:password@couch.example.com/carts.",
            )
        # User and password apart from the URL, which logs and errors of httpx show.
        user, password = unquote(parts.username or ""), unquote(parts.password or "")
        self._shown = parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl().rstrip("/")
        self._make_client = partial(
            httpx.Client,
            auth=(user, password) if user else None,
            headers={"Accept": "application/json"},
            timeout=httpx.Timeout(timeout.total_seconds(), connect=CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
        )
        self._client = self._make_client()
        self.largest = largest
        self.clock = ServerClock()
        self.track()

    def after_fork_in_child(self) -> None:
        """Take other connections than the parent."""
        _parents_clients.append(self._client)
        self._client = self._make_client()

    def __repr__(self) -> str:
        return f"CouchDocuments({self._shown!r})"

    def read(self, id: str) -> Document | None:
        """The latest committed version; `None` if there is none."""
        answer = self._ask("GET", _path(id))
        return None if answer.status_code == httpx.codes.NOT_FOUND else _document(self._told(answer))

    def write(self, id: str, body: Mapping[str, Any], expected: str | None) -> str:
        """Write the whole document if `expected` is its present revision, or with `None` if it does not exist."""
        if (reserved := next((name for name in body if name.startswith("_")), None)) is not None:
            raise HandlerError(
                f"The document {id!r} has a field {reserved!r}: such are CouchDB's own.",
                fix="Rename the field: names that begin with an underscore are taken.",
            )
        former = self._with_attachments(id, expected) if expected is not None else _Revision()
        # CouchDB deletes the attachments that a new version of a document does not name.
        content = as_json(
            id, {**body, "_attachments": former.attachments} if former.attachments else body, self.largest
        )
        answer = self._ask("PUT", _path(id), writes=True, content=content, params={"rev": former} if former else {})
        if answer.status_code == httpx.codes.REQUEST_ENTITY_TOO_LARGE:
            raise DocumentTooLarge.of(id, len(content.encode()), self.largest)
        return _Revision.of(self._told(answer, writes=True)["rev"], former.attachments)

    def delete(self, id: str, expected: str) -> None:
        """Delete the document if `expected` is its present revision."""
        answer = self._ask("DELETE", _path(id), writes=True, params={"rev": expected})
        if answer.status_code == httpx.codes.NOT_FOUND:
            raise RevisionConflict(f"{self._shown}: the document {id!r} does not exist.")
        self._told(answer, writes=True)

    def scan(self, prefix: str, cursor: str | None = None, limit: int = 500) -> tuple[Sequence[Document], str | None]:
        """Up to `limit` documents whose ids begin with `prefix`, in the order of their ids."""
        within = {"startkey": json.dumps(cursor or prefix), "limit": str(limit + 1), "include_docs": "true"}
        if prefix and prefix[-1] < "~":
            # Only saves what is left out below: an order of characters, ASCII aside, is each server's own affair.
            within |= {"endkey": json.dumps(prefix[:-1] + chr(ord(prefix[-1]) + 1)), "inclusive_end": "false"}
        rows = self._told(self._ask("GET", "/_all_docs", params=within))["rows"]
        rows = [row for row in rows if row["id"].startswith(prefix)]
        after = rows[limit]["id"] if len(rows) > limit else None
        # A document that is deleted meanwhile has a row without it; design documents are none of ours.
        return [
            _document(row["doc"]) for row in rows[:limit] if row.get("doc") and not row["id"].startswith("_")
        ], after

    def verify(self) -> None:
        """Look whether the database is there, keeps one copy of each document, and reads what it wrote.

        Raises:
            SchemaError: there is no such database.
            GuaranteeError: it keeps several copies, is partitioned, or a read did not see the write before it.
            StoreUnavailable: it can't be reached.
        """
        answer = self._ask("GET", "")
        if answer.status_code == httpx.codes.NOT_FOUND:
            raise SchemaError(f"There is no database {self._shown}.", fix=_MAKE_IT)
        told = self._told(answer)
        if (copies := told.get("cluster", {}).get("n", 1)) > 1:
            raise GuaranteeError(
                f"{self._shown} keeps {copies} copies of each document: two writers may both succeed, and reads be stale.",
                fix="Make the database with one copy (`PUT /carts?n=1`), or use another store.",
            )
        if told.get("props", {}).get("partitioned"):
            raise GuaranteeError(f"{self._shown} is partitioned.", fix="Make it without `partitioned=true`.")
        self._read_what_is_written()

    def create(self) -> None:
        """Make the database, with one copy of each document, if it does not exist."""
        answer = self._ask("PUT", "", writes=True, params={"n": "1"})
        if answer.status_code != httpx.codes.PRECONDITION_FAILED:
            self._told(answer, writes=True)

    def close(self) -> None:
        """Give connections back."""
        self._client.close()

    def _with_attachments(self, id: str, expected: str) -> _Revision:
        """A revision that knows its version's attachments; one that was kept as text has forgotten them."""
        if isinstance(expected, _Revision):
            return expected
        found = self.read(id)
        if found is None or found.revision != expected or not isinstance(found.revision, _Revision):
            raise RevisionConflict(f"{self._shown}: another revision is there.")
        return found.revision

    def _read_what_is_written(self) -> None:
        found = self.read(_PROBE)
        mark = token_hex(8)
        try:
            revision = self.write(_PROBE, {"mark": mark}, found.revision if found else None)
        except RevisionConflict:
            return  # another process probes
        found = self.read(_PROBE)
        # Another process may have come after this one: then the revision is a later one.
        if found is None or (found.revision != revision and _generation(found.revision) <= _generation(revision)):
            raise GuaranteeError(
                f"{self._shown}: a read did not see the write before it.",
                fix="Ask one CouchDB itself, not one of several behind a balancer.",
            )

    def _ask(self, method: str, path: str, *, writes: bool = False, **options: Any) -> httpx.Response:
        """One request; "not found" is an answer only where it is about a document."""
        if writes and "content" in options:
            options["headers"] = {"Content-Type": "application/json"}
        try:
            answer = self._client.request(method, self._shown + path, **options)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            raise StoreUnavailable(f"{self._shown} can't be reached: {_why(error)}.") from error
        except httpx.RequestError as error:
            raise lost(self._shown, _why(error), writes=writes) from error
        self.clock.hear(answer.headers.get("date"))
        if path and answer.status_code == httpx.codes.NOT_FOUND and _reason(answer)[1] not in _GONE:
            raise StoreUnavailable(f"There is no database {self._shown}.", fix=_MAKE_IT)
        return answer

    def _told(self, answer: httpx.Response, *, writes: bool = False) -> dict[str, Any]:
        """What an answer says, if it says yes."""
        status = answer.status_code
        if status in _OK:
            told = _json(answer)
            if isinstance(told, dict):
                return told
            raise lost(self._shown, "the answer is no JSON", writes=writes)
        said = " ".join(part for part in (str(status), *_reason(answer)) if part)
        if status in _CONFLICT:
            raise RevisionConflict(f"{self._shown}: another revision is there.")
        if status == httpx.codes.TOO_MANY_REQUESTS:
            raise TransientStoreError(f"{self._shown} is too busy ({said}); nothing was changed.")
        # 202: written, on fewer nodes than there should be. Of a 500 nobody knows how far it came.
        if status == httpx.codes.ACCEPTED or status >= httpx.codes.INTERNAL_SERVER_ERROR:
            raise lost(self._shown, f"it answered {said}", writes=writes)
        # What may be read and not written is refused for its own sake, by a `validate_doc_update` of the database's.
        if status == httpx.codes.UNAUTHORIZED or (status == httpx.codes.FORBIDDEN and not writes):
            raise StoreUnavailable(
                f"{self._shown} lets this user not in ({said}).", fix="Grant it (docs/how-to/least-privilege.md)."
            )
        refused = DocumentRefused if status == httpx.codes.FORBIDDEN else StoreError
        raise refused(f"{self._shown} refuses: {said}; nothing was changed.")


def _path(id: str) -> str:
    """A document's path below its database.

    Example:
        >>> _path("idemp/attempt")
        '/idemp%2Fattempt'
    """
    # CouchDB's own begin with an underscore (`_all_docs`, `_security`); dots would be taken for a path's own.
    if usable(id).startswith("_") or id in {".", ".."}:
        raise UnaddressableMessage(
            f"{id[:64]!r} can't be the id of a CouchDB document.", fix="Put something before it."
        )
    return "/" + quote(id, safe="")


class _Revision(str):  # noqa: SLOT000 - it has an attribute
    """A revision, with the stubs of the attachments that its version of the document has.

    Example:
        >>> _Revision.of("1-a", {"photo.jpg": {"stub": True}}) == "1-a"
        True
    """

    attachments: Mapping[str, Any] = MappingProxyType({})

    @classmethod
    def of(cls, revision: str, attachments: Mapping[str, Any]) -> _Revision:
        """The revision of a version with these attachments."""
        made = cls(revision)
        made.attachments = attachments
        return made


def _document(found: dict[str, Any]) -> Document:
    body = {name: value for name, value in found.items() if not name.startswith("_")}
    return Document(found["_id"], body, _Revision.of(found["_rev"], found.get("_attachments", {})))


def _generation(revision: str) -> int:
    """How many versions the document had, by its revision: `3-8f…` is the third."""
    return int(revision.partition("-")[0])


def _reason(answer: httpx.Response) -> tuple[str, str]:
    """What CouchDB says of an error: its kind, and a sentence."""
    told = _json(answer)
    if not isinstance(told, dict):
        return "", ""
    return str(told.get("error", ""))[:100], str(told.get("reason", ""))[:200]


def _json(answer: httpx.Response) -> Any:
    try:
        return answer.json()
    except ValueError:
        return None


def _why(error: Exception) -> str:
    return f"{type(error).__name__} {error}".strip()
