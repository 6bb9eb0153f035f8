"""Handlings that change one document outside the inbox: in CouchDB, DynamoDB, or any store with conditional writes.

    BEGIN; claim; open: read the document ─ handler ─ store outputs ─ write the document, if it is unchanged ─ COMMIT

The write decides. It stores the change, the message id and the outputs together, so all of them exist, or none. If the
process dies between the write and COMMIT, the redelivery finds the id in the document: the handler does not run again, and what the
document holds is stored in the inbox, which makes the message an ordinary duplicate. An id stays in its document until the inbox
is known to have it. After P. Helland, Life beyond Distributed Transactions (2007): activities inside the entity.
"""

from __future__ import annotations

import base64
import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol
from uuid import UUID

from sqlalchemy import select

from idemp.app import App
from idemp.context import AsyncContext, BaseContext
from idemp.errors import ConfigurationError, Conflict, HandlerError, IdempError, TransactionRolledBack
from idemp.identity import name_number
from idemp.initiation import INITIATION
from idemp.messages import Output, check_text
from idemp.ports import Claim, Handled, Kind
from idemp.process import Adapters
from idemp.sql.guard import Unit

__all__ = ["Changed", "Document", "DocumentDatabase", "DocumentStore", "Documents", "Stored", "Written"]

FIELD: Final = "idemp"
NEVER: Final = f"1-{0:032x}"
"""A revision that no document has."""


class Changed(IdempError):
    """The document has changed since it was read: nothing is committed, and the handler runs again.

    Example:
        >>> Changed.__mro__[1].__name__
        'IdempError'
    """


class Written(IdempError):
    """An earlier run has written the document, so the handler does not run again. Handlers must not catch this error.

    Example:
        >>> Written.__mro__[1].__name__
        'IdempError'
    """


@dataclass(frozen=True)
class Stored:
    """A document as it is stored.

    Attributes:
        data: Fields of the document; empty if it does not exist.
        revision: Identifier of this version; None if the document does not exist.
        kept: Fields that a write has to pass on unchanged.

    Example:
        >>> Stored({"items": 2}, "1-a").kept
        {}
    """

    data: dict[str, Any]
    revision: str | None
    kept: Mapping[str, Any] = field(default_factory=dict)


class DocumentDatabase(Protocol):
    """A document store whose reads are never stale, and whose writes are conditional.

    Example:
        >>> DocumentDatabase.__name__
        'DocumentDatabase'
    """

    def verify(self) -> None:
        """Check that the database gives these guarantees.

        Raises:
            ConfigurationError: It does not.
        """

    def read(self, id: str) -> Stored:
        """Return a document."""

    def write(self, id: str, data: Mapping[str, Any], stored: Stored) -> None:
        """Write a document if it still is the stored one. Data of other programs outside `data` is kept.

        Raises:
            Changed: The document has changed.
        """

    def classify(self, error: BaseException) -> Kind | None:
        """Return what an error means; None if it is not an error of this database."""


@dataclass
class Document:
    """The document that a handling changes.

    Attributes:
        data: Fields of the document, to be changed in place. Empty if it does not exist yet.

    Example:
        >>> Document("cart-7", {"items": []}, Stored({}, None)).data["items"]
        []
    """

    id: str
    data: dict[str, Any]
    stored: Stored = field(repr=False)
    applied: Sequence[Output] | None = field(default=None, repr=False)


class Documents:
    """The documents of an app. A handling changes one document, which is written with the message id inside.

    Args:
        app: The app. Its handlers are plain functions of types that are opted in, without batches.
        database: `CouchDocuments`, `DynamoDocuments`, or one of yours.

    Example:
        >>> from pydantic import BaseModel
        >>> from idemp import Context, Idempotent
        >>> class AddItem(BaseModel):
        ...     request_id: str
        ...     cart: str
        ...     sku: str
        >>> def handlers(app: App, carts: Documents) -> None:
        ...     @app.handler(AddItem, policy=Idempotent(key="request_id"))
        ...     def add_item(message: AddItem, ctx: Context) -> None:
        ...         cart = carts.open(ctx, f"cart-{message.cart}")
        ...         cart.data.setdefault("items", []).append(message.sku)
    """

    def __init__(self, app: App, database: DocumentDatabase) -> None:
        self.database, self._app = database, app
        self._opened: dict[int, Document] = {}  # by unit of work
        app.on_open.append(self._adapt)

    def open(self, ctx: BaseContext, name: str) -> Document:
        """Return the document that a handling changes. A handler calls this first.

        Args:
            ctx: Context of the handler.
            name: Id of the document, of 1 to 255 bytes. It must depend on the message only: another run has to find the same document.

        Raises:
            HandlerError: The handler has opened another document, is `async def`, or its type is not opted in.
            Conflict: Another message has changed the document under the id of this one.
            Written: An earlier run of this message has changed the document.
        """
        unit: Any = ctx._tx  # noqa: SLF001
        if isinstance(ctx, AsyncContext) or not isinstance(unit, Unit) or not unit.claims or unit.claims[0].type == INITIATION:
            raise HandlerError("a document is opened by plain handlers of types that are opted in")
        check_text(name, "the id of a document", HandlerError)
        if (opened := self._opened.get(id(unit))) is not None:
            if opened.id != name:
                raise HandlerError(f"this handling is about the document {opened.id!r}: read() others")
            return opened
        stored, (claim,) = self.database.read(name), unit.claims
        data = {key: copy.deepcopy(value) for key, value in stored.data.items() if key != FIELD}
        document = self._opened[id(unit)] = Document(name, data, stored)
        handled = _handled(stored)
        for candidate in (claim, claim.former):
            if candidate is not None and (entry := handled.get(_place(candidate))) is not None:
                _compare(candidate, claim, entry)
                document.applied = [_output(output) for output in entry["outputs"]]
                raise Written(f"an earlier run has changed the document {name!r}, and nothing is done twice")
        return document

    def read(self, id: str) -> dict[str, Any]:
        """Return a copy of a document's fields. Changes to the copy are not written.

        Args:
            id: Id of any document.
        """
        return {name: value for name, value in self.database.read(id).data.items() if name != FIELD}

    def opened(self, unit: Any) -> Document | None:
        """Return the document of a unit of work."""
        return self._opened.get(id(unit))

    def take(self, unit: Any) -> None:
        """Forget the document of a unit of work that ends."""
        self._opened.pop(id(unit), None)

    def write(self, unit: Any, store: Any, document: Document, handled: Handled) -> None:
        """Write the document with the message id and the outputs inside, if it is unchanged.

        Raises:
            Changed: The document has changed.
            HandlerError: The handler has written to idemp's field.
        """
        assert handled.claim is not None
        if FIELD in document.data:
            raise HandlerError(f"the field {FIELD!r} of the document {document.id!r} is idemp's")
        tables, dialect, connection = store.database.tables, store.database.dialect, unit.connection
        now, handler = float(connection.scalar(select(dialect.now))), self._app.handlers[handled.claim.type]
        assert handler.identity is not None
        # Ids go after their retention, or when the inbox has them: only until then the document alone knows them.
        kept = {place: entry for place, entry in _handled(document.stored).items() if entry["until"] > now}
        for place in list(kept):
            consumer, _, key = place.rpartition("/")
            if consumer == handled.consumer:  # other apps delete their ids themselves
                number = name_number("consumer", consumer)
                inbox = tables.inbox
                known = (inbox.c.consumer_id == number, inbox.c.message_key == dialect.key(UUID(key)))
                if connection.execute(select(inbox.c.type_id).where(*known)).first() is not None:
                    del kept[place]
        claim = handled.claim
        kept[_place(claim)] = {
            "type": claim.type,
            "original": claim.original,
            "fingerprint": claim.fingerprint.hex() if claim.fingerprint else None,
            "until": now + handler.identity.retention,
            "outputs": [_as_json(output) for output in handled.outputs],
        }
        self.database.write(document.id, {**document.data, FIELD: {"handled": kept}}, document.stored)

    def _adapt(self, adapters: Adapters) -> Adapters:
        if len(self._app.on_open) > 1:  # what other adapters write is lost if the process dies after the write of the document
            raise ConfigurationError(
                "documents share an app with no other documents, streams or second database: use another App"
            )
        for handler in self._app.handlers.values():
            if handler.batch > 1:
                raise ConfigurationError(f"{handler.type}: a handling is the write of one document: leave out batch")
        self.database.verify()
        return replace(adapters, store=DocumentStore(adapters.store, self))


class DocumentStore:
    """A store whose handlings may change a document each.

    Args:
        store: The store of claims and outputs.
        documents: The documents of the app.

    Example:
        >>> DocumentStore.__name__
        'DocumentStore'
    """

    def __init__(self, store: Any, documents: Documents) -> None:
        self._store, self._documents = store, documents
        self.lazy = False  # a document is in another database

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    @contextmanager
    def connect(self) -> Iterator[Any]:
        """Begin a unit of work. If an earlier run has written its document, store the outputs in it."""
        with self._store.connect() as unit:
            try:
                yield unit
            except Exception as error:  # the handler may have wrapped `Written` in another error
                document = self._documents.opened(unit)
                if document is None or document.applied is None:
                    raise
                self._settle(unit)
                if isinstance(error, Written):
                    raise
                raise Written(f"an earlier run has changed the document {document.id!r}") from error
            finally:
                self._documents.take(unit)

    def finish(self, tx: Any, handled: Sequence[Handled], *, lazy: bool = False) -> None:  # noqa: ARG002
        """Store outputs, write the document, commit."""
        document = self._documents.opened(tx)
        if document is not None:
            if document.applied is not None:  # the handler has caught `Written`
                raise Written(f"an earlier run has changed the document {document.id!r}, and nothing is done twice")
            if tx.error is not None:
                raise tx.error
            if not self._store.intact(tx):
                raise TransactionRolledBack("a rollback")
            if tx._session is not None:  # noqa: SLF001
                raise HandlerError(
                    f"a handling is the write of one document, here of {document.id!r}: leave ctx.session alone, nothing is committed"
                )
            (handling,) = handled
            self._store.store_on(tx.connection, handled, self._store.head_start)  # fails before the write, if at all
            self._documents.write(tx, self._store, document, handling)
            handled = [replace(handling, outputs=())]
        self._store.finish(tx, handled)

    def limited(self, tx: Any, seconds: float) -> AbstractContextManager[None]:
        """Limit the statements of the SQL transaction."""
        limits: AbstractContextManager[None] = self._store.limited(tx, seconds)
        return limits

    def ended(self, tx: Any) -> HandlerError | None:
        """Return the store's answer; None if the outputs of an earlier run are to be stored in this transaction."""
        document = self._documents.opened(tx)
        error: HandlerError | None = None if document is not None and document.applied is not None else self._store.ended(tx)
        return error

    def classify(self, error: BaseException) -> Kind | None:
        """Return the meaning of an error in either database. A changed document is a reason to run again."""
        if isinstance(error, Changed | Written):
            return Kind.TRANSIENT
        meaning = self._documents.database.classify(error)
        return self._store.classify(error) if meaning is None else meaning

    def probe(self) -> bool:
        """Return whether both databases take work. The probe of documents is a write that is always refused for its revision."""
        try:
            self._documents.database.write("idemp-probe", {}, Stored({}, NEVER))
        except Changed:
            pass
        except Exception:  # noqa: BLE001 - any error means that no work can be done
            return False
        return bool(self._store.probe())

    def _settle(self, unit: Any) -> None:
        document = self._documents.opened(unit)
        assert document is not None
        (claim,) = unit.claims
        self._store.finish(unit, [Handled(claim.consumer, claim, document.applied or ())])


def _handled(stored: Stored) -> dict[str, Any]:
    own = stored.data.get(FIELD, {})
    if not isinstance(own, dict) or not isinstance(own.get("handled", {}), dict):
        raise HandlerError(f"the field {FIELD!r} of the document is not idemp's: nothing is changed")
    return dict(own.get("handled", {}))


def _place(claim: Claim) -> str:
    return f"{claim.consumer}/{claim.key}"


def _compare(claim: Claim, present: Claim, entry: Mapping[str, Any]) -> None:
    payload = claim.fingerprint.hex() if claim.fingerprint else None
    other = entry["fingerprint"] and payload and entry["fingerprint"] != payload and not present.skips_conflicts
    if entry["original"] != claim.original or entry["type"] not in (claim.type, present.type) or other:
        raise Conflict("another message has changed the document under its id")


def _as_json(output: Output) -> dict[str, Any]:
    texts = {
        name: getattr(output, name) for name in ("id", "kind", "exchange", "routing_key", "properties", "mandatory", "delay")
    }
    return {**texts, "body": base64.b64encode(output.body).decode()}


def _output(stored: Mapping[str, Any]) -> Output:
    fields: dict[str, Any] = {**stored, "body": base64.b64decode(stored["body"])}
    return Output(**fields, sendable=fields["delay"] is None)
