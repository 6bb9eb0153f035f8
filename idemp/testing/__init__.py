"""For tests of your own handlers, stores and brokers.

>>> from idemp.testing import context
>>> def reserve(message, ctx):
...     ctx.send({"sku": message["sku"]}, to="stock", type="stock.Reserve")
>>> ctx = context()
>>> reserve({"sku": "A-1"}, ctx)
>>> [(output.routing_key, output.message.body) for output in ctx.outputs]
[('stock', b'{"sku":"A-1"}')]
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from idemp.codecs import Types
from idemp.context import BatchContext, Context
from idemp.emitting import Emitter
from idemp.errors import ConfigurationError
from idemp.identity import effective_id, output_id
from idemp.messages import Message
from idemp.testing.clock import FakeClock
from idemp.testing.proxy import FaultProxy, Trigger

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sqlalchemy import Connection
    from sqlalchemy.orm import Session

    from idemp.testing.broker_conformance import BrokerConformance
    from idemp.testing.crash_points import CRASH_POINTS, Crash, CrashPoint
    from idemp.testing.deadline import HandlerHangs
    from idemp.testing.detectors import rehearse
    from idemp.testing.document_conformance import DocumentInboxConformance, DocumentStoreConformance
    from idemp.testing.findings import Finding, NotIdempotent
    from idemp.testing.harness import Harness
    from idemp.testing.killing import Killed, kill_for_real
    from idemp.testing.light import assert_idempotent, redeliver
    from idemp.testing.machine import redelivery_machine, replay
    from idemp.testing.prepared_conformance import BarrierConformance, DecidingHomeConformance, PreparedHomeConformance
    from idemp.testing.promises import PromiseBroken
    from idemp.testing.report import NotSeen, Report
    from idemp.testing.simulation import Simulation
    from idemp.testing.store_conformance import CoreStoreConformance, EntityStoreConformance, StoreConformance
    from idemp.testing.stream_conformance import StreamConformance

# What needs the extra `testing` is imported at its first use.
_LAZY = {
    "BarrierConformance": "prepared_conformance",
    "BrokerConformance": "broker_conformance",
    "CRASH_POINTS": "crash_points",
    "Crash": "crash_points",
    "CoreStoreConformance": "store_conformance",
    "CrashPoint": "crash_points",
    "DecidingHomeConformance": "prepared_conformance",
    "DocumentInboxConformance": "document_conformance",
    "DocumentStoreConformance": "document_conformance",
    "EntityStoreConformance": "store_conformance",
    "Finding": "findings",
    "HandlerHangs": "deadline",
    "Harness": "harness",
    "Killed": "killing",
    "NotIdempotent": "findings",
    "PreparedHomeConformance": "prepared_conformance",
    "NotSeen": "report",
    "PromiseBroken": "promises",
    "Report": "report",
    "Simulation": "simulation",
    "StoreConformance": "store_conformance",
    "StreamConformance": "stream_conformance",
    "assert_idempotent": "light",
    "kill_for_real": "killing",
    "redeliver": "light",
    "redelivery_machine": "machine",
    "rehearse": "detectors",
    "replay": "machine",
}

__all__ = [
    "CRASH_POINTS",
    "BarrierConformance",
    "BrokerConformance",
    "CoreStoreConformance",
    "Crash",
    "CrashPoint",
    "DecidingHomeConformance",
    "DocumentInboxConformance",
    "DocumentStoreConformance",
    "EntityStoreConformance",
    "FakeClock",
    "FaultProxy",
    "Finding",
    "HandlerHangs",
    "Harness",
    "Killed",
    "NotIdempotent",
    "NotSeen",
    "PreparedHomeConformance",
    "PromiseBroken",
    "Report",
    "Simulation",
    "StoreConformance",
    "StreamConformance",
    "Trigger",
    "assert_idempotent",
    "batch_context",
    "context",
    "kill_for_real",
    "redeliver",
    "redelivery_machine",
    "rehearse",
    "replay",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("idemp"):
            raise
        raise ConfigurationError(f"{name} needs {error.name}.", fix="pip install 'idemp[testing]'") from error


def context(
    *,
    message_id: str = "message-1",
    message: Message | None = None,
    attempt: int = 1,
    headers: Mapping[str, Any] | None = None,
    reply_to: str | None = None,
    session: Session | None = None,
    connection: Connection | None = None,
    consumer: str = "tests",
    types: Types | None = None,
    databases: Mapping[str, Session] | None = None,
) -> Context:
    """What a handler gets beside its message, made by hand; what the handler emits stands in `.outputs`.

    Args:
        message_id: the id that the inbox would count by; that of `message`, where it has one.
        message: the message as it would arrive; an empty one if left out.
        attempt: 2 after a first failure, and so on.
        headers: added to those of `message`.
        reply_to: the queue where an answer is expected; default that of `message`.
        session: what `ctx.session` answers; its end is the test's.
        connection: what `ctx.connection` answers; default the session's.
        consumer: the consumer that the output ids are derived for.
        types: names and codecs of message classes; those of an app are `app.registry.types`.
        databases: what `ctx.database(name).session` answers, by name; their end is the test's.

    Example:
        >>> ctx = context(message_id="m-1", reply_to="answers")
        >>> _ = ctx.return_(0)
        >>> ctx.outputs[0].routing_key, ctx.outputs[0].message.headers["idemp-return-code"]
        ('answers', 0)
    """
    arriving = message or Message(body=b"null", message_id=message_id)
    text = arriving.message_id or message_id
    arriving = replace(
        arriving,
        message_id=text,
        headers={**arriving.headers, **(headers or {})},
        reply_to=reply_to if reply_to is not None else arriving.reply_to,
    )
    key = effective_id("envelope", text).key
    emitter = Emitter(
        types=types or Types(),
        exchange="idemp",
        derive_id=lambda ordinal: output_id("idemp", consumer, key, ordinal),
        cause=arriving,
        causation_id=text,
        encode_effect=lambda name, value: (types or Types()).encode(value, name)[1],
    )
    unit = _GivenUnit(session, connection)
    others = _GivenDatabases(databases) if databases is not None else None
    return Context(message=arriving, message_id=text, attempt=attempt, unit=unit, emitter=emitter, databases=others)


def batch_context(*message_ids: str, **options: Any) -> BatchContext:
    """What a batch handler gets beside its messages, made by hand.

    Args:
        message_ids: the id of each message.
        options: as in `context`, the same for each.

    Example:
        >>> ctx = batch_context("m-1", "m-2")
        >>> _ = ctx.each[1].send({"n": 2}, to="stock", type="stock.Reserve")
        >>> [len(one.outputs) for one in ctx.each]
        [0, 1]
    """
    return BatchContext([context(message_id=message_id, **options) for message_id in message_ids])


class _GivenDatabases:
    """The sessions that a test gave for other databases."""

    def __init__(self, sessions: Mapping[str, Session]) -> None:
        self._sessions = sessions

    def open(self, name: str) -> _GivenUnit:
        if name not in self._sessions:
            raise ConfigurationError(
                f"This context has no database {name!r}.", fix=f'Make it with context(databases={{"{name}": session}}).'
            )
        return _GivenUnit(self._sessions[name], None)


class _GivenUnit:
    """The session and the connection that a test gave."""

    def __init__(self, session: Session | None, connection: Connection | None) -> None:
        self._session = session
        self._connection = connection

    @property
    def session(self) -> Session:
        if self._session is None:
            raise ConfigurationError("This context has no session.", fix="Make it with context(session=...).")
        return self._session

    @property
    def connection(self) -> Connection:
        if self._connection is not None:
            return self._connection
        if self._session is None:
            raise ConfigurationError("This context has no connection.", fix="Make it with context(connection=...).")
        return self._session.connection()
