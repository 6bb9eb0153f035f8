"""A worker that is told to end gives back what no handler has run for: it never acks it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest

from idemp import App, Idempotent, Message
from idemp.broker.memory import InMemoryBroker
from idemp.broker.port import Ack
from idemp.consuming import Consuming, KeptAlive
from idemp.inbox.memory import InMemoryStore
from idemp.messages import Output, OutputKind
from idemp.settings import Settings
from idemp.suspects import Turns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from idemp.broker.memory import MemoryReceiver
    from idemp.broker.port import Delivery, Settlement


class StoppedAtReceipt(InMemoryBroker):
    """Delivers, and the worker is told to end before it begins to handle what was delivered."""

    def __init__(self, deliveries: int) -> None:
        super().__init__()
        self.stop = threading.Event()
        self.settled: list[Settlement] = []
        self._left = deliveries

    def receiver(self, queues: Sequence[str], *, prefetch: int) -> MemoryReceiver:
        made = super().receiver(queues, prefetch=prefetch)
        receive, settle = made.receive, made.settle

        def stopping(timeout: float) -> Delivery | None:
            delivery = receive(timeout)
            self._left -= delivery is not None
            if self._left == 0:
                self.stop.set()
            return delivery

        def watched(delivery: Delivery, settlement: Settlement) -> None:
            self.settled.append(settlement)
            settle(delivery, settlement)

        made.receive, made.settle = stopping, watched  # type: ignore[method-assign]
        return made


@pytest.mark.parametrize(("batch", "messages"), [(1, 1), (3, 3)], ids=["single", "batch"])
def test_what_no_handler_ran_for_is_given_back(batch: int, messages: int) -> None:
    broker, runs = StoppedAtReceipt(messages), []
    app = App("orders", store=InMemoryStore(), broker=broker, settings=Settings())

    @app.handler(dict, type="t", policy=Idempotent(key="id", batch=batch))
    def handle(message: dict[str, Any]) -> None:
        runs.append(message["id"])

    app.start()
    outputs = [
        Output(
            id=UUID(int=number),
            ordinal=0,
            kind=OutputKind.SEND,
            exchange="",
            routing_key="orders",
            message=Message(body=b'{"id":%d}' % number, type="t"),
        )
        for number in range(messages)
    ]
    assert broker.publisher().publish(outputs, 1) == [None] * messages

    Consuming(app, broker.stop, KeptAlive(), Turns(solitary=True)).run()

    assert runs == []
    assert not any(isinstance(settlement, Ack) for settlement in broker.settled)
    assert broker.depth("orders") == messages
    broker.stop = threading.Event()
    stop = broker.stop

    def until_handled() -> None:
        broker.join(60)
        stop.set()

    ending = threading.Thread(target=until_handled)
    ending.start()
    Consuming(app, stop, KeptAlive(), Turns(solitary=True)).run()
    ending.join()
    assert sorted(runs) == list(range(messages))
