"""Feeding and looking, apart from the workers: what a storm sends, and what it finds in the database and the queues."""

from __future__ import annotations

from collections.abc import Iterable
from uuid import UUID, uuid4

from pydantic import BaseModel
from sqlalchemy import Engine, text
from sqlalchemy.exc import SQLAlchemyError

from idemp.broker.kombu import KombuBroker
from idemp.broker.port import Broker
from idemp.broker.stomp import StompBroker
from idemp.broker.stomp.topology import waiting_queues
from idemp.identity import effective_id, output_id
from idemp.messages import Message, Output, OutputKind


def sent_to(queue: str, message: BaseModel, message_id: str) -> Output:
    """A message for a queue, as a producer without idemp sends it."""
    body = message.model_dump_json().encode()
    content = Message(body=body, type=message.__message_type__, message_id=message_id)  # type: ignore[attr-defined]
    return Output(id=uuid4(), ordinal=0, kind=OutputKind.SEND, exchange="", routing_key=queue, message=content)


def id_of_output(consumer: str, message_type: str, key: UUID, ordinal: int) -> str:
    """The id that an output must have, when the input's key stands in its body."""
    return str(output_id("idemp", consumer, effective_id("body", key, message_type).key, ordinal))


def number_from(engine: Engine, statement: str) -> int:
    """What a SELECT counts; -1 while the database is away."""
    try:
        with engine.connect() as connection:
            return int(connection.scalar(text(statement)) or 0)
    except SQLAlchemyError:
        return -1


def depths(broker: KombuBroker, queues: Iterable[str]) -> dict[str, int]:
    """Ready messages of queues."""
    return {name: broker.depth(name) for name in queues}


def queues_of(consumer: str, delays: Iterable[float]) -> list[str]:
    """A consumer's queue, its delay tiers and its dead letters."""
    tiers = [f"{consumer}.delay.{round(seconds * 1000)}ms" for seconds in sorted(delays)]
    return [consumer, *tiers, f"{consumer}.dead"]


def left_behind(broker: Broker, consumer: str, delays: Iterable[float]) -> dict[str, int]:
    """What a consumer's queue, its dead letters and what waits beside it still hold."""
    if isinstance(broker, KombuBroker):
        return depths(broker, queues_of(consumer, delays))
    assert isinstance(broker, StompBroker)
    # What waits is in the hands of receivers, so that it is never ready.
    names = [consumer, *waiting_queues(consumer), f"{consumer}.dead"]
    return {name: len(broker.browse(name, 1_000)) for name in names}
