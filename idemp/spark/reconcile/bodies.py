"""Ids and fingerprints out of bodies, by the very code of the online consumer."""

from __future__ import annotations

import hashlib
import json
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from idemp.app import App
from idemp.broker.port import Delivery
from idemp.bulk.arrow import readable_texts
from idemp.cloudevents import unwrap
from idemp.errors import ConfigurationError, MessageError, UndecodableMessage
from idemp.fingerprint import Fingerprint
from idemp.identity import EffectiveId, Key
from idemp.inbox.memory import InMemoryStore
from idemp.messages import CLOUDEVENT_SOURCE_HEADER, UNSTORED_HEADER, Message, parse_canonically
from idemp.work import Consumer, decode

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_SCHEMA: Final = (
    "consumer string, type string, key binary, text string, sent_at timestamp, position string, "
    "fingerprint binary, fault string"
)
_EVENT_PREFIX: Final = CLOUDEVENT_SOURCE_HEADER.removesuffix("source")
_NO_JSON: Final = b"\0\0\0"
"""Begins the digest of a body that is no JSON, in the place of idemp's version and choice of fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """What a message says about itself.

    Attributes:
        type: its type's canonical name.
        key: 16 bytes; `None` where there is a fault.
        text: its id, where that is not the key as it is written.
        fingerprint: of its body.
        fault: why it has no usable id, or can't be read: the error that parks it, by its class.
    """

    type: str | None
    key: bytes | None = None
    text: str | None = None
    fingerprint: bytes | None = None
    fault: str | None = None


Reader = Callable[[Message], Read | None]


def with_bodies(mapped: DataFrame, app: str | None) -> DataFrame:
    """Rows with what their bodies say; those that the app leaves alone are left out."""
    return mapped.mapInArrow(partial(_read_all, app), _SCHEMA)


def load(name: str) -> App:
    """The app that `MODULE:APP` names.

    Raises:
        ConfigurationError: it can't be imported, is something else, or looks for ids in two places at once.
    """
    try:
        found = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(
            f"App {name!r} can't be imported: {error}.",
            fix="Write MODULE:APP; the module has to be on the PYTHONPATH of Spark's Python workers, too.",
        ) from error
    if not isinstance(found, App):
        raise ConfigurationError(f"{name!r} is no App but a {type(found).__name__}.")
    found.registry.build(found.settings.messages)
    for item in found.registry.registrations():
        if any(former.opted_in for former in item.policy.previous):
            raise ConfigurationError(
                f"Message type {item.message_type!r} has previous=: a message may be in the inbox under two ids.",
                fix="Reconcile again when its former claims have expired, and previous= is gone.",
            )
    return found


def read_envelope(message: Message) -> Read:
    """What can be said without an app: the message id, and the whole body's fingerprint.

    Example:
        >>> read_envelope(Message(body=b'{"a": 1}', message_id="order-17")).text
        'order-17'
        >>> read_envelope(Message(body=b"")).fault
        'MissingId'
    """
    try:
        effective = Key.message_id().effective(message, None, message.type or "")
    except MessageError as error:
        return _faulty(message, error)
    try:
        fingerprint = None if message.headers.get(UNSTORED_HEADER) else Fingerprint().of(*parse_canonically(message))
    except MessageError:
        fingerprint = _NO_JSON + hashlib.sha256(message.body).digest()[:16]
    return _read(message.type, effective, fingerprint)


def reader_of(app: App) -> Reader:
    """What reads messages as this app's consumer does; `None` for those of which its inbox knows nothing."""
    registry = app.registry
    judged = {
        name
        for item in registry.registrations()
        if item.policy.idempotent
        for name in (item.message_type, *item.aliases)
    }
    consumer = Consumer(
        name=app.name,
        store=InMemoryStore(app.clock),  # nothing is claimed
        find=registry.find,
        types=registry.types,
        clock=app.clock,
        max_body_bytes=app.settings.max_body_bytes,
        unwrap=unwrap,
    )

    def read(message: Message) -> Read | None:
        name = message.type or registry.default_type
        if name is not None and name not in judged:
            return None
        try:
            work = decode(consumer, Delivery(message=message, queue=app.queue))
        except Exception as error:  # noqa: BLE001 - whatever it is, a consumer would park the message for it
            return _faulty(message, error)
        claim = work.claims[0]
        return _read(claim.message_type, claim.id, claim.fingerprint)

    return read


def _read(type: str | None, effective: EffectiveId, fingerprint: bytes | None) -> Read:
    text = None if str(effective.key) == effective.text else effective.text
    return Read(type=type, key=effective.key.bytes, text=text, fingerprint=fingerprint)


def _faulty(message: Message, error: Exception) -> Read:
    return Read(type=message.type, text=message.message_id, fault=type(error).__name__)


def _read_all(app: str | None, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    reader: Reader = read_envelope if app is None else reader_of(load(app))
    for batch in batches:
        yield _read_batch(reader, batch)


def _read_batch(reader: Reader, batch: pa.RecordBatch) -> pa.RecordBatch:
    names = ["id", "type", "source", "headers", "body"]
    readable = [readable_texts(batch[name]) if name != "body" else batch[name] for name in names]
    rows = pa.RecordBatch.from_arrays(readable, names).to_pylist()
    found = [read_row(reader, **row) for row in rows]
    kept = batch.take(pa.array([number for number, read in enumerate(found) if read is not None], pa.int64()))
    reads = [read for read in found if read is not None]
    return pa.RecordBatch.from_pydict(
        {
            "consumer": kept["consumer"],
            "type": pa.array([read.type for read in reads], pa.string()),
            "key": pa.array([read.key for read in reads], pa.binary()),
            "text": pa.array([read.text for read in reads], pa.string()),
            "sent_at": kept["time"],
            "position": kept["position"],
            "fingerprint": pc.coalesce(kept["digest"], pa.array([read.fingerprint for read in reads], pa.binary())),
            "fault": pa.array([read.fault for read in reads], pa.string()),
        }
    )


def _event(message: Message, source: str) -> dict[str, Any]:
    """The headers by which idemp knows a CloudEvent."""
    attributes = {"specversion": "1.0", "id": message.message_id, "type": message.type, "source": source}
    return {f"{_EVENT_PREFIX}{name}": value for name, value in attributes.items()}


def read_row(
    reader: Reader, *, id: str | None, type: str | None, source: str | None, headers: str | None, body: bytes | None
) -> Read | None:
    """What a row of the log says, by this reader."""
    message = Message(body=body or b"", type=type or None, message_id=id)
    try:
        told = json.loads(headers) if headers else {}
    except (ValueError, RecursionError):
        told = None
    if not isinstance(told, dict):
        return _faulty(message, UndecodableMessage("The headers are no JSON object."))
    if source:
        told.update(_event(message, source))
    return reader(replace(message, headers=told))
