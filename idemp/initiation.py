"""Initiations: outputs and effects in one transaction, for code that no message started."""

from __future__ import annotations

from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from idemp.emitting import Emitter
from idemp.errors import AlreadyHandled, IdInFlight
from idemp.identity import effective_id, new_id, output_id
from idemp.inbox.port import Claim, Verdict
from idemp.messages import OutputKind
from idemp.startup import check_not_per_entity
from idemp.work import announce

if TYPE_CHECKING:
    from collections.abc import Iterator
    from uuid import UUID

    from sqlalchemy import Connection
    from sqlalchemy.orm import Session

    from idemp.messages import Output
    from idemp.work import Consumer

INITIATION_TYPE: Final = "idemp.initiation"
_CLAIM_WAIT: Final = timedelta(seconds=2)


class Initiation:
    """The unit of work of an initiation; as a handler's context, without a message.

    Attributes:
        id: what it was started with, or the id that was minted for it.

    Example:
        >>> from idemp import App
        >>> from idemp.inbox.memory import InMemoryStore
        >>> app = App("shop", store=InMemoryStore(), broker="local://shop.db")
        >>> with app.initiate(id="request-1") as unit:
        ...     _ = unit.send({"sku": "A-1"}, to="stock", type="stock.Reserve")
        >>> unit.id, unit.outputs[0].routing_key
        ('request-1', 'stock')
    """

    def __init__(self, id: str, unit: Any, emitter: Emitter) -> None:
        self.id = id
        self._unit = unit
        self._emitter = emitter

    @property
    def session(self) -> Session:
        """An ORM session in the initiation's transaction; commit and rollback are refused."""
        session: Session = self._unit.session
        return session

    @property
    def connection(self) -> Connection:
        """Its connection."""
        connection: Connection = self._unit.connection
        return connection

    @property
    def outputs(self) -> tuple[Output, ...]:
        """What it emitted so far."""
        return self._emitter.outputs

    def publish(self, message: Any, **options: Any) -> UUID:
        """Publish to whoever subscribed to the message's type. Options, result and errors as in `Context.publish`."""
        return self._emitter.emit(OutputKind.PUBLISH, message, **options)

    def send(self, message: Any, *, to: str, **options: Any) -> UUID:
        """Send to the queue `to`. Options, result and errors as in `Context.send`."""
        return self._emitter.emit(OutputKind.SEND, message, to=to, **options)

    def effect(self, name: str, value: Any) -> UUID:
        """Have something done outside the database after COMMIT, by a worker. Result and errors as in `Context.effect`."""
        return self._emitter.emit_effect(name, value)


@contextmanager
def initiated(consumer: Consumer, id: str | None) -> Iterator[Initiation]:
    """Run a block as an initiation of a consumer; see `App.initiate`."""
    check_not_per_entity(
        consumer.store, "An initiation", "Send a message of a type that is opted in with Idempotent(entity=…)."
    )
    text = id if id is not None else str(new_id(consumer.clock.now()))
    effective = effective_id("initiation", text)
    claim = Claim(
        consumer=consumer.name, id=effective, message_type=INITIATION_TYPE, fingerprint=None, wait=_CLAIM_WAIT
    )
    emitter = Emitter(
        types=consumer.types,
        exchange=consumer.exchange,
        derive_id=lambda ordinal: output_id(consumer.namespace, consumer.name, effective.key, ordinal),
        causation_id=text,
        max_body_bytes=consumer.max_body_bytes,
        wire=consumer.wrap,
        trace=consumer.telemetry.trace_headers(),
        encode_effect=consumer.encode_effect,
        now=consumer.clock.now(),
    )
    with consumer.store.begin([claim]) as unit:
        claimed = unit.claim(claim)
        if claimed.verdict is Verdict.IN_FLIGHT:
            raise IdInFlight(f"Another initiation with id {text!r} is still running.", fix="Ask again later.")
        if claimed.verdict is not Verdict.CLAIMED:
            raise AlreadyHandled(
                f"Initiation {text!r} was handled before.", [stored.output for stored in claimed.outputs]
            )
        try:
            yield Initiation(text, unit, emitter)
            unit.flush()
        except Exception as error:
            translated = consumer.store.translate(error)
            if translated is not None and translated is not error:
                raise translated from error
            raise
        finally:
            outputs = emitter.close()
        # Nobody dispatches these inline: they are the relay's from the start.
        unit.store_outputs(claim, outputs, timedelta(0))
        unit.commit()
    announce(consumer.store, outputs)
