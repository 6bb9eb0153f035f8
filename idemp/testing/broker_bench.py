# ruff: noqa: S101 - tests use this module, and assertions are how they hear from it
"""What tests of brokers work with: a broker with queues of its own, in few words."""

from __future__ import annotations

import json
import threading
import time
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, Any, Self
from uuid import UUID, uuid4

from idemp.broker.port import Ack, Binding, Topology
from idemp.messages import Message, Output, OutputKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from idemp.broker.port import Broker, Delivery, Publisher, Receiver, Refusal


class Bench:
    """A broker with one queue of its own, and what a test needs to use it in few words.

    Args:
        broker: the broker under test.
        name: a prefix that nobody else uses.
        patience: seconds that something which must happen may take.
        quiet: seconds in which something that must not happen would have happened.
        delay: the delay, in seconds, that `Retry` asks for.

    Example:
        >>> from idemp.broker.memory import InMemoryBroker
        >>> with Bench(InMemoryBroker(), "docs", patience=5, quiet=0.1, delay=0.1) as bench:
        ...     sent = bench.send(b"one", b"two")
        ...     [bench.next(bench.receiver()).message.body for _ in range(2)]
        [b'one', b'two']
    """

    def __init__(self, broker: Broker, name: str, *, patience: float, quiet: float, delay: float) -> None:
        self.broker = broker
        self.name = name
        self.queue = f"{name}.queue"
        self.other = f"{name}.other"
        self.exchange = f"{name}.events"
        self.patience = patience
        self.quiet = quiet
        self.delay = timedelta(seconds=delay)
        self.topology = Topology(
            exchange=self.exchange,
            queues=(self.queue, self.other),
            bindings=(
                Binding(self.queue, "orders.*"),
                Binding(self.other, "orders.Placed"),
                Binding(self.other, "stock.#"),
            ),
            delays=(delay,),
        )
        self._ordinals = count()
        self._closing = ExitStack()

    def __enter__(self) -> Self:
        self.broker.declare(self.topology)
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all receivers and publishers; others can be opened."""
        self._closing.close()

    def receiver(self, *, prefetch: int = 10, queue: str | None = None) -> Receiver:
        """A receiver that is closed at the end."""
        receiver = self.broker.receiver([queue or self.queue], prefetch=prefetch)
        self._closing.callback(receiver.close)
        return receiver

    def publisher(self) -> Publisher:
        """A publisher that is closed at the end."""
        publisher = self.broker.publisher()
        self._closing.callback(publisher.close)
        return publisher

    def output(
        self,
        message: Message,
        *,
        exchange: str = "",
        key: str | None = None,
        mandatory: bool = True,
        delayed: bool = False,
    ) -> Output:
        """A message on its way, to the bench's queue if nothing else is said; `delayed` ones take the bench's delay."""
        return Output(
            id=UUID(message.message_id) if message.message_id else uuid4(),
            ordinal=next(self._ordinals),
            kind=OutputKind.PUBLISH if exchange else OutputKind.SEND,
            exchange=exchange,
            routing_key=self.queue if key is None else key,
            message=message,
            mandatory=mandatory,
            delay=self.delay.total_seconds() if delayed else 0.0,
        )

    def publish(self, *outputs: Output) -> list[Refusal | None]:
        """Publish all in one call."""
        return self.publisher().publish(outputs, self.patience)

    def send(self, *bodies: bytes, queue: str | None = None) -> list[str]:
        """Confirmed messages with these bodies in a queue; returns their ids."""
        made = [Message(body=body, message_id=str(uuid4())) for body in bodies]
        answers = self.publish(*(self.output(message, key=queue) for message in made))
        assert answers == [None] * len(made), f"not confirmed: {answers}"
        return [str(message.message_id) for message in made]

    def next(self, receiver: Receiver) -> Delivery:
        """The next delivery, which has to come."""
        delivery = receiver.receive(self.patience)
        assert delivery is not None, f"nothing came within {self.patience} seconds"
        return delivery

    def drain(self, receiver: Receiver, number: int) -> list[Delivery]:
        """So many deliveries, each acked."""
        found = []
        for _ in range(number):
            found.append(self.next(receiver))
            receiver.settle(found[-1], Ack())
        return found

    def eventually(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until something is so: brokers count late."""
        deadline = time.monotonic() + self.patience
        while not condition():
            assert time.monotonic() < deadline, f"not within {self.patience} seconds: {what}"
            time.sleep(0.01)

    def becomes(self, queue: str, depth: int) -> None:
        """Wait until so many messages are ready."""
        self.eventually(lambda: self.broker.depth(queue) == depth, f"{depth} ready messages in {queue}")

    def stays_empty(self, queue: str | None = None) -> None:
        """Nothing is ready, and nothing comes to a new receiver."""
        receiver = self.receiver(queue=queue)
        assert receiver.receive(self.quiet) is None
        receiver.close()
        self.becomes(queue or self.queue, 0)


@contextmanager
def calling(*functions: Callable[[], None]) -> Iterator[Callable[[], int]]:
    """Call functions again and again in a thread; gives the number of rounds, and fails if one raised."""
    stop, rounds, errors = threading.Event(), count(1), list[BaseException]()
    done = [0]

    def run() -> None:
        try:
            while not stop.wait(0.005):
                for function in functions:
                    function()
                done[0] = next(rounds)
        except BaseException as error:  # noqa: BLE001 - told below
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield lambda: done[0]
    finally:
        stop.set()
        thread.join()
    assert not errors, f"keep_alive raised {errors[0]!r}"


def round_trip(bench: Bench, message: Message) -> dict[str, Any]:
    """What arrives when this message is sent, as `comparable` has it."""
    assert bench.publish(bench.output(message)) == [None]
    return comparable(bench.drain(bench.receiver(), 1)[0].message, message)


def comparable(message: Message, sent: Message) -> dict[str, Any]:
    """All fields, told apart by type too; of the headers those that were sent, as adapters may add theirs."""
    names: Sequence[str] = [name for name in message.headers if name in sent.headers]
    headers = {name: json.dumps(message.headers[name], sort_keys=True) for name in sorted(names)}
    fields = (
        "body",
        "type",
        "message_id",
        "content_type",
        "correlation_id",
        "reply_to",
        "timestamp",
        "ttl",
        "priority",
    )
    return {"headers": headers, **{name: getattr(message, name) for name in fields}}
