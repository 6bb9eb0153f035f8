"""What is fed to the workers."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import UUID

from idemp.errors import ConfigurationError
from idemp.messages import Message, Output, OutputKind

if TYPE_CHECKING:
    from collections.abc import Iterator

ARTICLES = 10
_DUPLICATES_OF_TEN = 2
_MOST_PIECES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How long and how hard the storm is.

    Attributes:
        messages: PlaceOrder messages, duplicates included.
        kills: how often a worker process is killed with SIGKILL.
        seed: of all that is random here; when things happen also depends on the machine.
        workers: worker processes at a time.
        patience: seconds without any progress after which the run is given up.

    Raises:
        ConfigurationError: fewer than ten messages, or no worker.

    Example:
        >>> plan = Plan(messages=10, kills=0, seed=7)
        >>> plan.orders, plan.duplicates, len(list(plan.feed("orders")))
        (8, 2, 10)
    """

    messages: int = 2_000
    kills: int = 20
    seed: int = 0
    workers: int = 3
    patience: float = 60.0

    def __post_init__(self) -> None:
        if self.messages < 10 or self.workers < 1 or self.kills < 0:  # noqa: PLR2004
            raise ConfigurationError("The demo needs at least ten messages and one worker.")

    @property
    def duplicates(self) -> int:
        """Messages that repeat an order; every second one under a message id of its own."""
        return self.messages * _DUPLICATES_OF_TEN // 10

    @property
    def orders(self) -> int:
        """Different orders; they have the numbers 1, 2, 3, ..."""
        return self.messages - self.duplicates

    @property
    def pieces(self) -> int:
        """How many pieces all orders take from the stock when each is handled once."""
        return sum(quantity_of(number) for number in range(1, self.orders + 1))

    def random(self) -> random.Random:
        """A source of random numbers that starts with the seed."""
        return random.Random(self.seed)  # noqa: S311

    def feed(self, queue: str) -> Iterator[Output]:
        """The messages, in the order in which they are sent to a queue."""
        dice = self.random()
        ids = {number: UUID(int=dice.getrandbits(128), version=4) for number in range(1, self.orders + 1)}
        sent = [(number, ids[number]) for number in ids]
        for count, number in enumerate(dice.choices(range(1, self.orders + 1), k=self.duplicates)):
            again = ids[number] if count % 2 else UUID(int=dice.getrandbits(128), version=4)
            sent.append((number, again))
        dice.shuffle(sent)
        for position, (number, message_id) in enumerate(sent):
            yield _output(queue, position, number, message_id)


def quantity_of(order_id: int) -> int:
    """How many pieces an order is about."""
    return order_id % _MOST_PIECES + 1


def _output(queue: str, position: int, order_id: int, message_id: UUID) -> Output:
    body = {"order_id": order_id, "sku": f"sku-{order_id % ARTICLES}", "quantity": quantity_of(order_id)}
    message = Message(body=json.dumps(body).encode(), type="orders.PlaceOrder", message_id=str(message_id))
    return Output(
        id=message_id, ordinal=position, kind=OutputKind.SEND, exchange="", routing_key=queue, message=message
    )
