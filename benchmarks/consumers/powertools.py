"""AWS Lambda Powertools: `idempotent_function` around the bare handler, its records in Redis.

The record is not in the effect's transaction: a crash between the two repeats the effect once the record expires.
"""

from __future__ import annotations

from typing import Any

from aws_lambda_powertools.utilities.idempotency import IdempotencyConfig, idempotent_function
from aws_lambda_powertools.utilities.idempotency.persistence.cache import CachePersistenceLayer

from benchmarks.consumers.plain import Bare
from benchmarks.place import Order
from benchmarks.seats import Seat

WEEK = 7 * 24 * 3600


class _Context:
    """Reports the time that is left, after which a record in progress expires."""

    @staticmethod
    def get_remaining_time_in_millis() -> int:
        return 30_000


class Guarded(Bare):
    def __init__(self, seat: Seat) -> None:
        super().__init__(seat)
        config = IdempotencyConfig(event_key_jmespath="order_id", expires_after_seconds=WEEK)
        config.register_lambda_context(_Context())  # type: ignore[arg-type]
        store = CachePersistenceLayer(url=seat.redis)

        @idempotent_function(data_keyword_argument="event", persistence_store=store, config=config)
        def handle(event: dict[str, Any], message_id: str) -> dict[str, Any]:
            super(Guarded, self).handle(Order.model_validate(event), message_id)
            return {"order_id": event["order_id"]}

        self._guarded = handle

    def handle(self, order: Order, message_id: str) -> None:
        self._guarded(event=order.model_dump(), message_id=message_id)


def consume(seat: Seat) -> None:
    Guarded(seat).run()
