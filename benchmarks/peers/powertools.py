"""AWS Lambda Powertools: `idempotent_function` around the bare handler, its records in Redis."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from aws_lambda_powertools.utilities.idempotency import IdempotencyConfig, idempotent_function
from aws_lambda_powertools.utilities.idempotency.persistence.cache import CachePersistenceLayer

from benchmarks.plain import Bare
from benchmarks.work import Order

if TYPE_CHECKING:
    from benchmarks.outside import Seat

_WEEK: Final = 7 * 24 * 3600


class _Context:
    """Of a function that may run for half a minute: by it a record in progress expires."""

    @staticmethod
    def get_remaining_time_in_millis() -> int:
        return 30_000


class Guarded(Bare):
    """The bare handler, called once for each order."""

    def __init__(self, place: Any, redis: str) -> None:
        super().__init__(place)
        config = IdempotencyConfig(event_key_jmespath="order_id", expires_after_seconds=_WEEK)
        config.register_lambda_context(_Context())  # type: ignore[arg-type]
        store = CachePersistenceLayer(url=redis)

        @idempotent_function(data_keyword_argument="event", persistence_store=store, config=config)
        def handle(event: dict[str, Any], message_id: str) -> dict[str, Any]:
            super(Guarded, self).handle(Order.model_validate(event), message_id)
            return {"order_id": event["order_id"]}

        self._guarded = handle

    def handle(self, order: Order, message_id: str) -> None:
        """Behind its record."""
        self._guarded(event=order.model_dump(), message_id=message_id)


def consume(seat: Seat) -> None:
    """One at a time."""
    consumer = Guarded(seat.place(), seat.redis)
    seat.ready()
    consumer.consume_behind(seat.gate)
    consumer.close()
