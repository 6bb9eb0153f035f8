"""Other ways to the same end: each does the same work with the settings that its documentation recommends.

The work is one row in PostgreSQL and one confirmed message to RabbitMQ for each message of a RabbitMQ queue.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from benchmarks.outside import Consumer


@dataclass(frozen=True)
class Peer:
    """Another framework.

    Attributes:
        module: of this package, whose `consume` runs in a process of its own.
        packages: whose versions count.
        settings: how it is set up, in words.
        promises: what it promises for this work, and what less than idemp does.
        needs_redis: whether it keeps its records there.
        declares_its_queue: whether it consumes only queues that it declared itself.
    """

    module: str
    packages: tuple[str, ...]
    settings: str
    promises: str
    needs_redis: bool = False
    declares_its_queue: bool = False

    def load(self) -> Consumer:
        """Its consumer; `ImportError` where its package is not installed."""
        consume: Any = import_module(f"benchmarks.peers.{self.module}").consume
        return consume  # type: ignore[no-any-return]


PEERS: Final = {
    "DBOS": Peer(
        module="durable",
        packages=("dbos",),
        settings=(
            "kombu consumes; a workflow under the message's id, of a datasource transaction (the row) and a step (the "
            "confirmed publish); acked once the workflow is recorded; 8 at once; system tables in the same database"
        ),
        promises=(
            "The effect is once: its transaction records the step. The output is sent at least once, by running the step "
            "again: neither its bytes nor an id of its own are stored. A duplicate is skipped, its output not sent again."
        ),
    ),
    "Powertools": Peer(
        module="powertools",
        packages=("aws-lambda-powertools", "redis"),
        settings=(
            "idempotent_function around the bare handler, records in Redis (appendfsync always) for 7 days, the order's id "
            "as key, a context that tells how much time is left"
        ),
        promises=(
            "The record is not in the effect's transaction: a crash between the two has the effect again once the record in "
            "progress expires. The handler's return value is stored, outputs are not."
        ),
        needs_redis=True,
    ),
    "event-forge": Peer(
        module="forge",
        packages=("event-forge", "aio-pika", "asyncpg"),
        settings=(
            "InboxService behind AioPikaConsumer; row and outbox message in one session; OutboxService publishes with "
            "confirms, woken after each COMMIT and every 50 ms, 100 at once (by default 10 a second); prefetch 50; "
            "a classic queue, since its consumer declares no other. Version 1.2.0: in 1.3.0 to 1.5.0 the outbox repository "
            "for SQLAlchemy lacks a method and can't be made"
        ),
        promises=(
            "The inbox row commits before the effect, in a transaction of its own, and what is found there is a duplicate: "
            "a crash between the two loses the message. Outputs are stored with the effect and sent at least once; "
            "a duplicate does not send them again."
        ),
        declares_its_queue=True,
    ),
    "FastStream": Peer(
        module="stream",
        packages=("faststream", "aio-pika"),
        settings=(
            "RabbitBroker with prefetch 50 and manual acks; a hand-written inbox: SELECT, then inbox, row and outbox in one "
            "session of asynchronous SQLAlchemy, COMMIT, publish with confirm, mark, COMMIT"
        ),
        promises=(
            "FastStream itself deduplicates nothing. By the inbox the effect is once; the output is stored with it, "
            "and sent again only where somebody writes the relay, too."
        ),
    ),
}
