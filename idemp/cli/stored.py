"""Stories and stored outputs, by the id that a person knows."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from sqlalchemy import func, select

from idemp.cli.keys import candidate_keys
from idemp.errors import StoreError
from idemp.identity import EffectiveId
from idemp.inbox.port import DEFAULT_BROKER, Claim, Mark
from idemp.inbox.sql.due import EFFECTS_FROM, EFFECTS_LATER
from idemp.inbox.sql.engine import start_errors
from idemp.inbox.sql.erasing import Erasing
from idemp.inbox.sql.queries import Queries
from idemp.messages import Output, OutputKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from idemp.broker.port import Publisher
    from idemp.inbox.sql import SqlStore
    from idemp.inbox.sql.queries import Story


_MOST_FOUND: Final = 100


def queries(store: SqlStore) -> Queries:
    """What can be asked about an inbox."""
    return Queries(store.engine, store.tables)


def erasing(store: SqlStore) -> Erasing:
    """What can be taken away from an inbox."""
    return Erasing(store.engine, store.tables)


def stories(store: SqlStore, message_id: str, consumer: str | None) -> list[Story]:
    """What is known about a message, at one consumer or at all.

    An id that is no key by itself may be that of an output, or the id of a header or a CloudEvent without its source;
    these are searched for row by row.
    """
    with start_errors(store.engine), store.engine.connect() as connection:
        types = connection.scalars(select(store.tables.message_type.c.name)).all()
        found = queries(store).stories(candidate_keys(message_id, types), consumer)
        if found:
            return found
        inbox, output = store.tables.inbox, store.tables.output
        named = inbox.c.original_id == message_id
        event = inbox.c.original_id.endswith(f",{message_id}", autoescape=True)
        keys = set(connection.scalars(select(inbox.c.message_key).where(named | event).limit(_MOST_FOUND)))
        with suppress(ValueError):
            keys.update(connection.scalars(select(output.c.message_key).where(output.c.output_id == UUID(message_id))))
    return queries(store).stories(sorted(keys), consumer)


def queues_of(store: SqlStore, consumer: str | None) -> list[str]:
    """Return the queues of one consumer, or of all that the database knows."""
    queue, consumers = store.tables.queue, store.tables.consumer
    statement = select(queue.c.name).distinct().join_from(queue, consumers, consumers.c.id == queue.c.consumer_id)
    if consumer is not None:
        statement = statement.where(consumers.c.name == consumer)
    with start_errors(store.engine), store.engine.connect() as connection:
        return list(connection.scalars(statement.order_by(queue.c.name)))


def explained(story: Story) -> dict[str, Any]:
    """A story with its sums, for programs."""
    told = asdict(story)
    for output in told["outputs"]:
        if output["state"] == "quarantined":
            output["due_at"] = None  # never; in the table a far date keeps it behind all others
    return {
        **told,
        "redelivered": sum(entry.redelivered for entry in story.history),
        "confirmed": sum(entry.confirmed for entry in story.history),
        "pending": sum(output.state in {"pending", "quarantined"} for output in story.outputs),
    }


@dataclass(frozen=True, slots=True)
class Refused:
    """Outputs that wait because they were refused, and are still tried.

    Attributes:
        reason: what the broker said.
        count: how many.
        oldest: when the oldest one's message was handled.
    """

    reason: str
    count: int
    oldest: datetime


def refused(store: SqlStore, before: datetime) -> list[Refused]:
    """The outputs of messages that were handled before then, by reason, the most frequent first."""
    inbox, pending = store.tables.inbox, store.tables.pending
    count = func.count().label("count")
    statement = (
        select(pending.c.reason, count, func.min(inbox.c.claimed_at))
        .select_from(
            pending.join(
                inbox, (inbox.c.consumer_id == pending.c.consumer_id) & (inbox.c.message_key == pending.c.message_key)
            )
        )
        .where(pending.c.reason.is_not(None), pending.c.quarantined_at.is_(None), inbox.c.claimed_at <= before)
        .group_by(pending.c.reason)
        .order_by(count.desc())
    )
    with start_errors(store.engine), store.engine.connect() as connection:
        return [Refused(*row) for row in connection.execute(statement)]


def overdue_effects(store: SqlStore, before: datetime) -> dict[str, int]:
    """How many effects of each consumer could have been run since then, and were not."""
    pending, consumer = store.tables.pending, store.tables.consumer
    statement = (
        select(consumer.c.name, func.count().label("number"))
        .select_from(pending.join(consumer, consumer.c.id == pending.c.consumer_id))
        .where(pending.c.due_at.between(EFFECTS_FROM, before + EFFECTS_LATER), pending.c.quarantined_at.is_(None))
        .group_by(consumer.c.name)
        .order_by(consumer.c.name)
    )
    with start_errors(store.engine), store.engine.connect() as connection:
        return {row.name: row.number for row in connection.execute(statement)}


def outputs(store: SqlStore, story: Story) -> list[Output]:
    """The stored outputs of a handling, in emission order."""
    output, consumer = store.tables.output, store.tables.consumer
    columns = (
        output.c.output_id,
        output.c.ordinal,
        output.c.kind,
        output.c.exchange,
        output.c.routing_key,
        output.c.envelope,
        output.c.body,
    )
    statement = (
        select(*columns)
        .select_from(output.join(consumer, consumer.c.id == output.c.consumer_id))
        .where(consumer.c.name == story.claim.consumer, output.c.message_key == story.claim.key)
        .order_by(output.c.ordinal)
    )
    with start_errors(store.engine), store.engine.connect() as connection:
        return [Output.restored(*row) for row in connection.execute(statement)]


def check_all_done(stories: Sequence[Story]) -> None:
    """Look at all of them before anything is taken away from the first.

    Raises:
        StoreError: some output of one of them waits still.
    """
    for story in stories:
        if waiting := sum(output.state in {"pending", "quarantined"} for output in story.outputs):
            raise StoreError(
                f"{waiting} of the outputs of {story.claim.original_id!r} at {story.claim.consumer} still wait for the "
                "broker's confirm, or to be done. Nothing was erased.",
                fix="Let the relay send the messages first (`idemp relay MODULE:APP`), and the workers do the effects; "
                "`idemp inbox discard ID` gives up what is in quarantine.",
            )


def unserved(store: SqlStore) -> dict[str, int]:
    """How many outputs wait for a broker that no live relay ships to, by the broker's name."""
    waiting, _ = store.upkeep.waiting()
    served = {row.broker for row in store.upkeep.workers() if row.relay and row.alive}
    return {name: number for name, number in waiting.items() if name not in served}


def check_broker(store: SqlStore, stories: Sequence[Story]) -> None:
    """Refuse to send outputs that wait for another broker than the store's.

    Raises:
        StoreError: there are some; nothing was sent.
    """
    pending, broker = store.tables.pending, store.tables.broker
    messages = [output for story in stories for output in story.outputs if output.kind != OutputKind.EFFECT]
    waiting = [output.id for output in messages if output.state in {"pending", "quarantined"}]
    statement = (
        select(broker.c.name)
        .select_from(pending.outerjoin(broker, broker.c.id == pending.c.broker_id))
        .where(pending.c.output_id.in_(waiting))
        .distinct()
    )
    with start_errors(store.engine), store.engine.connect() as connection:
        names = {name or DEFAULT_BROKER for name in connection.scalars(statement)}
    if others := sorted(names - {store.broker_name}):
        raise StoreError(
            f"Outputs wait for the broker {' and '.join(others)}, and this is {store.broker_name!r}. Nothing was sent.",
            fix=f"Name that broker: --broker URL --broker-name {others[0]}, or its app by --app MODULE:APP.",
        )


def redispatch(store: SqlStore, publisher: Publisher, stories: Sequence[Story], timeout: float) -> list[dict[str, Any]]:
    """Send the messages of handlings again and record what the broker confirmed; a row for each output.

    Their effects are not run here: those in quarantine are given back to the workers that run them, others left alone.

    Raises:
        StoreError: those of one were erased; nothing was sent.
    """
    for story in stories:
        if any(output.erased for output in story.outputs):
            raise StoreError(
                f"The outputs of {story.claim.original_id!r} at {story.claim.consumer} were erased.",
                fix="Nothing was sent; name the message as TYPE#KEY, or its consumer by --consumer, if you meant another.",
            )
    return [row for story in stories for row in _redispatched(store, publisher, story, timeout)]


def _redispatched(store: SqlStore, publisher: Publisher, story: Story, timeout: float) -> list[dict[str, Any]]:
    kept = outputs(store, story)
    copies = [output.marked_redispatched() for output in kept if not output.is_effect]
    answers = publisher.publish(copies, timeout)
    confirmed = tuple(output.id for output, answer in zip(copies, answers, strict=True) if answer is None)
    if confirmed:
        claim = Claim(
            consumer=story.claim.consumer,
            id=EffectiveId(story.claim.key, story.claim.original_id),
            message_type=story.claim.message_type,
            fingerprint=None,
            wait=timedelta(0),
        )
        store.record([Mark(claim, confirmed)])
    return [
        {
            "consumer": story.claim.consumer,
            "id": output.id,
            "destination": f"{output.exchange}/{output.routing_key}" if output.exchange else output.routing_key,
            "confirmed": answer is None,
            "refusal": None if answer is None else f"{answer.kind}: {answer.detail}",
        }
        for output, answer in zip(copies, answers, strict=True)
    ] + _released(store, story)


def _released(store: SqlStore, story: Story) -> list[dict[str, Any]]:
    """Effects in quarantine are given back; a row for each effect, in which nothing is a refusal."""
    effects = [output for output in story.outputs if output.kind == OutputKind.EFFECT]
    if given_up := [output.id for output in effects if output.state == "quarantined"]:
        store.upkeep.release_quarantined(given_up)
    meanings = {
        "confirmed": "done before, not run again",
        "pending": "pending, a worker runs it when it is due",
        "quarantined": "given back, a worker runs it now",
        "discarded": "discarded before, not run again",
    }
    return [
        {
            "consumer": story.claim.consumer,
            "id": output.id,
            "destination": f"effect {output.destination}",
            "confirmed": True if output.state == "confirmed" else None,
            "refusal": meanings[output.state],
        }
        for output in effects
    ]
