"""What consumes in a process of its own, to be killed."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from idemp.broker.kombu import KombuBroker
from idemp.broker.port import Ack

if TYPE_CHECKING:
    from multiprocessing.synchronize import Event


def consume(url: str, visible: float, log: str) -> None:
    """Write the body of each message into the log, then ack it, for ever."""
    broker = KombuBroker(url, allow_at_most_once=True, visibility_timeout=visible)
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    receiver = broker.receiver(["work"], prefetch=5)
    while True:
        if (delivery := receiver.receive(1)) is not None:
            os.write(file, delivery.message.body + b"\n")
            receiver.settle(delivery, Ack())


def hold(url: str, visible: float, holding: Event) -> None:
    """Take a message, say so, and do nothing with it."""
    broker = KombuBroker(url, allow_at_most_once=True, visibility_timeout=visible)
    assert broker.receiver(["work"], prefetch=1).receive(30) is not None
    holding.set()
    signal.pause()
