"""Claims and their outputs, as an operator reads and changes them. Ids are looked up by the primary key of the inbox."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Final
from uuid import UUID

from sqlalchemy import ColumnElement, Connection, Delete, Row, Select, Update, and_, delete, func, select, update

from idemp.cloudevents import SOURCE
from idemp.envelopes import read_delivery
from idemp.errors import Unreadable
from idemp.identity import event_id, key_scope, message_key, name_number, one_case
from idemp.messages import RESULT, Delivery, read_properties
from idemp.sql.engine import Database
from idemp.sql.records.failures import FailedMessage, read_failed
from idemp.sql.store import ERASED, is_erased

__all__ = ["ClaimAccount", "ClaimRecord", "InboxRecords", "OutputRecord", "readings", "shown_id"]

BATCH: Final = 500  # rows of one statement; databases limit its parameters
TYPED: Final = ("s:", "i:", "b:", "d:")  # text, integer, boolean, digest


@dataclass(frozen=True)
class ClaimRecord:
    """A claim: one message that a consumer has handled.

    Attributes:
        original_id: The id with its JSON type, as `identity.Key` reads it.
        message_key: Key under which the id is claimed.
        fingerprint: Digest of the payload in hexadecimal; None if payloads are not compared.
        outputs: Number of its outputs.
        pending: Number of them that the broker has not confirmed.

    Example:
        >>> ClaimRecord("billing", "shop.Pay", "s:7", "db6aa3b9-…", None, 0.0, "worker-1", 1, 0).id
        '7'
    """

    consumer: str
    type: str
    original_id: str
    message_key: str
    fingerprint: str | None
    claimed_at: float
    worker: str
    outputs: int
    pending: int

    @property
    def id(self) -> str:
        """Id as a command takes it: text without its JSON type where that is clear, the key where it cannot be shown."""
        return shown_id(self.original_id, self.message_key)

    @property
    def typed(self) -> str:
        """Id with its JSON type."""
        return self.original_id if self.original_id.isprintable() else self.message_key

    @property
    def message_id(self) -> str | None:
        """Id of the envelope if the claim is by that."""
        text = self.original_id[2:]
        if self.message_key == str(message_key(self.original_id, text, None)):
            return text
        event = _event(self.original_id)
        return event[1] if event and self.message_key == str(event_id(*event)[1]) else None

    def as_dict(self) -> dict[str, Any]:
        """Return all fields."""
        return {"id": self.id, **asdict(self)}


@dataclass(frozen=True)
class OutputRecord:
    """An output of a claim.

    Attributes:
        state: `confirmed`, `pending`, `delayed`, `quarantined` or `erased`; `kept` for a result, which duplicates get.
        due_at: When a relay sends it; None if no relay will.
        refusals: Refusals in a row that were its own fault.
        reason: Last reason why the broker did not take it.

    Example:
        >>> OutputRecord(0, "…", "send", "", "stock", "shop.Reserve", None, "confirmed", None, 0, 0, None, {}, "{}").place
        'send to stock'
    """

    ordinal: int
    output_id: str
    kind: str
    exchange: str
    routing_key: str
    type: str | None
    delay: float | None
    state: str
    due_at: float | None
    attempts: int
    refusals: int
    reason: str | None
    properties: dict[str, Any]
    body: str

    @property
    def place(self) -> str:
        """Kind and destination."""
        if self.kind == RESULT:
            return "result for duplicates"
        return f"{self.kind} to {self.routing_key}{f' in {self.exchange}' if self.exchange else ''}"

    @property
    def waits(self) -> bool:
        """True if the broker has yet to confirm it."""
        return self.state in ("pending", "delayed", "quarantined")


@dataclass(frozen=True)
class ClaimAccount:
    """A claim with its cause and its effects.

    Attributes:
        cause: Claim whose output the message was; None if another producer sent it, or the claim is not by its envelope id.
        effects: Claims of its outputs at consumers that claim by envelope id.
        failures: Retries and dead letters of its outputs.

    Example:
        >>> claim = ClaimRecord("billing", "shop.Pay", "s:7", "db6aa3b9-…", None, 0.0, "worker-1", 0, 0)
        >>> ClaimAccount(claim, [], None, [], []).as_dict()["caused_by"] is None
        True
    """

    claim: ClaimRecord
    outputs: list[OutputRecord]
    cause: ClaimRecord | None
    effects: list[ClaimRecord]
    failures: list[FailedMessage]

    def as_dict(self) -> dict[str, Any]:
        """Return all fields."""
        return {
            **self.claim.as_dict(),
            "outputs": [asdict(output) for output in self.outputs],
            "caused_by": self.cause and self.cause.as_dict(),
            "caused": [effect.as_dict() for effect in self.effects],
            "caused_failures": [failed.summary() for failed in self.failures],
        }


def shown_id(original: str, key: str) -> str:
    """Return an original id as commands take it: text without its JSON type if that is clear, the key if it cannot be shown.

    Example:
        >>> shown_id("s:a", "db6aa3b9-…"), shown_id("i:7", "db6aa3b9-…"), shown_id("s:i:7", "db6aa3b9-…")
        ('a', 'i:7', 's:i:7')
    """
    text = original.removeprefix("s:")
    shown = original if not text.strip() or text.startswith((*TYPED, "-", "[")) else text
    return shown if shown.isprintable() else key


def readings(id: str) -> list[list[str]]:
    """Return the original ids that the text of an operator may mean; a later list counts if the former has no claim.

    Example:
        >>> readings("7"), readings("i:7")
        ([['s:7', 'i:7', 'b:7']], [['i:7'], ['s:i:7', 'i:i:7', 'b:i:7']])
        >>> readings('["i:7","s:a"]')[0]
        ['["i:7", "s:a"]']
    """
    id = one_case(id)
    bare = [f"s:{id}", f"i:{id}", f"b:{id}"]
    if id.startswith(TYPED):
        return [[id], bare]
    if id.startswith("["):
        try:
            return [[json.dumps(json.loads(id), ensure_ascii=False)], bare]
        except (ValueError, RecursionError):
            pass
    return [bare]


class InboxRecords:
    """Claims of one database.

    Example:
        >>> InboxRecords(Database("sqlite:///shop.db")).database.tables.inbox.name
        'idemp_inbox'
    """

    def __init__(self, database: Database) -> None:
        self.database = database
        self._fresh = {"due_at": database.dialect.now, "attempts": 0, "refusals": 0, "quarantined_at": None, "reason": None}

    def names(self, kind: str) -> dict[str, int]:
        """Return the numbers of all names of a kind: `consumer` or `type`."""
        with self.database.engine.connect() as connection:
            return self._names(connection, kind)

    def newest(
        self,
        *,
        consumer: str | None = None,
        type: str | None = None,
        pending: bool = False,
        quarantined: bool = False,
        limit: int = 100,
    ) -> list[ClaimRecord]:
        """Return claims, newest first.

        Args:
            consumer: Only claims of this consumer.
            type: Only claims of messages of this type.
            pending: Only claims with outputs that the broker has not confirmed.
            quarantined: Only claims with outputs in quarantine.
            limit: Claims at most.
        """
        inbox, waiting = self.database.tables.inbox, self.database.tables.pending
        query = self._query()
        if consumer is not None:
            query = query.where(inbox.c.consumer_id == self.names("consumer").get(consumer))
        if type is not None:
            query = query.where(inbox.c.type_id == self.names("type").get(type))
        if pending or quarantined:
            owners = select(waiting.c.consumer_id, waiting.c.message_key).distinct()
            some = (owners.where(waiting.c.quarantined_at.is_not(None)) if quarantined else owners).subquery()
            same = (some.c.consumer_id == inbox.c.consumer_id, some.c.message_key == inbox.c.message_key)
            query = query.join(some, and_(*same))
            parts = [query]
        else:  # the newest ones of each type are found by the index
            identity = self.database.tables.identity
            with self.database.engine.connect() as connection:
                known = connection.execute(select(identity.c.consumer, identity.c.type)).all()
            numbers = [(name_number("consumer", each.consumer), name_number("type", each.type)) for each in known]
            parts = [query.where(inbox.c.consumer_id == number, inbox.c.type_id == type_) for number, type_ in numbers]
        found: list[ClaimRecord] = []
        with self.database.engine.connect() as connection:
            for part in parts:
                found += self._records(connection, part.order_by(inbox.c.claimed_at.desc()).limit(limit))
        return sorted(found, key=lambda claim: (-claim.claimed_at, claim.original_id))[:limit]

    def find(self, id: str) -> list[ClaimRecord]:
        """Return the claims that a text means: an original id, with or without its JSON type, a key, or an output's id."""
        value = _uuid(id)
        with self.database.engine.connect() as connection:
            scopes = self._scopes(connection)
            for originals in readings(id):
                keys = {key for original in originals for key in _keys(original, scopes)}
                if found := self._claims(connection, keys | ({value} if value else set())):
                    return found
            return self._source(connection, value)

    def outputs(self, claim: ClaimRecord) -> list[OutputRecord]:
        """Return the outputs of a claim in their order."""
        with self.database.engine.connect() as connection:
            return self._outputs(connection, claim)

    def explain(self, id: str) -> tuple[list[ClaimAccount], list[FailedMessage]]:
        """Return what is known of a message: accounts of its claims, and its own retries and dead letters.

        Reads all retries and dead letters.
        """
        named = {id, id.removeprefix("s:")}
        originals = {original for reading in readings(id) for original in reading}
        claims = self.find(id)
        accounts = []
        with self.database.engine.connect() as connection:
            for claim in claims:
                outputs = self._outputs(connection, claim)
                cause = self._source(connection, _uuid(claim.message_id or ""))
                effects = self._claims(connection, {key for each in outputs for key in _sent_keys(each)})
                accounts.append(ClaimAccount(claim, outputs, cause[0] if cause else None, effects, []))
                named |= {claim.message_id} if claim.message_id else set()
                originals.add(claim.original_id)
        own, senders = [], {output.output_id: account for account in accounts for output in account.outputs}
        for failed in self._failures():
            if failed.message_id in named or originals.intersection(failed.original_ids):
                own.append(failed)
            elif failed.message_id in senders:
                senders[failed.message_id].failures.append(failed)
        return accounts, own

    def redispatch(self, claim: ClaimRecord, *, confirmed: bool = False) -> int:
        """Make the outputs of a claim due that are pending or in quarantine; return how many. A delay that is not over stays.

        Args:
            claim: The claim.
            confirmed: Also send again what the broker has confirmed.
        """
        output, pending, dialect = self.database.tables.output, self.database.tables.pending, self.database.dialect
        owner = {"consumer_id": self.names("consumer")[claim.consumer], "message_key": self._key(claim)}
        with self.database.short() as connection:
            kept = select(output.c.output_id).where(self._owned(claim), ~is_erased(output))
            ids = set(connection.scalars(dialect.lock(kept)).all())  # nothing is erased or purged meanwhile
            found = [each for each in self._outputs(connection, claim) if each.output_id in ids]
            due = [each.output_id for each in found if each.state in ("pending", "quarantined")]
            changed = self._change(connection, update(pending).values(**self._fresh), due)
            again = [each for each in found if confirmed and each.state == "confirmed"]
            if again:
                rows = [{**owner, "ordinal": each.ordinal, "output_id": each.output_id} for each in again]
                connection.execute(dialect.insert_new(pending, ["output_id"]).values(due_at=dialect.now), rows)
        return changed + len(again)

    def redispatch_quarantined(self, consumer: str | None = None) -> int:
        """Make all outputs in quarantine due, or those of one consumer; return how many."""
        pending = self.database.tables.pending
        statement = update(pending).where(pending.c.quarantined_at.is_not(None)).values(**self._fresh)
        if consumer is not None:
            statement = statement.where(pending.c.consumer_id == self.names("consumer").get(consumer))
        with self.database.short() as connection:
            return connection.execute(statement).rowcount

    def erase(self, claim: ClaimRecord) -> int:
        """Delete the bodies and properties of a claim's outputs for good, so that none is sent again; return how many.

        The claim stays, so that redeliveries are duplicates.
        """
        output, pending = self.database.tables.output, self.database.tables.pending
        with self.database.short() as connection:
            erase = update(output).where(self._owned(claim), ~is_erased(output))
            erased = connection.execute(erase.values(ERASED)).rowcount
            ids = connection.scalars(select(output.c.output_id).where(self._owned(claim))).all()
            self._change(connection, delete(pending), ids)
        return erased

    def _names(self, connection: Connection, kind: str) -> dict[str, int]:
        name = self.database.tables.name
        rows = connection.execute(select(name.c.name, name.c.id).where(name.c.kind == kind).order_by(name.c.name))
        return {row.name: row.id for row in rows}

    def _scopes(self, connection: Connection) -> set[str | None]:
        """Return the scopes of all keys: those of stored identities and of what they cover, and None for envelope ids."""
        identity = self.database.tables.identity
        scopes: set[str | None] = {None}
        for row in connection.execute(select(identity.c.type, identity.c.descriptor, identity.c.covers)):
            scopes.add(key_scope(row.type, row.descriptor.decode()))
            if row.covers is not None:
                _, type, descriptor = json.loads(row.covers)
                scopes.add(key_scope(type, descriptor))
        return scopes

    def _claims(self, connection: Connection, wanted: Iterable[UUID]) -> list[ClaimRecord]:
        """Return the claims of all consumers under keys."""
        inbox, dialect = self.database.tables.inbox, self.database.dialect
        keys = sorted(wanted)
        found: list[ClaimRecord] = []
        for consumer in self._names(connection, "consumer").values():
            for start in range(0, len(keys), BATCH):
                ours = inbox.c.message_key.in_([dialect.key(key) for key in keys[start : start + BATCH]])
                found += self._records(connection, self._query().where(inbox.c.consumer_id == consumer, ours))
        return found

    def _source(self, connection: Connection, id: UUID | None) -> list[ClaimRecord]:
        """Return the claim with an output. Its key begins with the same 48 bits, or no index leads to it."""
        if id is None or id.version != 8:
            return []
        inbox, output, key = self.database.tables.inbox, self.database.tables.output, self.database.dialect.key
        first, last = (key(UUID(bytes=id.bytes[:6] + rest * 10)) for rest in (b"\x00", b"\xff"))
        query = select(output.c.consumer_id, output.c.message_key).where(output.c.output_id == str(id))
        near = query.where(output.c.message_key.between(first, last))
        consumers = self._names(connection, "consumer").values()
        for places in (*(near.where(output.c.consumer_id == consumer) for consumer in consumers), query):
            if row := connection.execute(places).first():
                same = (inbox.c.consumer_id == row.consumer_id, inbox.c.message_key == row.message_key)
                return self._records(connection, self._query().where(*same))
        return []

    def _failures(self) -> Iterator[FailedMessage]:
        message = self.database.tables.message
        columns = [column for column in message.c if column.name not in ("body", "digest")]
        query = select(*columns).where(message.c.history.is_not(None)).order_by(message.c.id).limit(BATCH)
        last = 0
        with self.database.queue_engine.connect() as connection:
            while rows := connection.execute(query.where(message.c.id > last)).all():
                last = rows[-1].id
                yield from map(read_failed, rows)

    def _query(self) -> Select[Any]:
        tables = self.database.tables
        inbox, output, pending, name = tables.inbox, tables.output, tables.pending, tables.name
        ours = (output.c.consumer_id == inbox.c.consumer_id, output.c.message_key == inbox.c.message_key)
        outputs = select(func.count()).select_from(output).where(*ours)
        waiting = outputs.join(pending, pending.c.output_id == output.c.output_id)
        consumer, type = (select(name.c.name).where(name.c.id == inbox.c[column]) for column in ("consumer_id", "type_id"))
        columns = {"consumer": consumer, "type": type, "outputs": outputs, "pending": waiting}
        return select(inbox, *(query.scalar_subquery().label(label) for label, query in columns.items()))

    def _records(self, connection: Connection, query: Select[Any]) -> list[ClaimRecord]:
        return [_claim(row) for row in connection.execute(query)]

    def _outputs(self, connection: Connection, claim: ClaimRecord) -> list[OutputRecord]:
        output, pending, now = self.database.tables.output, self.database.tables.pending, self.database.dialect.now
        columns = [pending.c[name] for name in ("due_at", "attempts", "refusals", "quarantined_at", "reason")]
        query = select(output, *columns, (pending.c.due_at <= now).label("due"))
        query = query.outerjoin(pending, pending.c.output_id == output.c.output_id)
        return [_output(row) for row in connection.execute(query.where(self._owned(claim)).order_by(output.c.ordinal))]

    def _owned(self, claim: ClaimRecord) -> ColumnElement[bool]:
        output = self.database.tables.output
        ours = output.c.consumer_id == name_number("consumer", claim.consumer)
        return and_(ours, output.c.message_key == self._key(claim))

    def _key(self, claim: ClaimRecord) -> Any:
        return self.database.dialect.key(UUID(claim.message_key))

    def _change(self, connection: Connection, statement: Update | Delete, ids: Sequence[str]) -> int:
        changed, todo, pending = 0, sorted(ids), self.database.tables.pending
        for start in range(0, len(todo), BATCH):
            changed += connection.execute(statement.where(pending.c.output_id.in_(todo[start : start + BATCH]))).rowcount
        return changed


def _event(original: str) -> tuple[str, str] | None:
    """Return source and id of what may be the original id of a CloudEvent."""
    parts = json.loads(original) if original.startswith("[") else []
    texts = [part[2:] for part in parts if isinstance(part, str)]
    return (texts[0], texts[1]) if len(parts) == len(texts) == 2 else None


def _sent_keys(output: OutputRecord) -> set[UUID]:
    """Return the keys under which an output can be claimed by the id of its envelope."""
    keys = _keys(f"s:{output.output_id}", [None])
    with suppress(Unreadable):  # a body that was erased
        properties = read_delivery(Delivery("", output.properties, output.body.encode())).properties
        if SOURCE in properties:
            keys.add(event_id(properties[SOURCE], output.output_id)[1])
    return keys


def _keys(original: str, scopes: Iterable[str | None]) -> set[UUID]:
    text = original[2:] if original.startswith(TYPED[:3]) else original
    try:
        event = _event(original)
        return {message_key(original, text, scope) for scope in scopes} | ({event_id(*event)[1]} if event else set())
    except UnicodeEncodeError:  # no message has such an id
        return set()


def _uuid(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None


def _claim(row: Row[Any]) -> ClaimRecord:
    key = row.message_key if isinstance(row.message_key, UUID) else UUID(bytes=row.message_key)
    payload = row.fingerprint.hex() if row.fingerprint is not None else None
    ids = (row.consumer, row.type, row.original_id.decode(), str(key), payload)
    return ClaimRecord(*ids, row.claimed_at, row.worker, row.outputs, row.pending)


def _output(row: Row[Any]) -> OutputRecord:
    properties = read_properties(row.headers)
    due = row.due_at if row.quarantined_at is None else None
    reason = row.reason.decode("utf-8", "replace") if row.reason is not None else None
    where = (row.ordinal, row.output_id, row.kind, row.exchange, row.routing_key, properties.get("type"), row.delay)
    fate = (_state(row), due, row.attempts or 0, row.refusals or 0, reason)
    return OutputRecord(*where, *fate, properties, row.body.decode("utf-8", "backslashreplace"))


def _state(row: Row[Any]) -> str:
    if row.body == ERASED["body"] and row.headers == ERASED["headers"]:
        return "erased"
    if row.kind == RESULT:
        return "kept"
    if row.due_at is None:
        return "confirmed"
    if row.quarantined_at is not None:
        return "quarantined"
    return "delayed" if row.delay is not None and not row.due and not row.attempts else "pending"
